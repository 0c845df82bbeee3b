"""Messages of a pipeline stage in a step, by arithmetic: the same records as the engine's trace, without torch.

The trace (`herd.llama3.parallel.comm_trace`) runs the engine and takes a second; a search of thousands of layouts needs
microseconds. Tests compare the two to the byte, for every axis, phase and place. The loss may split its sums into
other pieces, depending on the device. T tokens, D model, K E features of all key/value heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from math import prod

from herd.llama3.model.param_table import layer_params
from herd.llama3.parallel.comm_records import NAMES, Collective, transfers
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load, PipelineStage, layer_elements, shard_elements, shards
from herd.llama3.recipe.sections import Model

WIDE = {4: "float32", 8: "float64"}


def stage_volumes(
    stage: PipelineStage, config: Model, vocab_size: int, layout: Layout, world: int, load: Load
) -> list[Collective]:
    """Return the messages of a process of this stage in a step."""
    tokens = load.micro_batch * load.seq_len // layout.cp
    residual = tokens * config.dim * load.narrow  # [T, D], all tokens of this process's tensor-parallel group
    messages = [
        *(_tensor_layers(stage, config, layout, load, residual) if layout.tp > 1 else ()),
        *(_tensor_ends(stage, config, layout, load, residual) if layout.tp > 1 else ()),
        *(_context(stage, config, layout, load) if layout.cp > 1 else ()),
        *_weights(stage, config, vocab_size, layout, world, load),
        *transfers(stage.number, config, layout, load),
    ]
    return [message for message in messages if message.count]


def _tensor_layers(
    stage: PipelineStage, config: Model, layout: Layout, load: Load, residual: int
) -> Iterator[Collective]:
    """Yield the two gathers and two scatters of a layer (arXiv 2205.05198, section 4.2), and those of recomputation.

    Gathered inputs are not kept: each is gathered again in the backward pass. The last scatter of a recomputed layer
    is skipped, since nothing needs its result.
    """
    layers, dtype = len(stage.layers), NAMES[load.precision]
    again = {"none": 0, "selective": 1, "full": 2}[layout.recompute] if layout.compile else 2
    scatters = 3 if layout.recompute == "full" else 2
    for kind, phase, count, size in (
        ("all-gather", "forward", 2, residual),
        ("reduce-scatter", "forward", 2, residual),
        ("all-gather", "backward", 2 + again, residual),
        ("reduce-scatter", "backward", scatters, residual),
        *(("all-reduce", "backward", count, size * load.narrow) for size, count in _replicated(config)),  # gradients
    ):
        yield Collective(kind, "tp", phase, "each", "layer", size, dtype, layout.tp, count * layers)


@lru_cache(maxsize=256)  # a layout search reads it thousands of times
def _replicated(config: Model) -> list[tuple[int, int]]:
    """Return the sizes of a layer's parameters that tensor parallelism does not shard, and how many have each."""
    return list(Counter(prod(param.shape) for param in layer_params(config) if param.row.tp_axis is None).items())


def _tensor_ends(
    stage: PipelineStage, config: Model, layout: Layout, load: Load, residual: int
) -> Iterator[Collective]:
    """Yield the messages of the embedding, last norm and loss."""
    tokens, dtype, wide = load.micro_batch * load.seq_len // layout.cp, NAMES[load.precision], WIDE[load.wide]

    def message(kind: str, phase: str, size: int, dtype: str, count: int = 1) -> Collective:
        return Collective(kind, "tp", phase, "each", "ends", size, dtype, layout.tp, count)

    if stage.first:
        yield message("reduce-scatter", "forward", residual, dtype)
        yield message("all-gather", "backward", residual, dtype)
    if stage.last:
        yield message("all-gather", "forward", residual, dtype)
        yield message("reduce-scatter", "backward", residual, dtype)
        yield message("all-reduce", "forward", tokens * load.wide, wide, 3)  # largest, sum, target's logit
        yield message("all-reduce", "backward", config.dim * load.master, wide)


def _context(stage: PipelineStage, config: Model, layout: Layout, load: Load) -> Iterator[Collective]:
    """Yield the gathers of keys and values (arXiv 2407.21783, section 3.3.2), which are repeated and not kept."""
    size = load.micro_batch * load.seq_len * 2 * config.kv_dim // layout.tp * load.narrow
    again = 0 if layout.compile and layout.recompute != "full" else 1
    for kind, phase, count in (
        ("all-gather", "forward", 1),
        ("all-gather", "backward", again),
        ("reduce-scatter", "backward", 1),
    ):
        count *= len(stage.layers)
        yield Collective(kind, "cp", phase, "each", "layer", size, NAMES[load.precision], layout.cp, count)


def _weights(
    stage: PipelineStage, config: Model, vocab_size: int, layout: Layout, world: int, load: Load
) -> Iterator[Collective]:
    """Yield FSDP's gathers of weights and reductions of gradients, layer by layer, and of the ends as one group."""
    pieces = shards(layout, world)
    layer = pieces * layer_elements(config, layout.tp, pieces)
    ends = pieces * shard_elements(stage.ends(config, vocab_size), layout.tp, pieces)
    for place, elements, count, compute in (("layer", layer, len(stage.layers), True), ("ends", ends, 1, False)):
        if not elements:
            continue
        size = elements * (load.narrow if compute else load.master)
        kind = NAMES[load.precision] if compute else WIDE[load.master]
        if pieces > 1:
            again = layout.zero == 3 and compute
            when = "each" if again else "first"
            yield Collective("all-gather", "fsdp", "forward", when, place, size, kind, pieces, count)
            if again:
                yield Collective("all-gather", "fsdp", "backward", "each", place, size, kind, pieces, count)
            reduced = elements * load.reduced
            when = "each" if layout.reduces_each(load.exact) else "last"
            yield Collective(
                "reduce-scatter", "fsdp", "backward", when, place, reduced, WIDE[load.reduced], pieces, count
            )
        if layout.dp_replicate > 1:
            shard = elements // pieces * load.reduced
            yield Collective(
                "all-reduce",
                "replica",
                "backward",
                "last",
                place,
                shard,
                WIDE[load.reduced],
                layout.dp_replicate,
                count,
            )
