"""Byte-level BPE in the Llama 3 form: one list of byte strings, ranked; 256 special tokens after it.

The ranks are the tokenizer. Ids, the tiktoken file and the Hugging Face file are all derived from them, so a vocabulary
trained here and the published one are the same kind of thing. tiktoken encodes: it is four times as fast as the
`tokenizers` library, which only trains, and it knows no special token, so that no text, however hostile, can produce
one; `<|begin_of_text|>` and its like are put in by id. What this gives up: a vocabulary that is not plain ranked BPE
(SentencePiece, WordPiece) cannot be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Trainable

from llama3.recipe.schema import Recipe
from llama3.recipe.section import DOMAINS, SPECIAL_TOKENS, Domain
from llama3.tokens.documents import first_texts, read_texts
from llama3.tokens.huggingface import CHARACTER, hugging_face_config, hugging_face_json
from storage.filesystem import filesystem_of, is_local, local_path, write_atomic

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where text is cut before any merge (meta-llama/llama-models, models/llama3/tokenizer.py)."""
PLACES = {
    "<|begin_of_text|>": 0,
    "<|end_of_text|>": 1,
    "<|finetune_right_pad_id|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "<|eom_id|>": 8,
    "<|eot_id|>": 9,
    "<|python_tag|>": 10,
}
"""Special tokens with a meaning, counted from the end of the base vocabulary (Llama 3.1 tokenizer)."""
LONGEST_SPACE = 100_000
"""tiktoken's regular expressions give up on about a million blanks in a row; text is cut after this many."""
LONG_SPACE = re.compile(rf"\s{{{LONGEST_SPACE}}}")
MODEL_FILE = "tokenizer.model"


def special_tokens() -> list[str]:
    """Return the names of the 256 special tokens in the order of their ids."""
    named = {place: name for name, place in PLACES.items()}
    free = (f"<|reserved_special_token_{number}|>" for number in range(SPECIAL_TOKENS))
    return [named.get(place) or next(free) for place in range(SPECIAL_TOKENS)]


