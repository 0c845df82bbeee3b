"""Our encoders of a tokenizer in another than the Llama 3 format: the reference, and the one that the gate admits.

It is trained here with the split pattern of GPT-2, and encodes the same first documents by both.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from herd.llama3.tokens.encoder import encoder_for, reference_encoder
from herd.llama3.tokens.tokenizer import train_tokenizer

PATTERN, VOCAB, CHARACTERS = "gpt2", 4_000, 4_000_000


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Return tokens, and for both encoders their name and million tokens per CPU second on one core."""
    texts: list[str] = []
    for batch in pq.ParquetFile(source).iter_batches(256, columns=["text"]):
        texts += batch.column(0).to_pylist()
        if sum(map(len, texts)) > CHARACTERS:
            break
    tokenizer = train_tokenizer(texts, VOCAB, PATTERN)
    facts: dict[str, Any] = {}
    for kind, encoder in (
        ("reference", reference_encoder(tokenizer.vocabulary)),
        ("admitted", encoder_for(tokenizer, texts)),
    ):
        encoder.encode_batch(texts[:1])  # load it
        began = time.process_time()
        ids, _ = encoder.encode_flat(texts)
        facts |= {kind: encoder.version(), f"{kind}_rate": len(ids) / (time.process_time() - began) / 1e6}
        facts["tokens"] = len(ids)
    return facts
