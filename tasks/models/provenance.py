"""What a run was trained on between two positions: the tables of `herd inspect`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from llama3.recipe.units import Tokens
from llama3.tokens.inspect import Count, Inspection, inspect
from llama3.tokens.tokenizer import Tokenizer
from storage.object_artifact import open_store
from storage.page_cache import lazy_folder
from storage.root import Root
from tasks.runs.records import Runs


def parse_span(text: str) -> tuple[int, int]:
    """Return the positions that `A:B` names, such as 120M:121M. Raises ValueError."""
    parts = text.split(":")
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"--tokens: {text!r} is no span; write two positions, such as 120M:121M")
    start, stop = (int(part) if part.isdigit() else int(Tokens.parse(part)) for part in parts)
    if stop <= start:
        raise ValueError(f"--tokens: {text!r} is empty; the second position must be the larger one")
    return start, stop


def inspect_run(root: Root, run: str, tokens: str, limit: int) -> Inspection:
    """Return which documents `run` trains on in the span `tokens`. Raises ValueError if it has no token shards yet."""
    start, stop = parse_span(tokens)
    runs, store = Runs(root), open_store(root)
    record, recipe = runs.find(run), runs.recipe(run)
    if "tokenise" not in record.steps:
        raise ValueError(f"{run} has no token shards yet; let it get past the step tokenise")
    shards = store.at(record.steps["tokenise"].artifact)
    tokenizer = Tokenizer.load(store.at(record.steps["tokenizer"].artifact).path)
    return inspect(lazy_folder(shards, 0), recipe, start, stop, tokenizer=tokenizer, limit=limit)


def inspection_tables(found: Inspection) -> Iterator[Table]:
    """Yield the totals by domain, source, language and licence, then the documents in the order of training."""
    total = found.stop - found.start
    for title, counts in (
        ("domain", found.domains),
        ("source", found.sources),
        ("language", found.languages),
        ("licence", found.licences),
    ):
        yield _totals(title, counts, total)
    yield _documents(found)


def _totals(title: str, counts: dict[str, Count], total: int) -> Table:
    table = _table(title, "tokens", "share", "documents")
    for name, (tokens, documents) in counts.items():
        table.add_row(escape(name), f"{tokens:,}", f"{tokens / total:.2%}", f"{documents:,}")
    return table


def _documents(found: Inspection) -> Table:
    table = _table("position", "tokens", "from", "epoch")
    for name, ratio in (("document", None), ("source", None), ("text", 1)):
        table.add_column(name, justify="left", no_wrap=True, overflow="ellipsis", ratio=ratio)
    table.expand = True
    for use, excerpt in zip(found.documents, found.excerpts or [""] * len(found.documents), strict=True):
        numbers = (use.position, use.last - use.first + 1, use.first, use.epoch)
        text = re.sub(r"\s+", " ", excerpt).strip()
        table.add_row(
            *(f"{n:,}" for n in numbers), use.document[:12], escape(f"{use.leaf}: {use.source}"), escape(text)
        )
    return table


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(first, justify="left", no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
