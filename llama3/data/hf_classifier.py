"""Quality scores by a transformer (arXiv 2407.21783, section 3.1.1: DistilRoberta), for what a linear model cannot see.

The model is a local folder in Hugging Face layout: `config.json`, `model.safetensors`, `tokenizer.json`. Nothing is
downloaded, unpickled or executed from it. bfloat16 on a GPU, where a score has about two digits; float32 on a CPU, a
few texts per second, for small corpora.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

Metadata = dict[str, Any]
FILES = ("config.json", "model.safetensors", "tokenizer.json")
WINDOW = 512
"""Maximum tokens read of a text."""
LENGTHS = (32, 64, 128, 256, WINDOW)
"""Lengths to which texts are padded on a GPU."""
CHARACTERS = 16 * WINDOW
"""Maximum characters tokenized; 512 tokens practically never reach further."""
_ROWS = 64
# A score must not depend on the other texts of its batch, but the last bits of a matrix product depend on its shape
# and, on a CPU, on the row. So a CPU takes one text at a time, and a GPU takes batches of always 64 rows and one of
# five lengths; a third of its arithmetic is padding.


@dataclass(frozen=True)
class TransformerScorer:
    """A sequence classifier. Score: the probability of the last label, or the sigmoid if there is only one label."""

    model: Any
    tokenizer: Tokenizer
    device: str
    window: int
    pad: int
    batch_size: int
    """Texts per batch; with 1, texts are not padded."""

    @classmethod
    def load(cls, folder: Path, device: str | None = None) -> TransformerScorer:
        """Load the model onto `device` ("cpu" or "cuda"; default: a GPU if available).

        Raises ValueError if the library or a file is missing, or the folder has no sequence classifier.
        """
        check_transformer(folder)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        transformers = importlib.import_module("transformers")
        transformers.logging.disable_progress_bar()
        try:
            model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True, trust_remote_code=False, dtype=dtype,
                output_loading_info=True,
            )  # fmt: skip
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the libraries raise all kinds of errors for a damaged or foreign file
            raise ValueError(f"{folder} holds no sequence classifier that transformers can load ({error})") from error
        if loading["missing_keys"]:  # an encoder without a head loads too, with random head weights
            missing = ", ".join(sorted(loading["missing_keys"])[:3])
            raise ValueError(f"{folder} is not a trained sequence classifier: model.safetensors lacks {missing}")
        # RoBERTa numbers positions from 2, so its last two cannot be used.
        window = min(WINDOW, model.config.max_position_embeddings - 2)
        tokenizer.no_padding()
        tokenizer.enable_truncation(window)
        batch_size = 1 if device == "cpu" else _ROWS
        return cls(model.to(device).eval(), tokenizer, device, window, model.config.pad_token_id or 0, batch_size)

    def scores(self, texts: Any) -> NDArray[np.float64]:
        """Return the score of each text of an Arrow string column: float64[texts], from 0 to 1."""
        encodings = self.tokenizer.encode_batch([text[:CHARACTERS] for text in texts.to_pylist()])
        tokens = [encoding.ids for encoding in encodings]
        scores = np.empty(len(tokens), np.float64)
        if self.batch_size == 1:
            padded = [max(len(ids), 1) for ids in tokens]
        else:
            padded = [min(next(size for size in LENGTHS if size >= len(ids)), self.window) for ids in tokens]
        lengths = np.array(padded, np.int64)
        for length in np.unique(lengths):
            indices = np.flatnonzero(lengths == length)
            for start in range(0, len(indices), self.batch_size):
                batch = indices[start : start + self.batch_size]
                scores[batch] = self._batch([tokens[index] for index in batch], int(length))[: len(batch)]
        return scores

    @torch.inference_mode()
    def _batch(self, tokens: list[list[int]], length: int) -> NDArray[np.float64]:
        ids = torch.full((self.batch_size, length), self.pad, dtype=torch.long)
        mask = torch.zeros((self.batch_size, length), dtype=torch.long)
        mask[:, 0] = 1  # attention over a row without tokens would divide by zero
        for row, text_ids in enumerate(tokens):
            ids[row, : len(text_ids)] = torch.tensor(text_ids, dtype=torch.long)
            mask[row, : len(text_ids)] = 1
        logits = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits.double()
        probability = logits.softmax(-1)[:, -1] if logits.shape[-1] > 1 else logits[:, 0].sigmoid()
        return probability.cpu().numpy()  # type: ignore[no-any-return]


def check_transformer(folder: Path) -> None:
    """Raise ValueError if `folder` cannot be a model for `TransformerScorer`, or the library for it is missing."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} has no {', '.join(missing)}; name a folder with {', '.join(FILES)}")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("a transformer needs the package transformers; pip install transformers")


def transformer_metadata(folder: Path) -> Metadata:
    """Return the identity of the model: its folder and the SHA-256 of its weights."""
    with (folder / "model.safetensors").open("rb") as file:
        digest = sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return {"model": str(folder), "sha256": digest.hexdigest()}


@lru_cache(maxsize=2)
def load_scorer(folder: Path) -> TransformerScorer:
    """Return the scorer of `folder`, loaded once in this process."""
    return TransformerScorer.load(folder)
