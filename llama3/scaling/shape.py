"""A model shape with a given number of parameters: another one, made larger or smaller in all its proportions.

Width and depth grow together, heads keep their size, the FFN its ratio to the width, key/value heads their number; the
layers then take up what whole heads leave over. Roughly so the published sizes relate: the 8B made larger gives 118
layers of 16,384 for 405B parameters, where Llama 3 has 126 with a narrower FFN. What this gives up: the best aspect
ratio, on which the loss depends little (arXiv 2001.08361, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from llama3.model.flops import parameter_count
from llama3.recipe.schema import Model

MOST_HEADS = 4096
SPAN = 1.25
"""How much deeper or shallower than in proportion."""


def shape_for(parameters: float, like: Model, rows: int) -> Model:
    """Return the shape like `like` whose parameter count, with `rows` embedding rows, is nearest to `parameters`."""

    def off(spec: Model) -> float:
        return abs(math.log(parameter_count(spec, rows) / parameters))

    wide = min(_widths(like), key=off)
    depths = range(max(1, math.floor(wide.layers / SPAN)), math.ceil(wide.layers * SPAN) + 1)
    return min((wide.model_copy(update={"layers": layers}) for layers in depths), key=off)


def shape_changes(spec: Model) -> list[str]:
    """Return the overrides that give a recipe this shape, whatever preset it had."""
    fields = ("layers", "dim", "ffn", "heads", "kv_heads", "tied_embeddings")
    return [f"model.{field}={str(getattr(spec, field)).lower()}" for field in fields]


def _widths(like: Model) -> Iterator[Model]:
    size, ratio = like.dim // like.heads, like.ffn / like.dim
    for heads in range(like.kv_heads, MOST_HEADS, like.kv_heads):
        dim = heads * size
        layers = max(1, round(like.layers * dim / like.dim))
        shape = {"layers": layers, "dim": dim, "ffn": max(8, round(ratio * dim / 8) * 8), "heads": heads}
        yield Model.model_validate({**like.model_dump(), "preset": "custom", **shape})
