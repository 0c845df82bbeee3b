"""Estimate the memory of every rank by arithmetic: weights, optimizer, gradients, activations. No torch.

Tests compare activations, gathered weights and gradients with the engine's storages, to the byte; temporaries are an
upper bound. Not counted: extra copies of CPU attention, allocator fragmentation, collective buffers, the CUDA context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from herd.llama3.model.param_table import Param, layer_params, param_table
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.pipeline_schedule import peak_in_flight, split_layers
from herd.llama3.recipe.schedule import Segment
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Model

RESERVE = 0.06
"""Share of a device's memory that stays free: CUDA context, buffers of collectives, fragmentation."""
# Sizes of the local weights


@dataclass(frozen=True)
class PipelineStage:
    """A pipeline stage of the model: some layers, the embedding if it is first, norm and output if it is last."""

    number: int
    layers: range
    first: bool
    last: bool

    def ends(self, config: Model, vocab_size: int) -> tuple[Param, ...]:
        """Return the parameters outside of layers."""
        return param_table(config, vocab_size, range(0), self.first, self.last)

    def params(self, config: Model, vocab_size: int) -> tuple[Param, ...]:
        """Return every parameter of the stage, under the names of the whole model."""
        return param_table(config, vocab_size, self.layers, self.first, self.last)


