"""How long a training step takes, by component: products, attention, elementwise, messages, bubble, optimizer.

A layer's work (`work`) is priced by the curves of the device, its messages (`volumes`, which tests hold against the
engine's trace) by the layers of the network. The pipeline then adds its bubble, and what its slowest rank has more to
do than the mean. The cost of a prediction does not grow with the number of micro-batches.

Given up: overlap of products with tensor-parallel messages, of which the engine has none without async_tp, and
contention between messages of different axes. Transfers between stages are hidden but for the way through the pipeline
at the start and back at the end. FSDP's messages hide behind a micro-batch, but for those of one layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from llama3.parallel.comm_records import Collective, transfers
from llama3.parallel.layout import Layout
from llama3.parallel.memory import Load, PipelineStage, layer_elements, shards
from llama3.parallel.pipeline_schedule import Kind, actions, bubble, split_layers
from llama3.planner.comm_volume import stage_volumes
from llama3.planner.device_curves import Curves
from llama3.planner.network import Network
from llama3.recipe.sections import Model

# What a layer asks of a GPU, and the seconds of it: matrix products, attention, elementwise work.
#
# Each part of the model is written down once as `Work` (local shapes of the products, operations of causal
# attention, bytes that elementwise work moves) and priced by the curves of a device. Given up: launch gaps and
# clocks that fall under load, which a fit of the product curve absorbs; documents shorter than the sequence, which
# make attention cheaper.
#
# Shapes: T tokens of a micro-batch after the gather of tensor parallelism, D model, F hidden of the feed-forward
# block, V vocabulary rows, K E features of all key/value heads.

FED, WHOLE = slice(2, 3), slice(0, 3)
"""Of a layer's products, those that selective and full recomputation make again: never the last, which nobody reads."""


@dataclass(frozen=True)
class LayerWork:
    """What a layer, or an end of the model, asks of one GPU in the forward pass of a micro-batch."""

    products: tuple[tuple[int, int, int], ...] = ()
    """Rows, inner and columns of each matrix product, as this GPU computes it."""
    attention: float = 0.0
    """Operations of scores and values, the causal half."""
    seq: int = 0
    """Length of the sequence that attention reads."""
    moved: float = 0.0
    """Bytes that norms, rotary embedding, SwiGLU and residual sums read and write."""


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one micro-batch, forward and backward."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0

    @property
    def total(self) -> float:
        """All of it: nothing here overlaps."""
        return self.gemm + self.attention + self.elementwise + self.recompute + self.tp + self.cp


