"""Model shapes by name; a recipe can override each number.

8b, 70b and 405b: Table 3 of "The Llama 3 Herd of Models" (arXiv 2407.21783). Small presets keep the proportions of the
large ones (FFN 3.5 x dim, grouped-query attention).
"""

from __future__ import annotations

from typing import Any

_FIELDS = ("layers", "dim", "ffn", "heads", "kv_heads", "max_seq_len", "tied_embeddings")
_SHAPES = {
    "8b": (32, 4096, 14336, 32, 8, 131_072, False),
    "70b": (80, 8192, 28672, 64, 8, 131_072, False),
    "405b": (126, 16384, 53248, 128, 8, 131_072, False),
    "1b": (16, 2048, 8192, 32, 8, 131_072, True),
    "100m": (12, 768, 2688, 12, 4, 8192, True),
    "30m": (8, 512, 1792, 8, 4, 4096, True),
    "6m": (6, 256, 896, 4, 2, 2048, True),
    "3m": (4, 192, 672, 4, 2, 2048, True),
    "tiny": (2, 64, 224, 4, 2, 512, True),
}
PRESETS: dict[str, dict[str, Any]] = {name: dict(zip(_FIELDS, shape, strict=True)) for name, shape in _SHAPES.items()}
