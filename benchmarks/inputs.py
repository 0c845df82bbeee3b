"""The files that a benchmark reads: one corpus for both sides, a few documents to warm up, and what the rows add.

Both sides read the same file: jsonl for the whole pipeline, else one text shard (Parquet). Peers that take minutes may
be given only the first part of the corpus; costs are then compared per byte, and what a peer spends on any input (some
0.05 s for each of datatrove's executors) weighs more, so a published number comes from a run without that.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks.corpus import SEED, SIZES, Page, changed_words, digest, make_pages, read_texts, write_jsonl, write_shard
from herd.llama3.data.demo.installed import installed_documents
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.tokens.adversarial_strings import adversarial_strings
from herd.llama3.tokens.hf_tokenizer import byte_level_json
from herd.llama3.tokens.tokenizer import train_tokenizer, use_tokenizer
from herd.llama3.tokens.vocabulary import PATTERN

WARM_UP = 20
"""Documents that each side works on before the clock runs."""
NEAR_BYTES = 20_000_000
"""Text on which near-duplicates are compared with all true pairs: about 4,400 documents."""
VOCABULARY = 8_000
"""Base tokens of the tokenizer that is trained where none is given."""
PLAIN = "plain.json"
_FILE_BYTES = 64_000_000
_FOREIGN_BYTES = 1_000_000


@dataclass(frozen=True)
class Input:
    """The same documents as jsonl and as a text shard."""

    jsonl: Path
    shard: Path
    documents: int
    bytes: int
    """Of text, in UTF-8."""


@dataclass(frozen=True)
class Inputs:
    """Everything that `make_inputs` made."""

    folder: Path
    ours: Input
    peers: Input
    warm_up: Input
    near: Input
    """Fewer documents, for recall and precision."""
    parity: Input
    """Hostile strings and text of all domains, for the equality of ids."""
    tokenizer: Path
    """Folder with `tokenizer.model`, `tokenizer.json` and the latter without special tokens, `plain.json`."""
    digest: str


def make_inputs(folder: Path, size: str, peer_bytes: int, corpus: Path | None, tokenizer: Path | None) -> Inputs:
    """Write the inputs of a benchmark of `size` into `folder`.

    `corpus` is a folder of jsonl files, `tokenizer` a tiktoken file; left out, text that is installed here and a
    tokenizer that is trained on it. `peer_bytes` 0: the peers get all. Raises ValueError if there is no text.
    """
    pages = make_pages(read_texts(corpus), SIZES[size])
    if not pages:
        raise ValueError(f"--corpus: {corpus} holds no text of 2,000 characters or more; give a folder that does")
    first = list(_first(pages, peer_bytes)) if peer_bytes else pages
    near = make_pages(read_texts(corpus), min(NEAR_BYTES, SIZES[size]), SEED + 1)
    ours = _write(folder / "ours", pages)
    return Inputs(
        folder,
        ours,
        ours if len(first) == len(pages) else _write(folder / "peers", first),
        _write(folder / "warm-up", list(_warm_up(pages[:WARM_UP]))),
        _write(folder / "near", near),
        _write(folder / "parity", list(_parity_pages())),
        _make_tokenizer(folder / "tokenizer", tokenizer, pages),
        digest(ours.jsonl),
    )


def _warm_up(pages: Sequence[Page]) -> Iterator[Page]:
    """Yield `pages`, each with an exact copy, a near copy and a line that all share: no step finds nothing to do."""
    chance = random.Random(SEED)
    for page in pages:
        shared = f"{page.text}\nThis line stands in every document of the warm-up."
        near = changed_words(shared, 0.001, ["other"], chance)
        yield from (Page(text, f"{page.url}/{place}") for place, text in enumerate((shared, shared, near)))


def _first(pages: Sequence[Page], size: int) -> Iterator[Page]:
    for page in pages:
        if size <= 0:
            return
        size -= page.size
        yield page


def _write(folder: Path, pages: Sequence[Page]) -> Input:
    folder.mkdir(parents=True)
    jsonl, shard = folder / f"{folder.name}.jsonl", folder / f"{folder.name}.parquet"
    write_jsonl(pages, jsonl)
    write_shard(pages, shard)
    return Input(jsonl, shard, len(pages), sum(page.size for page in pages))


def _make_tokenizer(folder: Path, given: Path | None, pages: Sequence[Page]) -> Path:
    made = use_tokenizer(given) if given else train_tokenizer((page.text for page in pages), VOCABULARY)
    made.save(folder)
    (folder / PLAIN).write_text(byte_level_json(made.base, PATTERN))
    return folder


def _parity_pages() -> Iterator[Page]:
    """Yield hostile strings and some text of each domain that this machine has: ids must be equal there too."""
    for place, text in enumerate(adversarial_strings()):
        yield Page(text.encode("utf-8", "replace").decode(), f"https://hostile.example/{place}")
    for domain in DOMAINS:
        size = 0
        for document in installed_documents(domain, "installed", SEED, True):
            size += document.size
            if size > _FOREIGN_BYTES:
                break
            yield Page(document.text.encode("utf-8", "replace").decode(), document.url)


def make_large(folder: Path, source: Path, size: int) -> int:
    """Write jsonl files with `size` bytes of text or a little more, from the pages of `source`, and return the bytes.

    Every round over the pages exchanges letters by another permutation: lengths and lines stay, no shingle, word or
    line of two rounds is equal, so nothing is a duplicate that was none.
    """
    folder.mkdir(parents=True)
    pages = [json.loads(line) for line in source.open()]
    total, number, chance = 0, 0, random.Random(SEED)
    while total < size:
        with (folder / f"{number:05}.jsonl").open("w") as file:
            while total < size and file.tell() < _FILE_BYTES:
                total += _write_round(file, pages, letters(chance), f"{number}-{file.tell()}")
        number += 1
    return total


def _write_round(file: TextIO, pages: Sequence[dict[str, str]], table: dict[int, str], name: str) -> int:
    """Write `pages` with other letters, and `name` in their URLs; return the bytes of text."""
    total = 0
    for page in pages:
        text = page["text"].translate(table)
        file.write(json.dumps({**page, "text": text, "url": f"{page['url']}/{name}"}) + "\n")
        total += len(text.encode())
    return total


def letters(chance: random.Random) -> dict[int, str]:
    letters = list(string.ascii_lowercase)
    chance.shuffle(letters)
    lower = dict(zip(string.ascii_lowercase, letters, strict=True))
    return str.maketrans({**lower, **{one.upper(): other.upper() for one, other in lower.items()}})
