"""Read curated documents from `documents/<domain>-NNNNN.parquet` in the order of their ids, in bounded batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc
import pyarrow.parquet as pq

from herd.llama3.recipe.base import Domain

Split = Literal["train", "held_out"]


def read_documents(
    folder: Path, domain: Domain, columns: list[str], split: Split = "train", batch_size: int = 256
) -> Iterator[list[dict[str, Any]]]:
    """Yield lists of at most `batch_size` documents of `domain` with `columns`, in the order of their ids.

    Raises ValueError if the folder has no file of the domain.
    """
    files = sorted((folder / "documents").glob(f"{domain}-*.parquet"))
    if not files:
        raise ValueError(
            f"sources.{domain}: {folder / 'documents'} holds no {domain}-*.parquet; curate the domain first"
        )
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=batch_size, columns=[*columns, "split"]):
            chosen = batch.filter(pc.equal(batch.column("split"), split))
            if chosen.num_rows:
                yield chosen.select(columns).to_pylist()


def read_texts(folder: Path, domain: Domain, split: Split, limit: int, but: Collection[int] = ()) -> Iterator[str]:
    """Yield the texts of `domain` in the order of their ids until `limit` bytes of UTF-8 are reached.

    Sources of the domain with an index in `but` are left out.
    """
    taken = 0
    for documents in read_documents(folder, domain, ["text", "source_index"], split, batch_size=64):
        for document in (document for document in documents if document["source_index"] not in but):
            if taken >= limit:
                return
            taken += len(document["text"].encode())
            yield document["text"]


def first_documents(folder: Path, domain: Domain, count: int, columns: list[str]) -> list[dict[str, Any]]:
    """Return up to `count` held-out documents of `domain`, or training documents if no document is held out."""
    splits: tuple[Split, ...] = ("held_out", "train")
    for split in splits:
        batches = read_documents(folder, domain, columns, split, batch_size=64)
        documents = list(islice(chain.from_iterable(batches), count))
        if documents:
            return documents
    return []
