"""Our training stream: tokens with the boundaries of their documents, window after window, from the page cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.ours.token_shards import stream_recipe
from herd.llama3.tokens.stream import TokenStream

SEQ = 8192
WINDOW = 128 * SEQ
"""Tokens in a read: 128 sequences of 8,192."""


def work(source: Path, folder: Path, tokens: int) -> dict[str, Any]:
    """Read `tokens` tokens in windows; return how many, and how many segments they fell into."""
    tokens -= tokens % SEQ
    stream = TokenStream(source, stream_recipe(tokens, SEQ))
    segments = 0
    for start in range(0, tokens, WINDOW):
        window = stream.read(start, min(start + WINDOW, tokens))
        segments += len(window.cu_seqlens) - 1
    return {"tokens": tokens, "segments": segments}
