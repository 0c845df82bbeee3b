"""What a pipeline stage sends, by arithmetic: the same records as the engine's own trace, without torch.

The trace (`llama3.parallel.comm_trace`) runs the engine and takes a second; a search of thousands of layouts needs
microseconds. Tests hold the two against each other to the byte, for every axis, phase and place, so that a change of
the engine that sends more cannot go unnoticed here. Given up: in how many pieces the loss adds up its sums, which
depends on the device and not on the layout; bytes are the same.

Shapes: T tokens of a micro-batch after the gather of tensor parallelism, D model, K E features of all key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from llama3.parallel.comm_records import NAMES, Collective, transfers
from llama3.parallel.layout import Layout
from llama3.parallel.memory import Load, PipelineStage, layer_elements, shards
from llama3.recipe.sections import Model

WIDE = {4: "float32", 8: "float64"}


def stage_volumes(
    part: PipelineStage, spec: Model, rows: int, layout: Layout, world: int, load: Load
) -> list[Collective]:
    """Return what a process of this stage sends in a step."""
    found = [
        *_tensor_layers(part, spec, layout, load),
        *_tensor_ends(part, spec, rows, layout, load),
        *_context(part, spec, layout, load),
        *_weights(part, spec, rows, layout, world, load),
        *transfers(part.number, spec, layout, load),
    ]
    return [one for one in found if one.count]


def _tensor_layers(part: PipelineStage, spec: Model, layout: Layout, load: Load) -> Iterator[Collective]:
    """Yield the two gathers and two scatters of a layer (arXiv 2205.05198, section 4.2), and what is made again.

    Gathered inputs are not kept: each is gathered once more in the backward pass. The last scatter of what is
    recomputed is not done again, since nothing needs its result.
    """
    if layout.tp == 1:
        return
    layers, whole, dtype = len(part.layers), _residual(spec, layout, load), NAMES[load.compute]
    again = {"none": 0, "selective": 1, "full": 2}[layout.recompute] if layout.compile else 2
    scatters = 3 if layout.recompute == "full" else 2

    def one(kind: str, phase: str, count: int, size: int = whole) -> Collective:
        return Collective(kind, "tp", phase, "each", "layer", size, dtype, layout.tp, count * layers)

    yield one("all-gather", "forward", 2)
    yield one("reduce-scatter", "forward", 2)
    yield one("all-gather", "backward", 2 + again)
    yield one("reduce-scatter", "backward", scatters)
    yield one("all-reduce", "backward", 2, spec.dim * load.narrow)  # gradients of the norms


def _tensor_ends(part: PipelineStage, spec: Model, rows: int, layout: Layout, load: Load) -> Iterator[Collective]:
    """Yield what embedding, last norm and loss exchange."""
    if layout.tp == 1:
        return
    whole, dtype, wide = _residual(spec, layout, load), NAMES[load.compute], WIDE[load.wide]

    def one(kind: str, phase: str, size: int, dtype: str, count: int = 1) -> Collective:
        return Collective(kind, "tp", phase, "each", "ends", size, dtype, layout.tp, count)

    if part.first:
        yield one("reduce-scatter", "forward", whole, dtype)
        yield one("all-gather", "backward", whole, dtype)
    if part.last:
        yield one("all-gather", "forward", whole, dtype)
        yield one("reduce-scatter", "backward", whole, dtype)
        yield one("all-reduce", "forward", _tokens(layout, load) * load.wide, wide, 3)  # largest, sum, own logit
        yield one("all-reduce", "backward", spec.dim * load.master, wide)


def _context(part: PipelineStage, spec: Model, layout: Layout, load: Load) -> Iterator[Collective]:
    """Yield the gathers of keys and values (arXiv 2407.21783, section 3.3.2), which are made again and not kept."""
    if layout.cp == 1:
        return
    heads = spec.kv_heads // layout.tp
    both = load.micro_batch * load.seq * 2 * heads * (spec.dim // spec.heads) * load.narrow
    again = 0 if layout.compile and layout.recompute != "full" else 1
    for kind, phase, count in (
        ("all-gather", "forward", 1),
        ("all-gather", "backward", again),
        ("reduce-scatter", "backward", 1),
    ):
        dtype = NAMES[load.compute]
        yield Collective(kind, "cp", phase, "each", "layer", both, dtype, layout.cp, count * len(part.layers))


def _weights(
    part: PipelineStage, spec: Model, rows: int, layout: Layout, world: int, load: Load
) -> Iterator[Collective]:
    """Yield FSDP's gathers of weights and reductions of gradients, layer by layer, and of the ends as one group."""
    pieces = shards(layout, world)
    _, layer = layer_elements(spec, layout.tp, pieces)
    ends = sum(weight.gathered(layout.tp, pieces) for weight in part.ends(spec, rows))
    for place, elements, count, compute in (("layer", layer, len(part.layers), True), ("ends", ends, 1, False)):
        if not elements:
            continue
        size = elements * (load.narrow if compute else load.master)
        kind = NAMES[load.compute] if compute else WIDE[load.master]
        if pieces > 1:
            again = layout.zero == 3 and compute
            when = "each" if again else "first"
            yield Collective("all-gather", "fsdp", "forward", when, place, size, kind, pieces, count)
            if again:
                yield Collective("all-gather", "fsdp", "backward", "each", place, size, kind, pieces, count)
            reduced = elements * load.reduced
            yield Collective(
                "reduce-scatter", "fsdp", "backward", "last", place, reduced, WIDE[load.reduced], pieces, count
            )
        if layout.replicas > 1:
            mine = elements // pieces * load.reduced
            yield Collective(
                "all-reduce", "replica", "backward", "last", place, mine, WIDE[load.reduced], layout.replicas, count
            )


def _tokens(layout: Layout, load: Load) -> int:
    return load.micro_batch * load.seq // layout.cp


def _residual(spec: Model, layout: Layout, load: Load) -> int:
    """Return the bytes of [B, S, D], all tokens of this process's tensor-parallel group."""
    return _tokens(layout, load) * spec.dim * load.narrow