def shard_elements(params: Iterable[Param], tp: int, shards: int) -> int:
    """Return the elements that each of `shards` ranks allocates for its FSDP shards of `params`, padding included.

    A gather returns `shards` times as many.
    """
    shapes = [param.local_shape(tp) for param in params]
    return sum(-(-shape[0] // shards) * prod(shape[1:]) for shape in shapes)


@lru_cache(maxsize=4096)  # a layout search reads it thousands of times
def layer_elements(config: Model, tp: int, shards: int) -> int:
    return shard_elements(layer_params(config), tp, shards)


def stages(config: Model, layout: Layout, pipeline_rank: int) -> list[PipelineStage]:
    """Return the stages that a pipeline rank holds: every pp-th one, from its own number."""
    last = layout.stages - 1
    ranges = split_layers(config.layers, layout.stages)
    return [PipelineStage(n, ranges[n], n == 0, n == last) for n in range(pipeline_rank, layout.stages, layout.pp)]


@dataclass(frozen=True)
class RankCoords:
    """Coordinates of a rank in the mesh [dp, pp, cp, tp], tp innermost."""

    dp: int
    pp: int
    cp: int
    tp: int

    @classmethod
    def from_rank(cls, rank: int, layout: Layout) -> RankCoords:
        rest, tp = divmod(rank, layout.tp)
        rest, cp = divmod(rest, layout.cp)
        dp, pp = divmod(rest, layout.pp)
        return cls(dp, pp, cp, tp)


def shards(layout: Layout, world: int) -> int:
    """Return the number of processes over which FSDP shards: dp and cp together, within one replica."""
    return layout.dp(world) // layout.dp_replicate * layout.cp


BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp8": 2}
"""Bytes of a value in the residual stream; fp8 is a format of products only."""
CHUNK = {"cpu": 2**21, "cuda": 2**29}
CHUNK_TOKENS = 256
"""As in `herd.llama3.model.loss`: fp32 logits of a chunk, and least tokens on a CPU."""
FP32_SUM_TERMS = 1024
"""As in `herd.llama3.train.state`: from this number of weights on, their sum is in fp64."""


@dataclass(frozen=True)
class Load:
    """What a process works on in a step."""

    seq_len: int
    """Tokens of a sequence."""
    micro_batch: int = 1
    """Sequences of a forward pass."""
    micro_batches: int = 1
    """Forward passes of a step and process."""
    precision: Literal["fp8", "bf16", "fp32", "fp64"] = "bf16"
    exact: bool = False
    """Whether gradients are summed in fp64."""
    device: Literal["cpu", "cuda"] = "cuda"
    average: int = 0
    """Bytes of a value in the average of the weights (`average_bytes`); 0: none."""

    @property
    def narrow(self) -> int:
        """Bytes of an activation."""
        return BYTES[self.precision]

    @property
    def wide(self) -> int:
        """Bytes of a statistic: fp32, or fp64 for fp64."""
        return max(4, self.narrow)

    @property
    def master(self) -> int:
        """Bytes of a master weight, and of each of the optimizer's two moments."""
        return self.wide

    @property
    def reduced(self) -> int:
        """Bytes of an accumulated gradient."""
        return 8 if self.exact else self.master


def average_bytes(recipe: Recipe, segment: Segment) -> int:
    """Return the bytes of a value in the average of a segment's stage at the stage's end, 0 without one."""
    span = recipe.schedule.span(segment.stage)
    if (rule := span.stage.weight_averaging) is None:
        return 0
    terms = {"last": min(rule.count, span.steps), "polyak": span.steps, "ema": 1}[rule.kind]
    return 8 if terms >= FP32_SUM_TERMS else max(4, BYTES[recipe.precision])


@dataclass(frozen=True)
class RankMemory:
    """Bytes at the fullest moment of a step on a process of one pipeline rank, padding of shards included."""

    pipeline_rank: int
    master: int
    """This process's shard of the weights."""
    moments: int
    """AdamW's two, beside it."""
    average: int
    """The sum of the stage's weights, sharded as they are; 0 if the stage has no `weight_averaging`."""
    sharded_gradients: int
    """After the reduction, which frees the accumulated gradients layer by layer."""
    gathered: int
    """Gathered weights of the layers in the compute type and in float8; embedding, last norm and output in the
    master's."""
    gradients: int
    """Whole, accumulated over micro-batches, before they are reduced; 0 if each micro-batch reduces its own."""
    accumulated: int
    """Gradients of earlier micro-batches, whole or sharded, when the last one begins."""
    reduction: int
    """Input of the reduction of the largest group (a layer, or the ends)."""
    layer_reduction: int
    """Input of the reduction of a layer, while activations are held: the ends of a model are reduced last."""
    activations: int
    """Kept for the backward pass, for every micro-batch in flight."""
    recomputed: int
    """Activations of one layer that activation checkpointing recomputes."""
    temporaries: int
    """Peak in the backward pass of a layer: gradients, and inputs or keys that are recomputed."""
    loss: int
    """Of a chunk of tokens: logits or their gradient; the output matrix in the compute type."""
    in_flight: int
    """Most micro-batches times stages at once."""

    @property
    def total(self) -> int:
        """Bytes at the fullest moment of a step: the loss of the last micro-batch, or the end of its backward pass.

        Between the two, activations go layer by layer, and gradients come.
        """
        begin = self.accumulated + self.activations + self.passing
        end = max(self.gradients, self.sharded_gradients) + self.temporaries + self.reduction
        return self.saved + self.gathered + max(begin, end)

    @property
    def saved(self) -> int:
        """Bytes in a checkpoint, which a save copies to host memory."""
        return self.master + self.moments + self.average

    @property
    def passing(self) -> int:
        """Peak of temporary bytes: in the loss, or in the backward pass of the last layer."""
        return max(self.loss, self.recomputed + self.temporaries + self.layer_reduction)

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def memory(
    config: Model,
    vocab_size: int,
    layout: Layout,
    world: int,
    load: Load,
    ranks: Sequence[int] | None = None,
    meshed: bool = False,
) -> list[RankMemory]:
    """Return the memory of the fullest process of each of `ranks` of the pipeline, or of all.

    `meshed`: FSDP even on one process. Raises ValueError if the layout does not fit `config`, `world` or the sequence.
    """
    layout.check(config, vocab_size, world)
    layout.check_sequence(load.seq_len)
    sharded = meshed or world > 1
    numbers = range(layout.pp) if ranks is None else ranks
    return [_rank(config, vocab_size, layout, world, load, number, sharded) for number in numbers]


def memory_line(need: RankMemory) -> str:
    """Return a line with the memory of a process by purpose, in GiB, or for a small model in MiB."""
    unit, name_of_unit = (2**30, "GiB") if need.total >= 2**30 else (2**20, "MiB")
    components = [
        f"{name.replace('_', ' ')} {size / unit:.1f}"
        for name, size in need.as_dict().items()
        if name not in ("pipeline_rank", "in_flight", "accumulated", "layer_reduction", "total") and size
    ]
    return f"{need.total / unit:.0f} {name_of_unit} on pipeline rank {need.pipeline_rank}: {', '.join(components)}"


def _rank(
    config: Model, vocab_size: int, layout: Layout, world: int, load: Load, rank: int, sharded: bool
) -> RankMemory:
    held, pieces = stages(config, layout, rank), shards(layout, world)
    # FSDP gathers and reduces in groups: the ends of each stage, and each layer.
    ends = [shard_elements(stage.ends(config, vocab_size), layout.tp, pieces) for stage in held]
    layers = [layer_elements(config, layout.tp, pieces)] * sum(len(stage.layers) for stage in held)
    local = sum(ends) + sum(layers)
    if sharded:
        at_once = layers if layout.zero == 2 else layers[:2]  # ZeRO-3: this layer's and the next one's
        gathered = pieces * (sum(ends) * load.master + sum(at_once) * load.narrow)
    else:  # without FSDP, copies of the layers in the compute type; float8 products keep none
        gathered = sum(layers) * load.narrow if load.narrow != load.master and load.precision != "fp8" else 0
    if load.precision == "fp8" and load.micro_batches > 1 and layout.zero == 2:
        gathered += pieces * sum(layers) * 2  # both layouts, a byte each (`herd.llama3.model.linear.casts_kept`)
    activations, in_flight = _peak(config, vocab_size, layout, load, held, rank)
    whole = pieces * local * load.reduced
    gradients = whole if sharded and load.micro_batches > 1 and not layout.reduces_each(load.exact) else 0
    return RankMemory(
        pipeline_rank=rank,
        master=local * load.master,
        moments=2 * local * load.master,
        average=local * load.average,
        sharded_gradients=local * load.master,
        gathered=gathered,
        gradients=gradients,
        accumulated=(gradients or local * load.master) if load.micro_batches > 1 else 0,
        reduction=pieces * max(ends + layers) * load.reduced if sharded else 0,
        layer_reduction=pieces * max(layers, default=0) * load.reduced if sharded else 0,
        activations=activations,
        recomputed=_recomputed(config, layout, load),
        temporaries=_temporaries(config, layout, load),
        loss=_loss(config, vocab_size, layout, load) if held[-1].last else 0,
        in_flight=in_flight,
    )


def _peak(
    config: Model, vocab_size: int, layout: Layout, load: Load, held: list[PipelineStage], rank: int
) -> tuple[int, int]:
    """Return the peak bytes of activations, and the peak of micro-batches times stages, of a rank's schedule."""
    kinds = {(len(stage.layers), stage.first, stage.last): stage for stage in held}  # stages of a kind keep the same
    by_kind = {kind: stage_activations(config, vocab_size, layout, load, stage) for kind, stage in kinds.items()}
    sizes = [by_kind[len(stage.layers), stage.first, stage.last] for stage in held]
    moments = peak_in_flight(
        layout.schedule, layout.pp, layout.vpp, load.micro_batches, layout.microbatch_group_size, rank
    )
    peak = max(sum(count * size for count, size in zip(counts, sizes, strict=True)) for counts in moments)
    return peak, max(sum(counts) for counts in moments)


def stage_activations(config: Model, vocab_size: int, layout: Layout, load: Load, stage: PipelineStage) -> int:
    """Return the bytes that a stage keeps of one micro-batch from its forward to its backward pass."""
    tokens, c, w = _tokens(layout, load), load.narrow, load.wide
    total = len(stage.layers) * layer_activations(config, layout, load, layout.recompute)
    total += load.seq_len // layout.cp * config.head_dim * w  # the rotary table
    if layout.recompute == "full":
        total += _mask(layout, load) // c  # as bool, to be read again
    if stage.first and layout.tp > 1:
        total += tokens * 9  # index into the local rows of the embedding (int64), and whether it is local (bool)
    if not stage.last:
        total += c  # the output was sent and freed; one element remains
    if stage.last:
        total += _norm(config, layout, load) + (config.dim * c if c != load.master else 0)  # with its weight cast
        total += 2 * tokens * config.dim * c + tokens * w  # hidden states, gathered, their gradients, and nats
        total += (
            vocab_size // layout.tp * config.dim * w
        )  # the loss makes gradients with the logits, in the forward pass
    return total


def layer_activations(config: Model, layout: Layout, load: Load, recompute: str) -> int:
    """Return the bytes that one layer keeps of a micro-batch."""
    entering = _tokens(layout, load) // layout.tp * config.dim * load.narrow
    attention, feed_forward = _halves(config, layout, load, spare=not layout.compile)
    return {"none": attention + feed_forward, "selective": attention + entering, "full": entering}[recompute]


def _halves(config: Model, layout: Layout, load: Load, spare: bool) -> tuple[int, int]:
    """Return the bytes that the attention and the feed-forward half of a layer keep.

    Without `spare` (plain autograd, a compiled block) they also keep what `herd.llama3.model.recompute` recomputes:
    normed inputs, keys and values of peers, silu(gate) and its product with up.
    """
    tokens, keys, hidden = _tokens(layout, load), _keys(config, layout, load), _hidden(config, layout, load)
    queries = tokens * config.dim // layout.tp * load.narrow
    attended = queries + tokens * config.heads // layout.tp * load.wide  # with the sum under each softmax
    attention = _norm(config, layout, load) + queries + keys + attended + _mask(layout, load)
    feed_forward = _norm(config, layout, load) + 2 * hidden
    if spare:
        return attention, feed_forward
    normed = tokens * config.dim * load.narrow
    return attention + normed + (layout.cp - 1) * keys, feed_forward + normed + 2 * hidden


def _recomputed(config: Model, layout: Layout, load: Load) -> int:
    """Return the bytes that activation checkpointing of a layer recomputes for its backward pass."""
    entering = _tokens(layout, load) // layout.tp * config.dim * load.narrow
    attention, feed_forward = _halves(config, layout, load, spare=False)
    return {
        "none": 0,
        "selective": feed_forward - entering,
        "full": attention + feed_forward - entering,
    }[layout.recompute]


def _temporaries(config: Model, layout: Layout, load: Load) -> int:
    """Return the peak of temporary bytes in the backward pass of a layer.

    The gradient of the residual stream, and the largest of: gradients of the feed-forward's three hidden tensors; a
    recomputed normed input, its gradients of two products and that of one hidden tensor; keys and values of all peers,
    their gradients twice, and gradients of queries, attention's output, and attention's input.
    """
    tokens, hidden = _tokens(layout, load), _hidden(config, layout, load)
    whole, everyone = tokens * config.dim * load.narrow, layout.cp * _keys(config, layout, load)
    return whole // layout.tp + max(3 * hidden, 3 * whole + hidden, 3 * everyone + 3 * whole // layout.tp)


def _hidden(config: Model, layout: Layout, load: Load) -> int:
    """Return the size of one hidden tensor of the feed-forward block."""
    return _tokens(layout, load) * config.ffn // layout.tp * load.narrow


def _keys(config: Model, layout: Layout, load: Load) -> int:
    """Return the size of the keys and values of this process's tokens."""
    return 2 * _tokens(layout, load) * config.kv_dim // layout.tp * load.narrow


def _tokens(layout: Layout, load: Load) -> int:
    return load.micro_batch * load.seq_len // layout.cp


def _norm(config: Model, layout: Layout, load: Load) -> int:
    """Return the bytes that a norm keeps: its input, and a statistic of each token."""
    return _tokens(layout, load) // layout.tp * (config.dim * load.narrow + load.wide)


def _mask(layout: Layout, load: Load) -> int:
    """Return the bytes of a layer's dense mask, which CPUs need where context parallelism reorders keys."""
    if load.device != "cpu" or layout.cp == 1:
        return 0
    return load.micro_batch * load.seq_len // layout.cp * load.seq_len * load.narrow


def _loss(config: Model, vocab_size: int, layout: Layout, load: Load) -> int:
    """Return the bytes of a chunk's logits, on a CPU in both types, and of the output matrix in the compute type."""
    local_vocab, c, w = vocab_size // layout.tp, load.narrow, load.wide
    cast = local_vocab * config.dim * c if c != w else 0
    if load.device == "cuda":  # one kernel replaces the logits by their gradient, cuBLAS adds to that of the weights
        chunk = max(1, 4 * CHUNK["cuda"] // (local_vocab * c))
        return min(chunk, _tokens(layout, load)) * local_vocab * c + cast
    chunk = min(max(CHUNK["cpu"] // local_vocab, CHUNK_TOKENS), _tokens(layout, load))
    return chunk * local_vocab * (2 * c + w) + 2 * cast


# Inference: weights, and what one forward pass or the texts of a batch need

CACHED = {"cpu": 2**30, "cuda": 2**34}
"""Most bytes of keys and values of a batch of texts."""
DECODED = {"cpu": 64, "cuda": 256}
"""Most texts that are decoded at once."""
POSITIONS = {"cpu": 2048, "cuda": 65536}
"""Positions of a forward pass that scores; a longer sequence is read alone."""


def inference_bytes(
    config: Model, vocab_size: int, layout: Layout, itemsize: int, device: Literal["cpu", "cuda"]
) -> int:
    """Return the bytes of the fullest process of a replica that scores and generates: an upper bound.

    `itemsize` is the bytes of a weight and of an activation. Scoring holds the residual stream, its norm and sum, and
    the largest products of a layer; generating holds keys and values.
    """
    replica = layout.model_parallel
    ranks = (stages(config, layout, RankCoords.from_rank(rank, layout).pp) for rank in range(0, replica, layout.tp))
    weights = max(
        sum(prod(param.local_shape(layout.tp)) for stage in held for param in stage.params(config, vocab_size))
        for held in ranks
    )
    positions = max(POSITIONS[device], config.max_seq_len)
    products = (config.dim + 2 * config.kv_dim + 3 * config.ffn) // layout.tp
    scoring = positions * (4 * config.dim + products) * itemsize + 4 * CHUNK[device]
    return weights * itemsize + max(scoring, CACHED[device])


def inference_layout(
    config: Model, vocab_size: int, itemsize: int, device: Literal["cpu", "cuda"], limit: float, per_node: int
) -> Layout | None:
    """Return the layout with the fewest processes on which a replica fits `limit` bytes each; None if none does.

    Tensor parallelism stays within a node of `per_node` processes and comes first: it divides the activations too.
    """
    sizes = [2**power for power in range(11)]
    layouts = [Layout(tp=tp, pp=pp) for tp in sizes if tp <= per_node for pp in sizes if pp <= config.layers]
    for layout in sorted(layouts, key=lambda layout: (layout.model_parallel, layout.pp)):
        with suppress(ValueError):
            layout.check(config, vocab_size, layout.model_parallel)
            if inference_bytes(config, vocab_size, layout, itemsize, device) <= limit:
                return layout
    return None


def split_micro_batches(layout: Layout, sequences: int, limit: int) -> tuple[int, int]:
    """Return the size and number of the micro-batches into which the engine splits a process's `sequences`.

    At most `limit` sequences each. A pipeline needs equal micro-batches; without one the last may be smaller.
    """
    size = min(limit, sequences)
    if layout.pp > 1:
        size = next(smaller for smaller in range(size, 0, -1) if sequences % smaller == 0)
    return size, -(-sequences // size)


def memory_error(needs: RankMemory, limit: float) -> str:
    """Return an error text with the GB of each component of a rank that does not fit, the largest first."""
    sizes = memory_components(needs)
    components = ", ".join(
        f"{name} {size / 1e9:.1f}" for name, size in sorted(sizes.items(), key=lambda pair: -pair[1]) if size
    )
    return f"{needs.total / 1e9:.1f} GB of {limit / 1e9:.1f}: {components}"


def memory_components(needs: RankMemory) -> dict[str, int]:
    """Return the bytes of a process by component."""
    return {
        "activations": needs.activations,
        "weights": needs.master + needs.gathered,
        "gradients": max(needs.gradients, needs.sharded_gradients),
        "optimizer": needs.moments,
        "average": needs.average,
        "temporary": needs.passing,
    }
