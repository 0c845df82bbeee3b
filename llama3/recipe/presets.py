"""Model shapes by name: the published ones and small ones that train on a laptop.

Every number can be overridden in a recipe; a preset only fills what the recipe leaves out. Small presets keep
the proportions of the large ones (FFN 3.5 x dim, grouped-query attention), so that what is learnt on them
carries over. Sources: 8b, 70b, 405b from Table 3 of "The Llama 3 Herd of Models" (arXiv 2407.21783).
"""

from __future__ import annotations

from typing import TypedDict


class Preset(TypedDict):
    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    max_seq: int
    tied_embeddings: bool


def _published(layers: int, dim: int, ffn: int, heads: int) -> Preset:
    return Preset(layers=layers, dim=dim, ffn=ffn, heads=heads, kv_heads=8, max_seq=131_072, tied_embeddings=False)


def _small(layers: int, dim: int, heads: int, kv_heads: int, max_seq: int) -> Preset:
    ffn = dim * 7 // 2
    return Preset(
        layers=layers, dim=dim, ffn=ffn, heads=heads, kv_heads=kv_heads, max_seq=max_seq, tied_embeddings=True
    )


PRESETS: dict[str, Preset] = {
    "8b": _published(32, 4096, 14336, 32),
    "70b": _published(80, 8192, 28672, 64),
    "405b": _published(126, 16384, 53248, 128),
    "1b": Preset(layers=16, dim=2048, ffn=8192, heads=32, kv_heads=8, max_seq=131_072, tied_embeddings=True),
    "100m": _small(12, 768, 12, 4, 8192),
    "30m": _small(8, 512, 8, 4, 4096),
    "6m": _small(6, 256, 4, 2, 2048),
    "3m": _small(4, 192, 4, 2, 2048),
    "tiny": _small(2, 64, 4, 2, 512),
}
