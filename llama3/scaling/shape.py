"""A model shape with a given number of parameters: another one, made larger or smaller in all its proportions.

Width and depth grow together, heads keep their size, the FFN its ratio to the width, key/value heads their number; the
layers then take up what whole heads leave over. Roughly so the published sizes relate: the 8B made larger gives 118
layers of 16,384 for 405B parameters, where Llama 3 has 126 with a narrower FFN. What this gives up: exact numbers, as
whole heads and layers can be a fifth off, and the best aspect ratio, on which the loss depends little (arXiv
2001.08361, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from heapq import nsmallest

from llama3.model.flops import parameter_count
from llama3.recipe.schema import Model

MOST_HEADS = 4096
SPAN = 1.5
"""How much deeper or shallower than in proportion."""
WIDTHS = 3
"""The nearest ones that are tried in every depth."""
PROPORTION = 0.1
"""What a factor in depth over width weighs beside the same factor in the number of parameters."""


def shape_for(parameters: float, like: Model, rows: int) -> Model:
    """Return the shape like `like` with about so many parameters, `rows` embedding rows included."""
    widths = nsmallest(WIDTHS, _widths(like), key=lambda spec: _factor(parameter_count(spec, rows), parameters))

    def off(spec: Model) -> float:
        proportion = _factor(spec.layers / spec.dim, like.layers / like.dim)
        return _factor(parameter_count(spec, rows), parameters) + PROPORTION * proportion

    return min((shape for wide in widths for shape in _depths(wide)), key=off)


def nearest(parameters: float, sizes: Iterable[Model], rows: int) -> Model:
    """Return the shape whose parameter count is off by the smallest factor."""
    return min(sizes, key=lambda spec: _factor(parameter_count(spec, rows), parameters))


def shape_changes(spec: Model, base: Model) -> list[str]:
    """Return the overrides that give a recipe with `base` the shape of `spec`."""
    fields = ("layers", "dim", "ffn", "heads", "kv_heads", "tied_embeddings")
    wanted = {field: getattr(spec, field) for field in fields if getattr(spec, field) != getattr(base, field)}
    return [f"model.{field}={str(value).lower()}" for field, value in wanted.items()]


def _factor(one: float, other: float) -> float:
    return abs(math.log(one / other))


def _depths(wide: Model) -> Iterator[Model]:
    for layers in range(max(1, math.floor(wide.layers / SPAN)), math.ceil(wide.layers * SPAN) + 1):
        yield wide.model_copy(update={"layers": layers})


def _widths(like: Model) -> Iterator[Model]:
    size, ratio = like.dim // like.heads, like.ffn / like.dim
    for heads in range(like.kv_heads, MOST_HEADS, like.kv_heads):
        dim = heads * size
        layers = max(1, round(like.layers * dim / like.dim))
        shape = {"layers": layers, "dim": dim, "ffn": max(8, round(ratio * dim / 8) * 8), "heads": heads}
        yield Model.model_validate({**like.model_dump(), "preset": "custom", **shape})
