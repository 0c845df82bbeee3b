"""Estimate the memory of every rank by arithmetic: weights, optimizer, gradients, activations. No torch, no device.

Tests compare the kept activations, gathered weights and gradients with the engine's storages, to the byte; temporary
memory is an upper bound. Not counted: extra copies of CPU attention, allocator fragmentation, collective buffers, the
CUDA context. Shapes: D model, F feed-forward hidden, V vocabulary rows, K E features of all key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from typing import Literal

from llama3.parallel.layout import Layout
from llama3.parallel.pipeline_schedule import held, split_layers
from llama3.recipe.sections import Model

# Sizes of the local weights


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
class PipelineStage:
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


def stages(spec: Model, layout: Layout, pipeline_rank: int) -> list[PipelineStage]:
    """Return the stages that a pipeline rank holds: every pp-th one, from its own number."""
    last = layout.stages - 1
    ranges = split_layers(spec.layers, layout.stages)
    return [PipelineStage(n, ranges[n], n == 0, n == last) for n in range(pipeline_rank, layout.stages, layout.pp)]


@dataclass(frozen=True)
class RankCoords:
    """Coordinates of a rank in the mesh [dp, pp, cp, tp], tp innermost."""

    dp: int
    pp: int
    cp: int
    tp: int

    @classmethod
    def of(cls, rank: int, layout: Layout) -> RankCoords:
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
    place, pieces = RankCoords.of(rank, layout), shards(layout, world)
    within = place.dp % (layout.dp(world) // layout.replicas)
    mine = within * layout.cp + place.cp
    parts = stages(spec, layout, place.pp)
    return sum(weight.held(layout.tp, pieces, mine) for stage in parts for weight in stage.weights(spec, rows))


BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp8": 2}
"""Bytes of a value in the residual stream; fp8 is a format of products only."""
CHUNK = {"cpu": 2**21, "cuda": 2**29}
CHUNK_TOKENS = {"cpu": 256, "cuda": 1}
"""As in `llama3.model.loss`: logits that are worked on at a time, and the fewest tokens."""


@dataclass(frozen=True)
class Load:
    """What a process works on in a step."""

    seq: int
    """Tokens of a sequence."""
    micro_batch: int = 1
    """Sequences of a forward pass."""
    micro_batches: int = 1
    """Forward passes of a step and process."""
    compute: Literal["fp8", "bf16", "fp32", "fp64"] = "bf16"
    exact: bool = False
    """Whether gradients are summed in fp64."""
    device: Literal["cpu", "cuda"] = "cuda"

    @property
    def narrow(self) -> int:
        """Bytes of an activation."""
        return BYTES[self.compute]

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


@dataclass(frozen=True)
class RankMemory:
    """Bytes at the fullest moment of a step on a process of one pipeline rank, padding of shards included."""

    pipeline_rank: int
    master: int
    """This process's shard of the weights."""
    moments: int
    """AdamW's two, beside it."""
    sharded_gradients: int
    """After the reduction; what was accumulated is given up for it, layer by layer."""
    gathered: int
    """Weights that matrix products read, in the compute type; embedding, last norm and output in the master's."""
    gradients: int
    """Accumulated over micro-batches, before they are reduced."""
    reduction: int
    """What the reduction of the largest group (a layer, or the ends) takes in."""
    activations: int
    """Kept for the backward pass, for every micro-batch in flight."""
    recomputed: int
    """Activations of one layer that its checkpoint, if there is one, makes again."""
    temporaries: int
    """The most at once in the backward pass of a layer: gradients, and inputs or keys that are made again."""
    loss: int
    """Of a chunk of tokens: logits, their gradient, and the product that makes the gradient of the output matrix."""
    in_flight: int
    """Most micro-batches times stages at once."""

    @property
    def total(self) -> int:
        """Bytes at the fullest moment of a step."""
        kept = self.master + self.moments + max(self.sharded_gradients, self.gradients) + self.gathered
        return kept + self.activations + self.passing

    @property
    def passing(self) -> int:
        """Bytes that come and go, the most at once: in the loss, or in the backward pass of the last layer."""
        return max(self.loss, self.recomputed + self.temporaries + self.reduction)

    def as_dict(self) -> dict[str, int]:
        """Return every figure by name, with the total."""
        return {**asdict(self), "total": self.total}


