"""Sizes of the weights that each process holds, by arithmetic: which stage, which cut, which shard. No torch.

The planner and the memory table ask this for any number of processes without building anything; tests hold it against
the parts that `llama3.parallel.build` makes. FSDP cuts the first dimension of a tensor-parallel part into equal pieces,
rounded up, so the last processes of an uneven cut hold less, or nothing, but set the same memory aside.

Shapes: D model, F hidden of the feed-forward block, V vocabulary rows, K E features of all key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

from llama3.parallel.layout import Layout
from llama3.parallel.schedule import split_layers
from llama3.recipe.schema import Model


@dataclass(frozen=True)
class Weight:
    """One parameter: its global shape and the dimension that tensor parallelism cuts (None: whole on every process)."""

    name: str
    shape: tuple[int, ...]
    cut: int | None

    def part(self, tp: int) -> tuple[int, ...]:
        """Return the shape of a tensor-parallel process's part."""
        return tuple(size // tp if dim == self.cut else size for dim, size in enumerate(self.shape))

    def gathered(self, tp: int, shards: int) -> int:
        """Return the elements of the part as FSDP gathers it over `shards` processes, padding included."""
        return self.slot(tp, shards) * shards

    def slot(self, tp: int, shards: int) -> int:
        """Return the elements that every process sets aside for its shard."""
        first, *rest = self.part(tp)
        return -(-first // shards) * prod(rest)

    def held(self, tp: int, shards: int, rank: int) -> int:
        """Return the elements that process `rank` of `shards` really holds."""
        first, *rest = self.part(tp)
        size = -(-first // shards)
        return min(size, max(0, first - rank * size)) * prod(rest)


@dataclass(frozen=True)
class Stage:
    """A part of the model: some layers, the embedding if it is first, norm and output if it is last."""

    number: int
    layers: range
    first: bool
    last: bool

    def ends(self, spec: Model, rows: int) -> Iterator[Weight]:
        """Yield the weights outside of layers."""
        if self.first:
            yield Weight("embedding.weight", (rows, spec.dim), 0)
        if self.last:
            yield Weight("norm.weight", (spec.dim,), None)
        if self.last and not spec.tied_embeddings:
            yield Weight("output.weight", (rows, spec.dim), 0)

    def weights(self, spec: Model, rows: int) -> Iterator[Weight]:
        """Yield every weight of the stage, under the names of the whole model."""
        yield from self.ends(spec, rows)
        for layer in self.layers:
            for weight in layer_weights(spec):
                yield Weight(f"layers.{layer}.{weight.name}", weight.shape, weight.cut)


def layer_weights(spec: Model) -> tuple[Weight, ...]:
    """Return the weights of one layer: o and down are cut by input features, the other matrices by output features."""
    return _layer_weights(spec.dim, spec.ffn, spec.kv_heads * (spec.dim // spec.heads))


@cache
def _layer_weights(dim: int, ffn: int, narrow: int) -> tuple[Weight, ...]:
    return (
        Weight("attention_norm.weight", (dim,), None),
        Weight("attention.q.weight", (dim, dim), 0),
        Weight("attention.k.weight", (narrow, dim), 0),
        Weight("attention.v.weight", (narrow, dim), 0),
        Weight("attention.o.weight", (dim, dim), 1),
        Weight("ffn_norm.weight", (dim,), None),
        Weight("ffn.gate.weight", (ffn, dim), 0),
        Weight("ffn.up.weight", (ffn, dim), 0),
        Weight("ffn.down.weight", (dim, ffn), 1),
    )


def layer_elements(spec: Model, tp: int, pieces: int) -> tuple[int, int]:
    """Return the elements that a process sets aside for its shard of a layer, and that FSDP gathers of it."""
    return _layer_elements(layer_weights(spec), tp, pieces)


@cache  # a search of layouts asks thousands of times
def _layer_elements(weights: tuple[Weight, ...], tp: int, pieces: int) -> tuple[int, int]:
    return sum(one.slot(tp, pieces) for one in weights), sum(one.gathered(tp, pieces) for one in weights)


def stages(spec: Model, layout: Layout, pipeline_rank: int) -> list[Stage]:
    """Return the stages that a pipeline rank holds: every pp-th one, from its own number."""
    last = layout.stages - 1
    ranges = split_layers(spec.layers, layout.stages)
    return [Stage(n, ranges[n], n == 0, n == last) for n in range(pipeline_rank, layout.stages, layout.pp)]


@dataclass(frozen=True)
class Place:
    """Coordinates of a rank in the mesh [dp, pp, cp, tp], tp innermost."""

    dp: int
    pp: int
    cp: int
    tp: int

    @classmethod
    def of(cls, rank: int, layout: Layout) -> Place:
        """Return where `rank` stands."""
        rest, tp = divmod(rank, layout.tp)
        rest, cp = divmod(rest, layout.cp)
        dp, pp = divmod(rest, layout.pp)
        return cls(dp, pp, cp, tp)


def shards(layout: Layout, world: int) -> int:
    """Return over how many processes FSDP cuts each part: dp and cp together, within one replica."""
    return layout.dp(world) // layout.replicas * layout.cp


def local_parameters(spec: Model, rows: int, layout: Layout, world: int, rank: int) -> int:
    """Return how many parameters `rank` holds; what tensor parallelism does not cut counts on each of its processes."""
    place, pieces = Place.of(rank, layout), shards(layout, world)
    within = place.dp % (layout.dp(world) // layout.replicas)
    mine = within * layout.cp + place.cp
    parts = stages(spec, layout, place.pp)
    return sum(weight.held(layout.tp, pieces, mine) for stage in parts for weight in stage.weights(spec, rows))
