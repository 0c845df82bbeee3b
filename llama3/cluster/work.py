"""What a layer asks of a GPU, and the seconds of it: matrix products, attention, elementwise work.

Each part of the model is written down once as `Work` (local shapes of the products, operations of causal attention,
bytes that elementwise work moves) and priced by the curves of a device. Given up: launch gaps and clocks that fall
under load, which a fit of the product curve absorbs; documents shorter than the sequence, which make attention cheaper.

Shapes: T tokens of a micro-batch after the gather of tensor parallelism, D model, F hidden of the feed-forward block,
V vocabulary rows, K E features of all key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama3.cluster.curves import Curves
from llama3.parallel.layout import Layout
from llama3.parallel.memory import Load
from llama3.recipe.schema import Model

FED, WHOLE = slice(2, 3), slice(0, 3)
"""Of a layer's products, those that selective and full recomputation make again: never the last, which nobody reads."""


@dataclass(frozen=True)
class Work:
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
class Spent:
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


def layer_work(spec: Model, layout: Layout, load: Load) -> Work:
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
    return Work(products, 2.0 * tokens * load.seq * spec.dim / tp, load.seq, float(moved))


def head_work(spec: Model, rows: int, layout: Layout, load: Load) -> Work:
    """Return the work of last norm, output matrix and loss: logits are read and written four times, in fp32."""
    tokens = load.micro_batch * load.seq // layout.cp
    moved = tokens * (rows // layout.tp) * 4 * load.wide
    return Work(((tokens, spec.dim, rows // layout.tp),), moved=float(moved))


def embedding_work(spec: Model, layout: Layout, load: Load) -> Work:
    """Return the work of the embedding: rows are read and written."""
    tokens = load.micro_batch * load.seq // layout.cp
    return Work(moved=2.0 * tokens * spec.dim * load.narrow)


def spend(work: Work, curves: Curves, recompute: str, again: bool = True) -> Spent:
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
    return Spent(3 * sum(each), forward + backward, 3 * moved, made_again)
