"""Hugging Face tokenizers: text to ids on disk, in batches, by its faster call.

Without the special tokens, or text that spells one would become one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from tokenizers import Tokenizer

_BATCH = 256


def work(source: Path, folder: Path, tokenizer: str) -> dict[str, Any]:
    """Write the ids of all documents, uint32, to `ids.bin` and their counts, int64, to `counts.bin`."""
    encoder = _encoder(tokenizer)
    counts = []
    with (folder / "ids.bin").open("wb") as file:
        for batch in pq.ParquetFile(source).iter_batches(_BATCH, columns=["text"]):
            for encoded in encoder.encode_batch_fast(batch.column(0).to_pylist(), add_special_tokens=False):
                ids = encoded.ids
                counts.append(len(ids))
                np.asarray(ids, np.uint32).tofile(file)
    np.asarray(counts, np.int64).tofile(folder / "counts.bin")
    return {"tokens": sum(counts), "folder": str(folder)}


@cache
def _encoder(folder: str) -> Tokenizer:
    return Tokenizer.from_file(str(Path(folder) / "plain.json"))
