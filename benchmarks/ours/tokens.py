"""Our encoder: text to ids on disk, in batches, by the library that the parity gate admits."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from herd.llama3.tokens.encoder import Encoder, encoder_for
from herd.llama3.tokens.tokenizer import Tokenizer

_BATCH = 1024


def work(source: Path, folder: Path, tokenizer: str) -> dict[str, Any]:
    """Write the ids of all documents, uint32, to `ids.bin` and their counts, int64, to `counts.bin`."""
    encoder = _encoder(tokenizer)
    counts = []
    with (folder / "ids.bin").open("wb") as file:
        for batch in pq.ParquetFile(source).iter_batches(_BATCH, columns=["text"]):
            ids, offsets = encoder.encode_flat(batch.column(0))
            counts.append(np.diff(offsets))
            ids.astype(np.uint32, copy=False).tofile(file)
    np.concatenate(counts).astype(np.int64).tofile(folder / "counts.bin")
    return {"tokens": int(np.concatenate(counts).sum()), "folder": str(folder), "encoder": encoder.version()}


@cache
def _encoder(folder: str) -> Encoder:
    return encoder_for(Tokenizer.load(Path(folder)))
