"""What the gates of a long-context stage measure: is short context as good as before, and is the length usable?

`eval/short-context` is bits per byte of held-out documents in windows of the sequence length before the stage; the same
number of the checkpoint that the stage started from is what it is compared with. `eval/needle` is the share of hidden
sentences found again in text of the new length. Only measured here; the gate's rule is applied by `decide`. What this
gives up: the model is read whole into one device, as for every evaluation.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama3.evaluate.held_out import ValidationDocument, held_out
from llama3.evaluate.needle import KEY as NEEDLE
from llama3.evaluate.needle import find_needles
from llama3.evaluate.requests import from_documents
from llama3.evaluate.scores import Score, samples, score, write_scores
from llama3.evaluate.statistics import Estimate
from llama3.evaluate.suite import BPB, overall
from llama3.evaluate.task import Request, Task, digest
from llama3.model.files import load_model
from llama3.recipe.schema import Recipe

if TYPE_CHECKING:
    from llama3.model.transformer import Transformer
    from llama3.tokens.tokenizer import Tokenizer

SHORT_CONTEXT = "eval/short-context"
BYTES_PER_POSITION = 4
"""UTF-8 bytes of a document for each position of the window: about one window of English."""
METRICS = {"short-context": SHORT_CONTEXT, "needle": NEEDLE}
"""Gate of a recipe -> the score that its rule judges."""


def measure(
    recipe: Recipe,
    model: Path,
    documents: Path,
    folder: Path,
    *,
    short: int | None,
    needle: int | None,
    device: str = "auto",
) -> dict[str, Any]:
    """Score the model in folder `model`, which also holds its tokenizer, and write `scores.parquet` into `folder`.

    `short` is the window of the short-context score and `needle` the length of the haystacks, in positions; None leaves
    a score out. Texts are the held-out documents of the curated folder `documents`. Returns {key: value} of the
    scores, and of a haystack `text_tokens`. Raises ValueError if there are none, or no room for a needle.
    """
    import torch

    from llama3.tokens.tokenizer import Tokenizer

    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    coder = Tokenizer.load(model)
    network = load_model(model, dtype=torch.float32, device=where)
    scores: dict[str, Score] = {}
    facts: dict[str, Any] = {}
    if short is not None:
        chosen = held_out(documents, recipe.evaluate.documents, BYTES_PER_POSITION * short)
        scores |= _short_context(recipe, network, coder, chosen, short, where)
    if needle is not None:
        chosen = held_out(documents, recipe.evaluate.documents, BYTES_PER_POSITION * needle)
        texts = [document.text for document in chosen]
        found = find_needles(network, coder, texts, [needle], recipe.evaluate.needles, where)
        scores |= found.scores()
        facts["text_tokens"] = found.text_tokens
    folder.mkdir(parents=True, exist_ok=True)
    write_scores(scores, folder)
    return {**{key: scores[key].value for key in sorted(scores)}, **facts}


def _short_context(
    recipe: Recipe, model: Transformer, coder: Tokenizer, documents: list[ValidationDocument], window: int, device: str
) -> dict[str, Score]:
    """Return bits per byte by domain and their mean by the first stage's mix, documents read in windows."""
    from llama3.evaluate.scoring import score_requests

    domains = sorted({document.domain for document in documents})
    parts: dict[str, Estimate] = {}
    asked: list[Request] = []
    found: dict[str, Score] = {}
    for domain in domains:
        key = f"{SHORT_CONTEXT}/{domain}"
        task = Task(key, "bits", tuple(from_documents(key, (d for d in documents if d.domain == domain))))
        found[key] = score(task, samples(task, score_requests(model, coder, task.requests, window, device)))
        parts[f"{BPB}/{domain}"] = found[key].estimate
        asked += task.requests
    mean = Score.of(SHORT_CONTEXT, overall(recipe, parts), "bits per byte", "lower", digest(asked), None)
    return {**found, SHORT_CONTEXT: mean}