def memory(
    spec: Model, rows: int, layout: Layout, world: int, load: Load, ranks: Sequence[int] | None = None
) -> list[RankMemory]:
    """Return the memory of a process of each of `ranks` of the pipeline, or of all; its peers hold as much or less.

    Raises ValueError if the layout does not fit `spec`, `world` or the sequence.
    """
    layout.check(spec, rows, world)
    layout.check_sequence(load.seq)
    return [_rank(spec, rows, layout, world, load, rank) for rank in (range(layout.pp) if ranks is None else ranks)]


def _rank(spec: Model, rows: int, layout: Layout, world: int, load: Load, rank: int) -> RankMemory:
    parts, pieces = stages(spec, layout, rank), shards(layout, world)
    local = _slots(spec, rows, layout, pieces, parts)
    groups = _groups(spec, rows, layout, pieces, parts)
    most, flying = _peak(spec, rows, layout, load, parts, rank)
    return RankMemory(
        pipeline_rank=rank,
        master=local * load.master,
        moments=2 * local * load.master,
        sharded_gradients=local * load.master,
        gathered=_gathered(layout, load, groups, len(parts)) if world > 1 else _casts(spec, parts, load),
        gradients=sum(groups) * load.reduced if world > 1 and load.micro_batches > 1 else 0,
        reduction=max(groups) * load.reduced if world > 1 else 0,
        activations=most,
        recomputed=_recomputed(spec, layout, load),
        temporaries=_temporaries(spec, layout, load),
        loss=_loss(spec, rows, layout, load) if parts[-1].last else 0,
        in_flight=flying,
    )


def _peak(spec: Model, rows: int, layout: Layout, load: Load, parts: list[PipelineStage], rank: int) -> tuple[int, int]:
    """Return the most bytes of activations, and the most micro-batches times stages, that a rank's schedule holds."""
    alike = {
        (len(part.layers), part.first, part.last): stage_activations(spec, rows, layout, load, part)
        for part in _kinds(parts)
    }
    sizes = [alike[len(part.layers), part.first, part.last] for part in parts]
    moments = held(layout.schedule, layout.pp, layout.virtual, load.micro_batches, layout.contiguous, rank)
    most = max(sum(count * size for count, size in zip(counts, sizes, strict=True)) for counts in moments)
    return most, max(sum(counts) for counts in moments)


def _kinds(parts: list[PipelineStage]) -> list[PipelineStage]:
    """Return one of each kind of stage: what keeps the same."""
    return list({(len(part.layers), part.first, part.last): part for part in parts}.values())


def stage_activations(spec: Model, rows: int, layout: Layout, load: Load, part: PipelineStage) -> int:
    """Return the bytes that a stage keeps of one micro-batch from its forward to its backward pass."""
    tokens, c, w = _tokens(layout, load), load.narrow, load.wide
    total = len(part.layers) * layer_activations(spec, layout, load, layout.recompute)
    total += load.seq // layout.cp * (spec.dim // spec.heads) * w  # the rotary table
    if layout.recompute == "full":
        total += _mask(layout, load) // c  # as bool, to be read again
    if part.first and layout.tp > 1:
        total += tokens * 9  # where in my rows of the table, and whether there
    if not part.last:
        total += c  # one number stands for what it returned, which was sent
    if part.last:
        total += _norm(spec, layout, load) + (spec.dim * c if c != load.master else 0)  # with its weight cast
        total += 2 * tokens * spec.dim * c + tokens * w  # hidden states, gathered, their gradients, and nats
        total += rows // layout.tp * spec.dim * w  # the loss makes gradients with the logits, in the forward pass
    return total


def layer_activations(spec: Model, layout: Layout, load: Load, recompute: str) -> int:
    """Return the bytes that one layer keeps of a micro-batch."""
    entering = _tokens(layout, load) // layout.tp * spec.dim * load.narrow
    attention, feed_forward = _halves(spec, layout, load, spare=not layout.compile)
    return {"none": attention + feed_forward, "selective": attention + entering, "full": entering}[recompute]


def _halves(spec: Model, layout: Layout, load: Load, spare: bool) -> tuple[int, int]:
    """Return what the attention and the feed-forward half of a layer keep.

    Without `spare`, as autograd and a compiled block, they keep what is else made again (`llama3.model.recompute`) too:
    normed inputs, keys and values of peers, silu(gate) and its product with up.
    """
    tokens, keys, hidden = _tokens(layout, load), _keys(spec, layout, load), _hidden(spec, layout, load)
    queries = tokens * spec.dim // layout.tp * load.narrow
    attended = queries + tokens * spec.heads // layout.tp * load.wide  # with the sum under each softmax
    attention = _norm(spec, layout, load) + queries + keys + attended + _mask(layout, load)
    feed_forward = _norm(spec, layout, load) + 2 * hidden
    if spare:
        return attention, feed_forward
    normed = tokens * spec.dim * load.narrow
    return attention + normed + (layout.cp - 1) * keys, feed_forward + normed + 2 * hidden


