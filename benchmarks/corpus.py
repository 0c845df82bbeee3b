"""The text of the benchmark: documents of a few kilobytes, with copies, near-copies and boilerplate planted in them.

Long texts are cut at paragraphs; a seed decides cuts, order and planting, so two machines with the same files measure
the same bytes. Planted: boilerplate lines in 20 % of the documents, exact copies under another URL of 8 %, a newer
version of the same URL of 2 %, one to four near-copies with 0.2 to 8 % of the words changed of 15 %. What this gives
up: planted near-copies differ word by word, those of the web also by whole paragraphs.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from herd.llama3.data.demo.installed import installed_documents
from herd.llama3.data.mapreduce import document_id, text_hash
from herd.llama3.data.text.normalize import normalize
from herd.llama3.data.work_items import ROW_GROUP
from herd.llama3.recipe.base import Domain

SIZES = {"small": 4_000_000, "full": 43_000_000}
"""Bytes of text, about: 1,000 and 9,500 documents."""
SEED = 7
SHORTEST, LONGEST = 2_000, 20_000
"""Characters of a document."""
_MEAN_ABOVE_SHORTEST = 2_500
_PLANTED_GROWTH = 1.53
"""Bytes after planting for each byte before."""
_BOILERPLATE_LINES, _PAGES_PER_LINE = 150, 40
"""Lines that are planted; fewer for few pages, so that each is repeated."""
DOMAIN: Domain = "general"
_SHARD = pa.schema(
    {
        "row": pa.int64(),
        **dict.fromkeys(("id", "text", "domain", "source"), pa.string()),
        "source_index": pa.int32(),
        **dict.fromkeys(("language", "url", "license", "date"), pa.string()),
        "bytes": pa.int64(),
        "draw": pa.uint64(),
    }
)
_REPEATING = ["domain", "source", "language", "license", "date"]
_WORD = re.compile(r"\S+")
_PARAGRAPH = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Page:
    """One document of the benchmark."""

    text: str
    url: str
    date: str = "2023-01-01"

    @property
    def size(self) -> int:
        return len(self.text.encode())


def make_pages(texts: Iterable[str], size: int, seed: int = SEED) -> list[Page]:
    """Return documents of about `size` bytes of text, made from `texts` by `seed`, in an order of chance.

    Fewer where `texts` end before; no text is used twice. Both sides get them normalized: a peer that takes a blank at
    the end of a line for its end sees no punctuation there.
    """
    chance = random.Random(seed)
    pieces = [piece for text in texts for piece in cut(normalize(text), chance)]
    chance.shuffle(pieces)
    taken, total = [], 0
    for piece in pieces:
        if total >= size / _PLANTED_GROWTH:
            break
        taken.append(piece)
        total += len(piece.encode())
    pages = plant([Page(piece, f"https://bench.example/{place}") for place, piece in enumerate(taken)], chance)
    chance.shuffle(pages)
    return pages


def cut(text: str, chance: random.Random) -> Iterator[str]:
    """Yield pieces of `text` that begin and end at a paragraph, of 2,000 to 20,000 characters and about 4,500."""
    piece: list[str] = []
    length, wanted = 0, _wanted(chance)
    for paragraph in (*_PARAGRAPH.split(text.replace("\r\n", "\n").strip()), ""):
        last = not paragraph
        if piece and (last or length >= wanted or length + len(paragraph) > LONGEST):
            whole = "\n\n".join(piece)
            if SHORTEST <= len(whole) <= LONGEST:
                yield whole
            piece, length, wanted = [], 0, _wanted(chance)
        piece.append(paragraph)
        length += len(paragraph) + 2


def _wanted(chance: random.Random) -> float:
    return min(LONGEST // 2, SHORTEST + 2 + chance.expovariate(1 / _MEAN_ABOVE_SHORTEST))


def plant(pages: list[Page], chance: random.Random) -> list[Page]:
    """Return `pages` with boilerplate, exact copies, newer versions and near-copies among them, in order."""
    vocabulary = sorted({word for page in pages[:200] for word in _WORD.findall(page.text)})
    count = min(_BOILERPLATE_LINES, len(pages) // _PAGES_PER_LINE + 1)
    lines = [" ".join(chance.choices(vocabulary, k=chance.randint(4, 14))) for _ in range(count)]
    planted = []
    for place, original in enumerate(pages):
        page = original
        if chance.random() < 0.20:
            page = replace(page, text=_with_lines(page.text, lines, chance))
        planted.append(page)
        if chance.random() < 0.08:
            planted.append(replace(page, url=f"https://mirror.example/{place}"))
        if chance.random() < 0.02:
            planted.append(Page(changed_words(page.text, 0.05, vocabulary, chance), page.url, "2023-06-01"))
        if chance.random() < 0.15:
            for copy in range(chance.randint(1, 4)):
                share = chance.uniform(0.002, 0.08)
                text = changed_words(page.text, share, vocabulary, chance)
                planted.append(Page(text, f"https://near.example/{place}/{copy}"))
    return planted


def _with_lines(text: str, lines: list[str], chance: random.Random) -> str:
    """Return `text` with one to five of `lines` put between its lines."""
    parts = text.split("\n")
    for _ in range(chance.randint(1, 5)):
        parts.insert(chance.randint(0, len(parts)), chance.choice(lines))
    return "\n".join(parts)


def changed_words(text: str, share: float, vocabulary: list[str], chance: random.Random) -> str:
    """Return `text` with `share` of its words, at least one, replaced, left out or doubled by one of `vocabulary`."""
    found = list(_WORD.finditer(text))
    picked = sorted(chance.sample(range(len(found)), max(1, round(share * len(found)))))
    parts, end = [], 0
    for place in picked:
        word, other, kind = found[place], chance.choice(vocabulary), chance.random()
        new = other if kind < 0.6 else "" if kind < 0.8 else f"{word.group()} {other}"
        parts += [text[end : word.start()], new]
        end = word.end()
    return "".join([*parts, text[end:]])


def read_texts(folder: Path | None) -> Iterator[str]:
    """Yield the plain texts of the jsonl files (also .gz) under `folder`; None: prose that is installed here.

    Raises ValueError if the folder has none.
    """
    if folder is None:
        yield from (document.text for document in installed_documents("general", "installed", SEED, True))
        return
    files = sorted(path for path in folder.rglob("*") if path.name.endswith((".jsonl", ".jsonl.gz")))
    if not files:
        raise ValueError(f"--corpus: {folder} holds no .jsonl or .jsonl.gz file; give a folder that does")
    for file in files:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            for record in map(json.loads, lines):
                if record.get("format", "text") == "text":
                    yield record["text"]


def write_jsonl(pages: Iterable[Page], path: Path) -> None:
    """Write `pages` as JSON lines: id, text, url, date."""
    with path.open("w") as file:
        for page in pages:
            key = document_id(page.text, DOMAIN)
            file.write(json.dumps({"id": key, "text": page.text, "url": page.url, "date": page.date}) + "\n")


def write_shard(pages: Iterable[Page], path: Path) -> None:
    """Write `pages` as one text shard of a curation job: the columns and the order that `collect` gives."""
    rows = [
        {
            "id": document_id(page.text, DOMAIN),
            "text": page.text,
            "domain": DOMAIN,
            "source": "bench",
            "source_index": 0,
            "language": "en",
            "url": page.url,
            "license": "unknown",
            "date": page.date,
            "bytes": page.size,
            "draw": text_hash(page.text),
        }
        for page in pages
    ]
    rows.sort(key=lambda row: (row["id"], row["url"], row["date"]))
    table = pa.Table.from_pylist([{"row": place, **row} for place, row in enumerate(rows)], _SHARD)
    pq.write_table(table, path, compression="zstd", row_group_size=ROW_GROUP, use_dictionary=_REPEATING)


def digest(path: Path) -> str:
    """Return the first 16 hex digits of the BLAKE2b of a file: the same bytes were measured if it is the same."""
    return blake2b(path.read_bytes(), digest_size=8).hexdigest()
