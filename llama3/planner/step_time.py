"""Training step time by component: matrix products, attention, elementwise, messages, bubble, optimizer.

The work of a layer is priced by the curves of the device, its messages (`comm_volume`) by the layers of the network;
the pipeline adds its bubble and imbalance. The cost of a prediction does not grow with the number of micro-batches.
Shapes: T tokens of a micro-batch after the gather of tensor parallelism, D model, F hidden of the feed-forward block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

from herd.llama3.model.param_table import layer_params
from herd.llama3.parallel.comm_records import Collective, transfers
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load, PipelineStage, layer_elements, shard_elements, shards
from herd.llama3.parallel.pipeline_schedule import Kind, actions, bubble, split_layers
from herd.llama3.planner.collectives import Network
from herd.llama3.planner.comm_volume import stage_volumes
from herd.llama3.planner.device_curves import Curves
from herd.llama3.recipe.sections import Model

RECOMPUTED_SELECTIVE, RECOMPUTED_FULL = slice(2, 3), slice(0, 3)
"""Products of a layer that are recomputed in backward: never the last, whose output nothing reads."""
STATE_BYTES = 28
"""AdamW reads and writes three fp32 values of a parameter and reads its gradient."""


@dataclass(frozen=True)
class LayerWork:
    """Work of a layer, or of an end of the model, on one GPU in the forward pass of a micro-batch."""

    products: tuple[tuple[int, int, int], ...] = ()
    """Rows, inner and columns of each matrix product, as this GPU computes it."""
    attention: float = 0.0
    """FLOPs of scores and values, the causal half."""
    seq_len: int = 0
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
        """The sum: nothing here overlaps."""
        return self.gemm + self.attention + self.elementwise + self.recompute + self.tp + self.cp


def layer_work(config: Model, layout: Layout, load: Load) -> LayerWork:
    """Return a layer's work. q, k and v count as one product, gate and up as another.

    Attention: scores and values are 2 products of T x S x D / tp, half of it under the mask: 2 T S D / tp. Documents
    are taken to be as long as the sequence; shorter ones make attention cheaper.
    """
    tokens, c, tp = load.micro_batch * load.seq_len // layout.cp, load.narrow, layout.tp
    products = []
    matrices = [param for param in layer_params(config) if param.row.kind == "matrix"]
    for tp_axis, group in groupby(matrices, key=lambda param: param.row.tp_axis):  # column-parallel, then row-parallel
        shapes = [param.shape for param in group]
        columns, inner = sum(shape[0] for shape in shapes), shapes[0][1]
        products.append((tokens, inner, columns // tp) if tp_axis == 0 else (tokens, inner // tp, columns))
    # Compiled, a sum and the norm after it are one pass, and so are silu and its product: 4 and 3 tensors, not 5 and 5.
    norms_and_sums, gated = (2 * 4, 3) if layout.compile else (2 * (2 + 3), 5)
    hidden = gated * config.ffn + 2 * (config.dim + config.kv_dim)  # silu and product; rotation of queries and keys
    norms_and_sums *= config.dim
    moved = tokens // tp * (norms_and_sums + hidden) * c
    return LayerWork(tuple(products), 2.0 * tokens * load.seq_len * config.dim / tp, load.seq_len, float(moved))


def head_work(config: Model, vocab_size: int, layout: Layout, load: Load) -> LayerWork:
    """Return the work of the last norm, output matrix and loss: logits are read and written four times, in fp32."""
    tokens = load.micro_batch * load.seq_len // layout.cp
    moved = tokens * (vocab_size // layout.tp) * 4 * load.wide
    return LayerWork(((tokens, config.dim, vocab_size // layout.tp),), moved=float(moved))


def embedding_work(config: Model, layout: Layout, load: Load) -> LayerWork:
    """Return the work of the embedding, which reads and writes rows."""
    tokens = load.micro_batch * load.seq_len // layout.cp
    return LayerWork(moved=2.0 * tokens * config.dim * load.narrow)


def compute_seconds(work: LayerWork, curves: Curves, recompute: str, again: bool = True) -> LayerSeconds:
    """Return the seconds of `work` forward and backward, without messages.

    The backward pass computes two products for each and moves twice the bytes. `recompute` is that of a layout. With
    `again`, cheap activations that are not kept (norms, silu) are recomputed too.
    """
    products = [curves.gemm.seconds(*shape) for shape in work.products]
    forward = curves.attention.seconds(work.attention, work.seq_len, False) if work.attention else 0.0
    backward = curves.attention.seconds(work.attention, work.seq_len, True) if work.attention else 0.0
    moved = curves.memory.seconds(work.moved)
    recomputed = {
        "none": moved / 2 if again else 0.0,
        "selective": sum(products[RECOMPUTED_SELECTIVE]) + moved,
        "full": sum(products[RECOMPUTED_FULL]) + forward + moved,
    }[recompute]
    return LayerSeconds(3 * sum(products), forward + backward, 3 * moved, recomputed)


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
    """Exposed transfers between stages. Those in the middle of the step are hidden."""
    dp: float
    """Exposed gathers of weights and reductions of gradients."""
    bubble: float
    imbalance: float
    """Extra work of the slowest pipeline rank over the mean."""
    optimizer: float

    @property
    def total(self) -> float:
        """The step."""
        return float(sum(vars(self).values()))

    @property
    def gemm_bound(self) -> float:
        """Seconds that shrink with faster matrix products: theirs, and their share of bubble and imbalance."""
        working = self.gemm + self.attention + self.elementwise + self.recompute + self.tp + self.cp
        return self.gemm * (1 + (self.bubble + self.imbalance) / working)

    @property
    def exposed_comm(self) -> float:
        """Seconds of exposed messages."""
        return self.tp + self.cp + self.pp + self.dp

    def as_dict(self) -> dict[str, float]:
        """Return every component in seconds."""
        return dict(vars(self))


@dataclass(frozen=True)
class PipelineTiming:
    """Inputs of the pipeline model: seconds of each piece, and the schedule."""

    layer: LayerSeconds
    """Of one layer and micro-batch."""
    ends: tuple[LayerSeconds, LayerSeconds]
    """Of the embedding, and of the last norm, output and loss."""
    layers: tuple[int, ...]
    """Of each pipeline rank."""
    vpp: int
    micro_batches: int
    transfer: float = 0.0
    """Seconds of a message to the next stage."""
    exposed: float = 0.0
    """Seconds of exposed FSDP messages."""
    optimizer: float = 0.0
    microbatch_group_size: int = 0
    schedule: Kind = "interleaved"

    @property
    def rank_seconds(self) -> list[float]:
        """Seconds of each pipeline rank for one micro-batch."""
        seconds = [count * self.layer.total for count in self.layers]
        seconds[0] += self.ends[0].total
        seconds[-1] += self.ends[1].total
        return seconds

    def step(self) -> StepTime:
        """Return the step time by component."""
        ranks, count = self.rank_seconds, self.micro_batches
        mean_rank = {
            name: (sum(self.layers) * value + sum(vars(end)[name] for end in self.ends)) * count / len(ranks)
            for name, value in vars(self.layer).items()
        }
        mean = sum(ranks) / len(ranks)
        return StepTime(
            **mean_rank,
            pp=2 * (len(ranks) - 1) * self.transfer,
            dp=self.exposed,
            bubble=pipeline_idle(len(ranks), self.vpp, count, self.microbatch_group_size, self.schedule) * mean,
            imbalance=count * (max(ranks) - mean),
            optimizer=self.optimizer,
        )


@cache
def pipeline_idle(
    ranks: int, vpp: int, micro_batches: int, microbatch_group_size: int = 0, schedule: Kind = "interleaved"
) -> float:
    """Return how long a pipeline rank is idle in a step, in units of its work for one micro-batch.

    (PP - 1) / V from PP micro-batches on (arXiv 2407.21783, section 3.3.2). With fewer, M, a rank idles PP - M turns in
    each of its V rounds: PP - M + (M - 1) / V. Where M is nearly PP, or fewer than PP micro-batches run in a row, ranks
    idle longer than that, so the schedule is simulated. Zero-bubble is simulated too.
    """
    in_a_row = min(microbatch_group_size or ranks, micro_batches)
    if schedule == "zero-bubble":
        count = min(micro_batches, 2 * ranks) if in_a_row >= ranks else micro_batches  # periodic from 2 PP on
        return bubble(actions(schedule, ranks, vpp, count, microbatch_group_size)) * count
    if in_a_row >= ranks:
        return (ranks - 1) / vpp
    if in_a_row == micro_batches and 3 * micro_batches < 2 * ranks:
        return ranks - micro_batches + (micro_batches - 1) / vpp
    return bubble(actions("interleaved", ranks, vpp, micro_batches, microbatch_group_size)) * micro_batches


class StepModel:
    """Predicts steps of one model on one cluster; computes only once what layouts share.

    Tensor-parallel messages do not overlap with products, as the engine has none of that without async_tp, and
    messages of different axes do not compete for the network.
    """

    def __init__(self, config: Model, vocab_size: int, network: Network, curves: Curves) -> None:
        self.config, self.vocab_size, self.network, self.curves = config, vocab_size, network, curves
        layer, none = range(1), range(0)
        self._pieces = (
            PipelineStage(1, layer, False, False),
            PipelineStage(0, none, True, False),
            PipelineStage(config.layers + 1, none, False, True),
        )
        """One layer, the embedding and the head, as stages."""
        self._cache: dict[tuple[int | str | bool, ...], tuple[LayerSeconds, LayerSeconds, LayerSeconds]] = {}

    def predict(self, layout: Layout, world: int, load: Load) -> StepTime:
        """Return the step of `world` GPUs. The layout must fit (`Layout.check`)."""
        return self.pipeline(layout, world, load).step()

    def pipeline(self, layout: Layout, world: int, load: Load) -> PipelineTiming:
        """Return the inputs of the pipeline model, from which a step is computed or drawn."""
        layer, embedding, head = self._micro_batch(layout, load)
        ranges = split_layers(self.config.layers, layout.stages)
        layers = tuple(sum(len(stage) for stage in ranges[rank :: layout.pp]) for rank in range(layout.pp))
        sent = transfers(1 if layout.stages > 2 else 0, self.config, layout, load)
        pieces = shards(layout, world)
        ends = [shard_elements(stage.ends(self.config, self.vocab_size), layout.tp, pieces) for stage in self._pieces]
        local = max(layers) * layer_elements(self.config, layout.tp, pieces) + _fullest(ends, layout)
        return PipelineTiming(
            layer,
            (embedding, head),
            layers,
            layout.vpp,
            load.micro_batches,
            self.network.send(sent[0].bytes, layout) if sent else 0.0,
            self._exposed(layout, world, load, layers, layer),
            self.curves.memory.seconds(local * STATE_BYTES * load.master / 4),
            layout.microbatch_group_size,
            layout.schedule,
        )

    def _micro_batch(self, layout: Layout, load: Load) -> tuple[LayerSeconds, LayerSeconds, LayerSeconds]:
        """Return the seconds of a layer, the embedding and the head for a micro-batch."""
        key = (layout.tp, layout.cp, load.seq_len, load.micro_batch, layout.recompute, layout.compile, load.precision)
        if key not in self._cache:
            head = head_work(self.config, self.vocab_size, layout, load)
            spent = [
                compute_seconds(
                    layer_work(self.config, layout, load), self.curves, layout.recompute, again=not layout.compile
                ),
                compute_seconds(embedding_work(self.config, layout, load), self.curves, "none", again=False),
                compute_seconds(head, self.curves, "none", again=False),
            ]
            world, timed = layout.model_parallel * layout.dp_replicate, list[LayerSeconds]()
            for seconds, stage in zip(spent, self._pieces, strict=True):
                sent = stage_volumes(stage, self.config, self.vocab_size, layout, world, load)
                tp, cp = (self._seconds(sent, axis, layout, world) for axis in ("tp", "cp"))
                timed.append(replace(seconds, tp=tp, cp=cp))
            self._cache[key] = (timed[0], timed[1], timed[2])
        return self._cache[key]

    def _seconds(self, sent: list[Collective], axis: str, layout: Layout, world: int) -> float:
        messages = [message for message in sent if message.axis == axis]
        if not messages:
            return 0.0
        group = self.network.group(axis, layout, world)
        return sum(message.count * self.network.seconds(message.kind, message.bytes, group) for message in messages)

    def _exposed(self, layout: Layout, world: int, load: Load, layers: tuple[int, ...], layer: LayerSeconds) -> float:
        """Return the exposed seconds of FSDP: messages of one layer and the ends, or those longer than a micro-batch.

        With ZeRO-3 weights are gathered for every micro-batch, each layer's behind the one before.
        """
        sent = [stage_volumes(stage, self.config, self.vocab_size, layout, world, load) for stage in self._pieces]
        once = self._seconds([message for message in sent[0] if message.when != "each"], "fsdp", layout, world)
        ends = _fullest([self._seconds(messages, "fsdp", layout, world) for messages in sent[1:]], layout)
        replica = [self._seconds(messages, "replica", layout, world) for messages in sent]
        replicas = replica[0] * max(layers) + _fullest(replica[1:], layout)
        whole, work = max(layers) * once + ends, max(layers) * layer.total
        exposed = max(min(whole, once + ends), whole - work)
        gathers = self._seconds([message for message in sent[0] if message.when == "each"], "fsdp", layout, world)
        per_micro_batch = max(0.0, gathers - layer.total) * max(layers) * load.micro_batches
        return exposed + per_micro_batch + replicas


def _fullest(ends: Sequence[float], layout: Layout) -> float:
    """Return the part of the embedding and the output on the rank with most of them: without a pipeline, both."""
    return sum(ends) if layout.pp == 1 else max(ends)
