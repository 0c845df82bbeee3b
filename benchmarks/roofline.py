"""Rows of `python -m benchmarks train --only roofline`: an H100's step by arithmetic, from what a step really launches.

On the null CUDA device whole steps are taken as in `train_gpu`, with every operation counted: matrix products by shape,
attention by its scores, everything else by the bytes that it reads and writes (compiled blocks: the bytes of the fused
kernels, as Inductor counts them). Rates are the planner's of an H100. What this leaves out: launches that do not hide
behind work (`null-cuda/host` bounds them), messages between GPUs, caches, and power.
"""

from __future__ import annotations

import gc
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measure import NotMeasured
from benchmarks.null_cuda import FABRIC, LAUNCHES, counts, is_null, reset
from benchmarks.rows import Row, measured
from benchmarks.train_gpu import LLAMA3_VOCAB_SIZE, SEQ, SEQUENCES, SHAPES, build_model
from benchmarks.train_session import TrainSession
from herd.llama3.hardware.topology import load_fabric
from herd.llama3.model import loss
from herd.llama3.model.flops import flops_per_token
from herd.llama3.model.linear import casts_kept, keep_casts
from herd.llama3.planner.device_curves import Curves, prior_curves
from herd.llama3.recipe.sections import Model
from herd.llama3.train.device import peak_flops

PRODUCTS = ("mm", "addmm", "bmm", "_scaled_mm")
ATTENTION = ("flash_attention", "efficient_attention")
FREE = ("empty", "detach", "view", "_unsafe_view", "reshape", "alias", "set_")
"""Operations without a kernel, as their names begin."""
FLOAT8 = 1.8
"""Rate of float8 products over bf16's; assumed: the peaks are 2.0 apart, published kernels of this size 1.7 to 1.9."""
LAYERS = {"8b": 32}
"""Shape -> layers of the whole model, where the measured one has fewer."""