def _recomputed(spec: Model, layout: Layout, load: Load) -> int:
    """Return what checkpoints of a layer make again, whole, for its backward pass."""
    entering = _tokens(layout, load) // layout.tp * spec.dim * load.narrow
    attention, feed_forward = _halves(spec, layout, load, spare=False)
    return {
        "none": 0,
        "selective": feed_forward - entering,
        "full": attention + feed_forward - entering,
    }[layout.recompute]


def _temporaries(spec: Model, layout: Layout, load: Load) -> int:
    """Return the most bytes that the backward pass of a layer has at once, beside what is kept and its weights' part.

    The gradient of the residual stream, and the larger of: gradients of the feed-forward's three hidden tensors; a
    normed input made again, its gradients of two products and that of one hidden tensor; keys and values of all peers,
    their gradients twice, and those of queries, of what attention returned, and of that before.
    """
    tokens, hidden = _tokens(layout, load), _hidden(spec, layout, load)
    whole, everyone = tokens * spec.dim * load.narrow, layout.cp * _keys(spec, layout, load)
    return whole // layout.tp + max(3 * hidden, 3 * whole + hidden, 3 * everyone + 3 * whole // layout.tp)


def _hidden(spec: Model, layout: Layout, load: Load) -> int:
    """Return the size of one hidden tensor of the feed-forward block."""
    return _tokens(layout, load) * spec.ffn // layout.tp * load.narrow


def _keys(spec: Model, layout: Layout, load: Load) -> int:
    """Return the size of the keys and values of this process's tokens."""
    return 2 * _tokens(layout, load) * spec.kv_heads * (spec.dim // spec.heads) // layout.tp * load.narrow


def _tokens(layout: Layout, load: Load) -> int:
    return load.micro_batch * load.seq // layout.cp


def _norm(spec: Model, layout: Layout, load: Load) -> int:
    """Return what a norm keeps: its input, and a statistic of each token."""
    return _tokens(layout, load) // layout.tp * (spec.dim * load.narrow + load.wide)


def _mask(layout: Layout, load: Load) -> int:
    """Return the dense mask of a layer: CPUs need it for keys that context parallelism has put in another order."""
    if load.device != "cpu" or layout.cp == 1:
        return 0
    return load.micro_batch * load.seq // layout.cp * load.seq * load.narrow


def _groups(spec: Model, rows: int, layout: Layout, pieces: int, parts: list[PipelineStage]) -> list[int]:
    """Return the elements that FSDP gathers at once: the ends of each stage, then each layer."""
    _, layer = layer_elements(spec, layout.tp, pieces)
    ends = [sum(weight.gathered(layout.tp, pieces) for weight in part.ends(spec, rows)) for part in parts]
    return ends + [layer] * sum(len(part.layers) for part in parts)


def _gathered(layout: Layout, load: Load, groups: list[int], parts: int) -> int:
    ends, layers = groups[:parts], groups[parts:]
    at_once = layers if layout.zero == 2 else layers[:2]  # ZeRO-3: this layer's and the next one's
    return sum(ends) * load.master + sum(at_once) * load.narrow


def _casts(spec: Model, parts: list[PipelineStage], load: Load) -> int:
    """Return the copies in the compute type that a process without FSDP keeps of its layers."""
    if load.narrow == load.master:
        return 0
    each, _ = layer_elements(spec, 1, 1)
    return sum(len(part.layers) for part in parts) * each * load.narrow


def _slots(spec: Model, rows: int, layout: Layout, pieces: int, parts: list[PipelineStage]) -> int:
    """Return the elements that a process sets aside for its shards: layers are alike, so one is counted for all."""
    each, _ = layer_elements(spec, layout.tp, pieces)
    ends = sum(weight.slot(layout.tp, pieces) for part in parts for weight in part.ends(spec, rows))
    return sum(len(part.layers) for part in parts) * each + ends


def _loss(spec: Model, rows: int, layout: Layout, load: Load) -> int:
    """Return a chunk's logits in both types and their gradient, and the product that is added to the weights'."""
    mine, c, w = rows // layout.tp, load.narrow, load.wide
    chunk = min(max(CHUNK[load.device] // mine, CHUNK_TOKENS[load.device]), _tokens(layout, load))
    cast = 2 * mine * spec.dim * c if c != w else 0
    return chunk * mine * (2 * c + w) + cast
