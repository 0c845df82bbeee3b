"""Byte-level BPE in the Llama 3 form: one list of byte strings, ranked; 256 special tokens after it.

The ranks are the tokenizer. Ids, the tiktoken file and the Hugging Face file are all derived from them, so a vocabulary
trained here and the published one are the same kind of thing. One text is encoded by tiktoken, many by whatever passes
the gate of parity.py; neither knows a special token, so that no text, however hostile, can produce one;
`<|begin_of_text|>` and its like are put in by id. What this gives up: a vocabulary that is not plain ranked BPE
(SentencePiece, WordPiece) cannot be loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from llama3.recipe.schema import Recipe
from llama3.recipe.section import Domain
from llama3.tokens.documents import read_texts
from llama3.tokens.encoder import Encoder, Flat, Ids, TiktokenEncoder
from llama3.tokens.fertility import held_out, ratios
from llama3.tokens.huggingface import hugging_face_config, hugging_face_json
from llama3.tokens.huggingface_reader import parse_hugging_face
from llama3.tokens.parity import encoder_for
from llama3.tokens.train_bpe import train_bpe
from llama3.tokens.vocabulary import PATTERN, PLACES, parse_tiktoken, special_tokens, tiktoken_bytes
from storage.filesystem import filesystem_of, is_local, local_path, write_atomic

MODEL_FILE = "tokenizer.model"


class Tokenizer:
    """Text to ids and back. `base` is the vocabulary: token of every rank, as bytes."""

    def __init__(self, base: Sequence[bytes]) -> None:
        self.base = tuple(base)
        self.specials = special_tokens()
        self._reference = TiktokenEncoder(self.base)
        self._encoder: Encoder | None = None

    @property
    def rows(self) -> int:
        """Ids there are: base and special; the height of the embedding."""
        return len(self.base) + len(self.specials)

    @property
    def begin(self) -> int:
        """Id of `<|begin_of_text|>`."""
        return len(self.base) + PLACES["<|begin_of_text|>"]

    @property
    def end(self) -> int:
        """Id of `<|end_of_text|>`."""
        return len(self.base) + PLACES["<|end_of_text|>"]

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that decides an id: cutting pattern, ranks, special tokens."""
        parts = (PATTERN.encode(), tiktoken_bytes(self.base), "\n".join(self.specials).encode())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`: base ids only, whatever it spells."""
        return self._reference.encode(text)

    def encode_batch(self, texts: pa.Array | Sequence[str], *, threads: int = 1) -> list[Ids]:
        """Return the ids of each text, as `encode` gives them, as uint32 arrays."""
        return self._encoder_for(texts).encode_batch(texts, threads=threads)

    def encode_flat(self, texts: pa.Array | Sequence[str], *, threads: int = 1) -> Flat:
        """Return the ids of all texts in one array, and len(texts) + 1 offsets; a text is ids[offsets[i]:offsets[i+1]].

        `texts` is an Arrow array of strings (best: large_string, taken without a copy) or a sequence of str. Raises
        ValueError if one is null.
        """
        return self._encoder_for(texts).encode_flat(texts, threads=threads)

    def _encoder_for(self, texts: pa.Array | Sequence[str]) -> Encoder:
        """Return the encoder for many texts, chosen at the first call; `texts` are then the gate's sample."""
        if self._encoder is None:
            self._encoder = encoder_for(self, texts)
        return self._encoder

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of `ids`; special tokens are left out, or with `special` written by name.

        Bytes that are not UTF-8 (a character cut in two) become U+FFFD. Raises ValueError for an id out of range.
        """
        return b"".join(self._bytes(token, special) for token in ids).decode("utf-8", errors="replace")

    def _bytes(self, token: int, special: bool) -> bytes:
        if 0 <= token < len(self.base):
            return self.base[token]
        if not len(self.base) <= token < self.rows:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.rows} rows; is this its tokenizer?")
        return self.specials[token - len(self.base)].encode() if special else b""

    def save(self, folder: Path) -> None:
        """Write `tokenizer.model` (tiktoken), `tokenizer.json` and `tokenizer_config.json` (Hugging Face)."""
        write_atomic(folder / MODEL_FILE, tiktoken_bytes(self.base))
        write_atomic(folder / "tokenizer.json", hugging_face_json(self.base, self.specials, PATTERN))
        write_atomic(folder / "tokenizer_config.json", hugging_face_config(self.specials))

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Return the tokenizer that `save` wrote into `folder`. Raises ValueError if it is missing or broken."""
        return use_tokenizer(folder / MODEL_FILE)


def use_tokenizer(path: Path | str) -> Tokenizer:
    """Return the tokenizer in `path` (a path or a URI): a tiktoken file or a Hugging Face `tokenizer.json`.

    Raises ValueError if it cannot be read, is another format or kind, or does not rank every single byte.
    """
    uri = str(path)
    try:
        data: bytes = filesystem_of(uri).cat_file(str(local_path(uri)) if is_local(uri) else uri)
    except OSError as error:
        raise ValueError(f"tokenizer.use: {path} cannot be read ({error}); give a tiktoken tokenizer.model") from error
    parse = parse_hugging_face if data.lstrip().startswith(b"{") else parse_tiktoken
    return Tokenizer(parse(data, uri))


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Return a tokenizer of `vocab` base tokens learnt from `texts`; the same texts give the same tokenizer.

    Raises ValueError if `vocab` is below 256 or the texts hold too few repeated pairs to fill it.
    """
    return Tokenizer(train_bpe(texts, vocab))


def make_tokenizer(recipe: Recipe, documents: Path, folder: Path) -> dict[str, Any]:
    """Train or load the tokenizer that `recipe` asks for and save it into `folder`.

    Text to learn from is the first training documents of each domain, in the order of their ids, in the shares of
    `tokenizer.train.mix`; sources that stand apart give none, so that a tokenizer does not depend on candidates.
    Returns facts: vocab, rows, digest, sample_bytes by domain, and on held-out documents what `fertility.ratios` gives.
    Raises ValueError as `train_tokenizer` and `use_tokenizer` do.
    """
    sample = dict.fromkeys(recipe.sources, 0)
    if recipe.tokenizer.train is None:
        tokenizer = use_tokenizer(str(recipe.tokenizer.use))
    else:
        tokenizer = train_tokenizer(_sample(recipe, documents, sample), recipe.tokenizer.train.vocab)
    tokenizer.save(folder)
    rows = held_out(documents, recipe)
    _, offsets = tokenizer.encode_flat([row["text"] for row in rows])
    return {
        "vocab": len(tokenizer.base),
        "rows": tokenizer.rows,
        "digest": tokenizer.digest,
        "sample_bytes": sample,
        **ratios(rows, (offsets[1:] - offsets[:-1]).tolist()),
    }


def _sample(recipe: Recipe, documents: Path, counts: dict[Domain, int]) -> Iterator[str]:
    """Yield the texts to learn from and add their bytes to `counts`."""
    assert recipe.tokenizer.train is not None
    for domain, share in recipe.tokenizer_mix.items():
        asked, apart = int(share * recipe.tokenizer.train.sample), recipe.places_apart(domain)
        for text in read_texts(documents, domain, "train", asked, apart):
            counts[domain] += len(text.encode())
            yield text