@dataclass
class Work:
    """What a step asks of the device."""

    products: Counter[tuple[int, int, int, bool]] = field(default_factory=Counter)
    """(rows, inner, columns, whether in float8) -> how many."""
    attention: Counter[tuple[bool, int]] = field(default_factory=Counter)
    """(backward, sequence length) -> operations of the forward pass, half of the scores."""
    moved: float = 0.0
    """Bytes that everything else reads and writes."""

    def plus(self, other: Work, times: float) -> Work:
        """Return this work and `times` the other."""

        def sums(mine: Counter[Any], theirs: Counter[Any]) -> Counter[Any]:
            return Counter({key: mine[key] + times * theirs[key] for key in mine | theirs})

        products, attention = sums(self.products, other.products), sums(self.attention, other.attention)
        return Work(products, attention, self.moved + times * other.moved)

    def seconds(self, curves: Curves) -> dict[str, float]:
        """Return the time of each kind of work."""
        return {
            "products": sum(
                count * curves.gemm.seconds(*shape) / (FLOAT8 if float8 else 1)
                for (*shape, float8), count in self.products.items()
            ),
            "attention": sum(
                curves.attention.seconds(flops, length, backward)
                for (backward, length), flops in self.attention.items()
            ),
            "elementwise": curves.memory.seconds(self.moved),
        }


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work of all operations inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in PRODUCTS:
            left, right = given[-2:] if name == "addmm" else given[:2]
            rows = left.numel() // left.shape[-1]
            self.work.products[rows, left.shape[-1], right.shape[-1], name == "_scaled_mm"] += 1
        elif any(part in name for part in ATTENTION):
            backward = "backward" in name
            query, key = (given[1], given[2]) if backward else (given[0], given[1])
            batch, heads, length, features = query.shape
            self.work.attention[backward, length] += 2 * batch * heads * length * key.shape[-2] * features
        elif not func.is_view and not name.startswith(FREE):
            tensors = given + [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.work.moved += sum({_place(each): _size(each) for each in tensors}.values())
        return result


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor that are read: once for all that an expanded one repeats."""
    repeated = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride == 0)
    return tensor.numel() // max(1, repeated) * tensor.element_size()


@cache
def step_work(shape: str, compiled: bool, float8: bool, layers: int) -> Work:
    """Return the work of a step of `shape` with so many layers; of compiled blocks, the ends and products only."""
    device = torch.device("cuda")
    model = build_model(shape, float8, device, compiled=False, layers=layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    text_BS = torch.zeros(SEQUENCES[shape], SEQ + 1, device=device, dtype=torch.int64)
    tokens_BS, targets_BS = text_BS[:, :-1].contiguous(), text_BS[:, 1:].contiguous()
    work = Work()
    for number in range(2):  # the first makes gradients and moments
        with Counting() as counting, patch.object(loss, "FUSED", ()):
            model(tokens_BS, None, targets_BS).sum().backward()
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        work = counting.work if number else work
    del model, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    dim = Model.model_validate(SHAPES[shape]).dim
    eager, fused = (loss_moved(tokens_BS.numel(), dim, each) for each in (False, True))
    work.moved += sum(fused) - sum(eager)  # compiled in every run
    if compiled:
        plain, compact = (layer_moved(shape, each, float8) for each in (False, True))
        work = work.plus(plain, -layers).plus(compact, layers)
    return work


@cache
def layer_moved(shape: str, compiled: bool, float8: bool) -> Work:
    """Return the bytes of a layer that are not products' or attention's, forward and backward."""
    device = torch.device("cuda")
    model = build_model(shape, float8, device, compiled=compiled, layers=1)
    (block,) = model.layers.values()
    caught: list[tuple[Any, Any]] = []
    block.register_forward_pre_hook(lambda _, args, more: caught.append((args, more)), with_kwargs=True)
    text_BS = torch.zeros(SEQUENCES[shape], SEQ, device=device, dtype=torch.int64)
    with fused_bytes() as fused:
        model(text_BS, head=lambda hidden_BSD, weight_VD: hidden_BSD).sum().backward()
    if compiled:
        return Work(moved=fused())
    (x_BSD, *others), more = caught[0]
    x_BSD = x_BSD.detach().requires_grad_()
    block.zero_grad(set_to_none=True)
    gradient_BSD = torch.zeros_like(x_BSD)
    with Counting() as counting:
        block(x_BSD, *others, **more).backward(gradient_BSD)
    return Work(moved=counting.work.moved)


@cache
def loss_moved(tokens: int, dim: int, fused: bool) -> tuple[float, float]:
    """Return the bytes of the loss's passes over the logits, and of what else it does beside its products."""
    hidden_BSD = torch.zeros(1, tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.zeros(LLAMA3_VOCAB_SIZE, dim, device="cuda", requires_grad=True)
    targets_BS = torch.zeros(1, tokens, device="cuda", dtype=torch.int64)

    def step() -> None:
        loss.token_nll(hidden_BSD, weight_VD, targets_BS).sum().backward()  # type: ignore[no-untyped-call]

    def uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda logits_CV, *others: (
            (logits_CV.new_empty(len(logits_CV), 1, dtype=torch.float32),) * 3 if len(others) == 1 else logits_CV
        )

    devices = ("cuda",) if fused else ()
    with Counting() as counting, patch.multiple(loss, FUSED=devices, _compiled=uncounted):
        step()
    if not fused:
        narrow = tokens * LLAMA3_VOCAB_SIZE * 2
        passes = EAGER_PASSES * narrow
        return passes, counting.work.moved - passes
    loss._compiled.cache_clear()
    with fused_bytes() as kernels:
        step()
        return kernels(), counting.work.moved


EAGER_PASSES = 18
"""In passes over bf16 logits: two casts 6, maximum 2, subtraction 4, exp 4, sum 2; 10 reads and writes, and 3 of single
values that a count of operations takes for whole."""


@contextmanager
def fused_bytes() -> Iterator[Callable[[], float]]:
    """Yield what returns the bytes of all kernels that Inductor made in the block; products and attention left out."""
    from torch._inductor import config, metrics
    from torch._inductor.compile_fx import inductor_metrics_log

    torch._dynamo.reset()
    metrics.reset()
    level, spread = inductor_metrics_log.level, inductor_metrics_log.propagate
    inductor_metrics_log.setLevel(logging.INFO)  # it counts only if it logs
    inductor_metrics_log.propagate = False
    try:
        with config.patch(force_disable_caches=True):
            yield lambda: float(sum(4 * count for node, count in metrics.nodes_num_elem if not node.is_extern()))
    finally:
        inductor_metrics_log.setLevel(level)
        inductor_metrics_log.propagate = spread


@dataclass(frozen=True)
class LayerCost:
    """Of a compiled layer of the 8B with 8,192 tokens, forward and backward, in a micro-batch after the first."""

    moved: float
    """Bytes that its own kernels read and write."""
    launches: int
    """Kernels, products included."""
    held: int
    """Bytes kept from forward to backward."""
    casts: float
    """Bytes read and written once a step, to cast weights for all micro-batches."""


@cache
def layer_cost(float8: bool) -> LayerCost:
    device = torch.device("cuda")
    model = build_model("8b", float8, device, layers=1)
    (block,) = model.layers.values()
    caught: list[tuple[Any, Any]] = []
    catch = block.register_forward_pre_hook(lambda _, args, more: caught.append((args, more)), with_kwargs=True)
    with torch.no_grad():
        model(torch.zeros(1, SEQ, device=device, dtype=torch.int64), head=lambda hidden_BSD, weight_VD: hidden_BSD)
    catch.remove()
    (x_BSD, *others), more = caught[0]
    x_BSD, gradient_BSD = x_BSD.detach().requires_grad_(), torch.zeros_like(x_BSD)
    cost = LayerCost(0, 0, 0, 0)
    with fused_bytes() as fused, casts_kept([model]):
        with torch.no_grad():
            keep_casts(block, (x_BSD,))
        casts = fused()
        for _ in range(2):  # the first compiles
            block.zero_grad(set_to_none=True)
            before = torch.cuda.memory_allocated()
            reset()
            out_BSD = block(x_BSD, *others, **more)
            held = torch.cuda.memory_allocated() - before
            out_BSD.backward(gradient_BSD)
            del out_BSD
            launches = sum(count for kind, count in counts().items() if kind.startswith(LAUNCHES))
            cost = LayerCost(fused() - casts, launches, held, casts)
    del model, block
    gc.collect()
    torch.cuda.empty_cache()
    return cost


def float8_row(name: str) -> Row:
    """Return what a layer in float8 costs; bytes as a multiple of the layer's in bf16."""
    bf16, fp8 = layer_cost(False), layer_cost(True)
    match name.removeprefix("roofline/layer-fp8-"):
        case "bytes":
            note = f"{fp8.moved / 1e9:.2f} GB against {bf16.moved / 1e9:.2f}; {fp8.casts / 1e9:.2f} once a step"
            return measured(name, fp8.moved / bf16.moved, note)
        case "launches":
            return measured(name, fp8.launches, f"bf16: {bf16.launches}")
        case "held":
            return measured(name, fp8.held / bf16.held, f"{fp8.held / 1e6:,.0f} MB against {bf16.held / 1e6:,.0f}")
        case other:
            raise ValueError(other)


H200 = {"8b": 33_983, "32 layers": 10_200, "fp8": 1.235}
"""Measured on one H200 on 2026-11-26: tokens/s of 8 layers, of 32 by layers of 2.86 us, and float8 over bf16."""
LOGITS_S, RATE = 0.027, 4.1e12
"""Seconds of the passes over the logits of 16,384 tokens there, and its bytes a second."""


def h200_row(name: str) -> Row:
    """Return what the H200's steps come to with the loss of today: its passes take the same time per byte."""
    tokens = 2 * SEQ
    eager, fused = (loss_moved(tokens, 4096, each) for each in (False, True))
    passes = fused[0] / (tokens * LLAMA3_VOCAB_SIZE * 2)
    if name.endswith("/loss"):
        return measured(name, passes, f"eager 13, as many bytes as {EAGER_PASSES}")
    saved_s = LOGITS_S * (1 - fused[0] / eager[0]) + (eager[1] - fused[1]) / RATE
    kind = name.removeprefix("roofline/h200-")
    layers = 32 if kind.startswith("32") else 8
    bf16_s = tokens / H200["32 layers" if layers == 32 else "8b"]
    if kind.endswith("fp8"):  # the bytes that a layer's weights took in each of 16 micro-batches, before and now
        casts_s = layers * (11.72e9 - layer_cost(True).moved - layer_cost(True).casts / 16) / RATE
        after_s = bf16_s / H200["fp8"] - saved_s - casts_s
        return measured(name, (bf16_s - saved_s) / after_s, f"{H200['fp8']} before; 16 micro-batches")
    config = Model.model_validate({"preset": "8b", "layers": layers})
    flops, peak = flops_per_token(config, LLAMA3_VOCAB_SIZE, SEQ), peak_flops("NVIDIA H200", "bf16")
    assert peak is not None
    per_token = flops.full if kind.endswith("full") else flops.causal
    before, after = (100 * per_token * tokens / each / peak.flops for each in (bf16_s, bf16_s - saved_s))
    note = f"{before:.1f} before; {tokens / (bf16_s - saved_s):,.0f} tokens/s, {1e3 * saved_s:.0f} ms less"
    return measured(name, after, note)


@cache
def predicted_step(shape: str, compiled: bool, float8: bool) -> dict[str, float]:
    """Return the seconds of a step of the whole model by kind of work."""
    layers = LAYERS.get(shape) or Model.model_validate(SHAPES[shape]).layers
    two, four = (step_work(shape, compiled, float8, count) for count in (2, 4))
    work = two.plus(four.plus(two, -1), (layers - 2) / 2)
    return work.seconds(prior_curves(load_fabric(FABRIC).accelerator))


def roofline_row(run: TrainSession, name: str) -> Row:
    """Return the model FLOPs utilization, by the formula over all scores, that the arithmetic gives one H100.

    Of float8: its speed over that of bf16, both compiled.
    """
    if not is_null():
        raise NotMeasured("no null CUDA device; make test-cuda")
    if name.startswith("roofline/layer-fp8-"):
        return float8_row(name)
    if name.startswith("roofline/h200-") or name == "roofline/loss":
        return h200_row(name)
    shape, mode = name.split("/")[1].split("-")
    seconds, tokens = predicted_step(shape, mode != "eager", mode == "fp8"), SEQUENCES[shape] * SEQ
    total = sum(seconds.values())
    parts = ", ".join(f"{kind} {100 * part / total:.0f} %" for kind, part in seconds.items())
    note = f"{tokens / total:,.0f} tokens/s; {parts}"
    if mode == "fp8":
        return measured(name, sum(predicted_step(shape, True, False).values()) / total, note, seconds=seconds)
    config = Model.model_validate({**SHAPES[shape], **({"layers": LAYERS[shape]} if shape in LAYERS else {})})
    flops, peak = flops_per_token(config, LLAMA3_VOCAB_SIZE, SEQ), peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    assert peak is not None
    full, causal = (100 * per_token * tokens / total / peak.flops for per_token in (flops.full, flops.causal))
    return measured(name, full, f"causal {causal:.1f} %; {note}", seconds=seconds)