def layer_work(spec: Model, layout: Layout, load: Load) -> LayerWork:
    """Return a layer's work. q, k and v count as one product, gate and up as another.

    Attention: scores and values are 2 products of T x S x D / tp, half of it under the mask: 2 T S D / tp.
    """
    tokens, c, tp = load.micro_batch * load.seq // layout.cp, load.narrow, layout.tp
    narrow = spec.kv_heads * (spec.dim // spec.heads)
    products = (
        (tokens, spec.dim, (spec.dim + 2 * narrow) // tp),
        (tokens, spec.dim // tp, spec.dim),
        (tokens, spec.dim, 2 * spec.ffn // tp),
        (tokens, spec.ffn // tp, spec.dim),
    )
    norms_and_sums = 2 * (2 + 3) * spec.dim
    hidden = 5 * spec.ffn + 2 * (spec.dim + narrow)  # silu and product; rotation of queries and keys
    moved = tokens // tp * (norms_and_sums + hidden) * c
    return LayerWork(products, 2.0 * tokens * load.seq * spec.dim / tp, load.seq, float(moved))


def head_work(spec: Model, rows: int, layout: Layout, load: Load) -> LayerWork:
    """Return the work of last norm, output matrix and loss: logits are read and written four times, in fp32."""
    tokens = load.micro_batch * load.seq // layout.cp
    moved = tokens * (rows // layout.tp) * 4 * load.wide
    return LayerWork(((tokens, spec.dim, rows // layout.tp),), moved=float(moved))


def embedding_work(spec: Model, layout: Layout, load: Load) -> LayerWork:
    """Return the work of the embedding: rows are read and written."""
    tokens = load.micro_batch * load.seq // layout.cp
    return LayerWork(moved=2.0 * tokens * spec.dim * load.narrow)


def spend(work: LayerWork, curves: Curves, recompute: str, again: bool = True) -> LayerSeconds:
    """Return the seconds of `work` forward and backward, without messages.

    The backward pass makes two products for each, and moves twice the bytes; with `again` the cheap parts that are not
    kept (norms, silu) are made once more. `recompute`: of a layout.
    """
    each = [curves.gemm.seconds(*shape) for shape in work.products]
    forward = curves.attention.seconds(work.attention, work.seq, False) if work.attention else 0.0
    backward = curves.attention.seconds(work.attention, work.seq, True) if work.attention else 0.0
    moved = curves.memory.seconds(work.moved)
    made_again = {
        "none": moved / 2 if again else 0.0,
        "selective": sum(each[FED]) + moved,
        "full": sum(each[WHOLE]) + forward + moved,
    }[recompute]
    return LayerSeconds(3 * sum(each), forward + backward, 3 * moved, made_again)


STATE_BYTES = 28
"""AdamW reads and writes three fp32 values of a parameter and reads its gradient."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by component, as the mean rank sees it."""

    gemm: float
    attention: float
    elementwise: float
    recompute: float
    tp: float
    cp: float
    pp: float
    """Transfers between stages that nothing hides."""
    dp: float
    """Gathers of weights and reductions of gradients that nothing hides."""
    bubble: float
    imbalance: float
    """What the slowest pipeline rank has more to do than the mean."""
    optimizer: float

    @property
    def total(self) -> float:
        """The step."""
        return float(sum(vars(self).values()))

    @property
    def products(self) -> float:
        """Seconds that shrink with faster matrix products: theirs, and their part of what ranks wait for each other."""
        working = self.gemm + self.attention + self.elementwise + self.recompute + self.tp + self.cp
        return self.gemm * (1 + (self.bubble + self.imbalance) / working)

    @property
    def messages(self) -> float:
        """Seconds in messages that nothing hides."""
        return self.tp + self.cp + self.pp + self.dp

    def as_dict(self) -> dict[str, float]:
        """Return every component in seconds."""
        return dict(vars(self))


@dataclass(frozen=True)
class PipelineTiming:
    """A step as the pipeline sees it: what its parts take, and how they lie."""

    layer: LayerSeconds
    """Of one layer and micro-batch."""
    ends: tuple[LayerSeconds, LayerSeconds]
    """Of the embedding, and of last norm, output and loss."""
    layers: tuple[int, ...]
    """Of each pipeline rank."""
    virtual: int
    micro_batches: int
    transfer: float = 0.0
    """Seconds of a message to the next stage."""
    exposed: float = 0.0
    """Seconds of FSDP's messages that nothing hides."""
    optimizer: float = 0.0
    contiguous: int = 0
    schedule: Kind = "interleaved"

    @property
    def rank_seconds(self) -> list[float]:
        """Seconds of each pipeline rank for one micro-batch."""
        mine = [count * self.layer.total for count in self.layers]
        mine[0] += self.ends[0].total
        mine[-1] += self.ends[1].total
        return mine

    def step(self) -> StepTime:
        """Return the step."""
        ranks, count = self.rank_seconds, self.micro_batches
        each = {
            name: (sum(self.layers) * value + sum(vars(end)[name] for end in self.ends)) * count / len(ranks)
            for name, value in vars(self.layer).items()
        }
        mean = sum(ranks) / len(ranks)
        return StepTime(
            **each,
            pp=2 * (len(ranks) - 1) * self.transfer,
            dp=self.exposed,
            bubble=waits(len(ranks), self.virtual, count, self.contiguous, self.schedule) * mean,
            imbalance=count * (max(ranks) - mean),
            optimizer=self.optimizer,
        )


@cache
def waits(ranks: int, virtual: int, micro_batches: int, contiguous: int = 0, schedule: Kind = "interleaved") -> float:
    """Return how long a rank of the pipeline waits in a step, in its own work for one micro-batch.

    (PP - 1) / V from PP micro-batches on (arXiv 2407.21783, section 3.3.2). With fewer, M, a rank idles PP - M turns in
    each of its V rounds: PP - M + (M - 1) / V. Where M is nearly PP the schedule waits longer than that, by up to one
    turn of each rank; there it is played through, as are fewer than PP micro-batches in a row, where ranks wait in
    every round. Zero-bubble is played through too, but no further than 2 PP micro-batches: then it repeats itself.
    """
    in_a_row = min(contiguous or ranks, micro_batches)
    if schedule == "zero-bubble":
        count = min(micro_batches, 2 * ranks) if in_a_row >= ranks else micro_batches
        return bubble(actions(schedule, ranks, virtual, count, contiguous)) * count
    if in_a_row >= ranks:
        return (ranks - 1) / virtual
    if in_a_row == micro_batches and 3 * micro_batches < 2 * ranks:
        return ranks - micro_batches + (micro_batches - 1) / virtual
    return bubble(actions("interleaved", ranks, virtual, micro_batches, contiguous)) * micro_batches


class StepModel:
    """Predicts steps of one model on one cluster; what layouts share is computed once."""

    def __init__(self, spec: Model, rows: int, network: Network, curves: Curves) -> None:
        self.spec, self.rows, self.network, self.curves = spec, rows, network, curves
        self._spent: dict[tuple[int | str | bool, ...], tuple[LayerSeconds, LayerSeconds, LayerSeconds]] = {}

    def predict(self, layout: Layout, world: int, load: Load) -> StepTime:
        """Return the step of `world` GPUs. The layout must fit (`Layout.check`)."""
        return self.pipeline(layout, world, load).step()

    def pipeline(self, layout: Layout, world: int, load: Load) -> PipelineTiming:
        """Return the parts of the step, for those who draw it."""
        layer, embedding, head = self._passes(layout, load)
        layers = self._layers(layout)
        return PipelineTiming(
            layer,
            (embedding, head),
            layers,
            layout.virtual,
            load.micro_batches,
            self._transfer(layout, load),
            self._exposed(layout, world, load, layers, layer),
            self._optimizer(layout, world, load, layers),
            layout.contiguous,
            layout.schedule,
        )

    def _layers(self, layout: Layout) -> tuple[int, ...]:
        ranges = split_layers(self.spec.layers, layout.stages)
        return tuple(sum(len(part) for part in ranges[rank :: layout.pp]) for rank in range(layout.pp))

    def _passes(self, layout: Layout, load: Load) -> tuple[LayerSeconds, LayerSeconds, LayerSeconds]:
        """Return the seconds of a layer, the embedding and the head for a micro-batch."""
        key = (layout.tp, layout.cp, load.seq, load.micro_batch, layout.recompute, layout.compile, load.compute)
        if key not in self._spent:
            spec, rows = self.spec, self.rows
            works = (layer_work(spec, layout, load), embedding_work(spec, layout, load))
            found = [
                spend(works[0], self.curves, layout.recompute),
                spend(works[1], self.curves, "none", again=False),
                spend(head_work(spec, rows, layout, load), self.curves, "none", again=False),
            ]
            sent = [self._sent(part, layout, layout.model_parallel, load) for part in self._parts()]
            self._spent[key] = tuple(self._with_messages(*both, layout) for both in zip(found, sent, strict=True))  # type: ignore[assignment]
        return self._spent[key]

    def _parts(self) -> tuple[PipelineStage, PipelineStage, PipelineStage]:
        last = self.spec.layers + 1
        layer, none = range(1), range(0)
        return (
            PipelineStage(1, layer, False, False),
            PipelineStage(0, none, True, False),
            PipelineStage(last, none, False, True),
        )

    def _sent(self, part: PipelineStage, layout: Layout, world: int, load: Load) -> list[Collective]:
        return stage_volumes(part, self.spec, self.rows, layout, world, load)

    def _with_messages(self, spent: LayerSeconds, sent: list[Collective], layout: Layout) -> LayerSeconds:
        seconds = {axis: self._seconds(sent, axis, layout, layout.model_parallel) for axis in ("tp", "cp")}
        return replace(spent, **seconds)

    def _seconds(self, sent: Iterable[Collective], axis: str, layout: Layout, world: int) -> float:
        mine = [one for one in sent if one.axis == axis]
        if not mine:
            return 0.0
        group = self.network.group(axis, layout, world)
        return sum(one.count * self.network.seconds(one.kind, one.bytes, group) for one in mine)

    def _transfer(self, layout: Layout, load: Load) -> float:
        sent = transfers(1 if layout.stages > 2 else 0, self.spec, layout, load)
        if not sent:
            return 0.0
        return self.network.send(sent[0].bytes, layout)

    def _exposed(self, layout: Layout, world: int, load: Load, layers: tuple[int, ...], layer: LayerSeconds) -> float:
        """Return what nothing hides of FSDP's messages: a layer's, the ends', or what outlasts one micro-batch.

        With ZeRO-3 weights are gathered for every micro-batch, each layer's behind the one before.
        """
        parts = [self._sent(part, layout, world, load) for part in self._parts()]
        a_layer = self._seconds([one for one in parts[0] if one.when != "each"], "fsdp", layout, world)
        ends = _fullest((self._seconds(part, "fsdp", layout, world) for part in parts[1:]), layout)
        copied = [self._seconds(part, "replica", layout, world) for part in parts]
        replicas = copied[0] * max(layers) + _fullest(copied[1:], layout)
        whole, work = max(layers) * a_layer + ends, max(layers) * layer.total
        once = max(min(whole, a_layer + ends), whole - work)
        gathers = self._seconds([one for one in parts[0] if one.when == "each"], "fsdp", layout, world)
        each = max(0.0, gathers - layer.total) * max(layers) * load.micro_batches
        return once + each + replicas

    def _optimizer(self, layout: Layout, world: int, load: Load, layers: tuple[int, ...]) -> float:
        pieces = shards(layout, world)
        each, _ = layer_elements(self.spec, layout.tp, pieces)
        ends = (sum(one.slot(layout.tp, pieces) for one in part.ends(self.spec, self.rows)) for part in self._parts())
        local = max(layers) * each + _fullest(ends, layout)
        return self.curves.memory.seconds(local * STATE_BYTES * load.master / 4)


def _fullest(ends: Iterable[float], layout: Layout) -> float:
    """Return what the rank with most of the embedding and the output has of them: without a pipeline, both."""
    return sum(ends) if layout.pp == 1 else max(ends)
