"""tiktoken: text to ids on disk, by its call that gives an array and knows no special tokens."""

from __future__ import annotations

import base64
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import tiktoken

_BATCH = 256


def work(source: Path, folder: Path, tokenizer: str, pattern: str) -> dict[str, Any]:
    """Write the ids of all documents, uint32, to `ids.bin` and their counts, int64, to `counts.bin`."""
    encoder = _encoder(tokenizer, pattern)
    counts = []
    with (folder / "ids.bin").open("wb") as file:
        for batch in pq.ParquetFile(source).iter_batches(_BATCH, columns=["text"]):
            for text in batch.column(0).to_pylist():
                ids = encoder.encode_to_numpy(text, disallowed_special=())
                counts.append(len(ids))
                ids.astype(np.uint32, copy=False).tofile(file)
    np.asarray(counts, np.int64).tofile(folder / "counts.bin")
    return {"tokens": sum(counts), "folder": str(folder)}


@cache
def _encoder(folder: str, pattern: str) -> tiktoken.Encoding:
    pairs = (line.split() for line in (Path(folder) / "tokenizer.model").read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    return tiktoken.Encoding("bench", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