class Tokenizer:
    """Text to ids and back. `base` is the vocabulary: token of every rank, as bytes."""

    def __init__(self, base: Sequence[bytes]) -> None:
        self.base = tuple(base)
        self.specials = special_tokens()
        ranks = {token: rank for rank, token in enumerate(self.base)}
        self._encoding = tiktoken.Encoding("herd", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

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
        parts = (PATTERN.encode(), self._model_bytes(), "\n".join(self.specials).encode())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`: base ids only, whatever it spells."""
        blanks = LONG_SPACE.finditer(text) if len(text) > LONGEST_SPACE else ()
        cuts = [0, *(match.end() for match in blanks), len(text)]
        ids: list[int] = []
        for start, stop in pairwise(cuts):
            ids += self._encoding.encode_ordinary(text[start:stop])
        return ids

    def encode_batch(self, texts: list[str], *, threads: int = 1) -> list[list[int]]:
        """Return the ids of each text; tiktoken works outside Python's lock, so threads help."""
        if threads == 1 or len(texts) < 2:
            return [self.encode(text) for text in texts]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.encode, texts))

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
        write_atomic(folder / MODEL_FILE, self._model_bytes())
        write_atomic(folder / "tokenizer.json", hugging_face_json(self.base, self.specials, PATTERN))
        write_atomic(folder / "tokenizer_config.json", hugging_face_config(self.specials))

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Return the tokenizer that `save` wrote into `folder`. Raises ValueError if it is missing or broken."""
        return use_tokenizer(folder / MODEL_FILE)

    def _model_bytes(self) -> bytes:
        return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(self.base))


def use_tokenizer(path: Path | str) -> Tokenizer:
    """Return the tokenizer in the tiktoken file `path` (a path or a URI): lines of base64 token, blank, rank.

    Raises ValueError if it cannot be read, is another format, or does not rank every single byte.
    """
    uri = str(path)
    try:
        data: bytes = filesystem_of(uri).cat_file(str(local_path(uri)) if is_local(uri) else uri)
    except OSError as error:
        raise ValueError(f"tokenizer.use: {path} cannot be read ({error}); give a tiktoken tokenizer.model") from error
    return Tokenizer(_parse_ranks(data, uri))


def _parse_ranks(data: bytes, name: str) -> list[bytes]:
    base = []
    for number, line in enumerate(filter(None, data.splitlines())):
        try:
            token, rank = line.split()
            base.append(base64.b64decode(token, validate=True))
            in_order = int(rank) == number
        except ValueError as error:
            raise ValueError(
                f"tokenizer.use: {name}, line {number + 1}: {line[:40]!r} is not 'base64 rank'; "
                "give a tiktoken tokenizer.model, or train: {vocab: ...}"
            ) from error
        if not in_order:
            raise ValueError(f"tokenizer.use: {name}, line {number + 1}: rank {int(rank)} where {number} is due")
    missing = 256 - len({token for token in base if len(token) == 1})
    if missing or len(set(base)) != len(base):
        raise ValueError(
            f"tokenizer.use: {name}: {missing} of 256 single bytes missing, {len(base) - len(set(base))} tokens twice; "
            "the file is damaged or no byte-level BPE"
        )
    return base


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Return a tokenizer of `vocab` base tokens learnt from `texts`; the same texts give the same tokenizer.

    Raises ValueError if `vocab` is below 256 or the texts hold too few repeated pairs to fill it.
    """
    if vocab < 256:
        raise ValueError(f"tokenizer.train.vocab: {vocab} is below 256, the number of bytes; raise it")
    trainable = Trainable(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    trainable.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, min_frequency=2, show_progress=False, initial_alphabet=list(CHARACTER.values())
    )
    trainable.train_from_iterator(texts, trainer)
    return Tokenizer(_ranked(trainable.get_vocab(), vocab))


def _ranked(learnt: dict[str, int], vocab: int) -> list[bytes]:
    if len(learnt) < vocab:
        raise ValueError(
            f"tokenizer.train.vocab: {vocab} tokens asked, but the text repeats only enough for {len(learnt)}; "
            f"add text, raise tokenizer.train.sample, or lower vocab to {len(learnt)}"
        )
    byte = {character: value for value, character in CHARACTER.items()}
    return [bytes(byte[character] for character in token) for token in sorted(learnt, key=learnt.__getitem__)]


def make_tokenizer(recipe: Recipe, documents: Path, folder: Path) -> dict[str, Any]:
    """Train or load the tokenizer that `recipe` asks for and save it into `folder`.

    Text to learn from is the first training documents of each domain, in the order of their ids, in the shares of the
    first stage's mix. Returns facts: vocab, rows, digest, sample_bytes and bytes_per_token by domain (the latter on
    held-out documents). Raises ValueError as `train_tokenizer` and `use_tokenizer` do.
    """
    sample = dict.fromkeys(recipe.sources, 0)
    if recipe.tokenizer.train is None:
        tokenizer = use_tokenizer(str(recipe.tokenizer.use))
    else:
        tokenizer = train_tokenizer(_sample(recipe, documents, sample), recipe.tokenizer.train.vocab)
    tokenizer.save(folder)
    return {
        "vocab": len(tokenizer.base),
        "rows": tokenizer.rows,
        "digest": tokenizer.digest,
        "sample_bytes": sample,
        "bytes_per_token": {domain: _bytes_per_token(tokenizer, documents, domain) for domain in _domains(recipe)},
    }


def _domains(recipe: Recipe) -> list[Domain]:
    return [domain for domain in DOMAINS if recipe.sources.get(domain)]


def _sample(recipe: Recipe, documents: Path, counts: dict[Domain, int]) -> Iterator[str]:
    """Yield the texts to learn from and add their bytes to `counts`."""
    assert recipe.tokenizer.train is not None
    for domain, share in recipe.mix[recipe.stages[0].mix].items():
        for text in read_texts(documents, domain, "train", int(share * recipe.tokenizer.train.sample)):
            counts[domain] += len(text.encode())
            yield text


def _bytes_per_token(tokenizer: Tokenizer, documents: Path, domain: Domain) -> float | None:
    texts = first_texts(documents, domain, 64)
    tokens = sum(len(ids) for ids in tokenizer.encode_batch(texts))
    return round(sum(len(text.encode()) for text in texts) / tokens, 4) if tokens else None
