"""A21 to A23: figures that pin single terms of the step, and each term taken out of it.

The constant fitted on Table 4 takes up a wrong term, so the rows there cannot tell most of them. A21 and A22 hold two
rates against measurements in which that constant has no part. A23 takes one term after the other out of the step, fits
again, and looks at the rows that were not fitted: where they stay inside their targets no public figure known to us
pins the term, and the row says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from scipy.optimize import brentq

from llama3.cluster.anchor import Anchor, within
from llama3.cluster.network import Network
from llama3.cluster.published import TABLE_4_BATCH, fitted, llama_405b, meta_layout, roce_24k, wanted
from llama3.cluster.steptime import StepModel, StepTime
from llama3.model.flops import flops_per_token
from llama3.parallel.layout import Layout
from llama3.parallel.memory import Load
from llama3.parallel.scale import ROWS, TABLE_4
from llama3.recipe.schema import Model

NCCL = "S. Jeaugey of NCCL, github.com/NVIDIA/nccl-tests, issue 212, 2024-05-06"
BUS = 370.0
"""GB/s of an H100's NVLink as bus bandwidth shows it where nothing is reduced in the switch."""
LARGE = 8 * 2**30
TITAN = "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3"
SCALING = 6514 / 6667
"""Tokens per second and GPU of Llama 3.1 8B with FSDP and torch.compile, 128 GPUs over 8."""
OUT_OF_REACH = "out of reach: no public figure known to us pins this term; the fitted ceiling takes it up"
TERMS: dict[str, tuple[Callable[[StepTime], float], str]] = {
    "messages of context parallelism": (lambda step: step.cp, ""),
    "the bubble": (lambda step: step.bubble, ""),
    "imbalance of the pipeline": (lambda step: step.imbalance, OUT_OF_REACH),
    "transfers between stages": (lambda step: step.pp, OUT_OF_REACH),
    "elementwise work": (lambda step: step.elementwise, OUT_OF_REACH),
    "messages of FSDP": (lambda step: step.dp, "A22 pins the rate of cards; nothing pins how much is hidden"),
    "messages of tensor parallelism": (lambda step: step.tp, "A21 pins the rate; nothing pins how much is hidden"),
}
"""Term -> its seconds, and why Table 4 does not tell that it is gone; empty where it does."""


def anchors() -> list[Anchor]:
    """Return the rows of A21, A22 and A23."""
    return [*_nvlink(), *_scaling(), *_terms()]


def _nvlink() -> Iterator[Anchor]:
    what = "bus bandwidth of an all-gather of 8 GiB among the 8 GPUs of a server"
    found = _bus(1.0)
    yield Anchor("A21", what, found, BUS, "GB/s", "+-5 %", within(found, BUS, 0.05), NCCL)
    for faster in (0.5, 2.0, 10.0):
        found = _bus(faster)
        name = f"the same, NVLink at {360 * faster:,.0f} GB/s"
        yield Anchor("A21", name, found, BUS, "GB/s", "must miss 5 %", not within(found, BUS, 0.05), ablation=True)


def _bus(faster: float) -> float:
    network = _network(inside=faster)
    taken = network.seconds("all-gather", LARGE, network.group("tp", Layout(tp=8), 8))
    return LARGE * 7 / 8 / taken / 1e9


def _scaling() -> Iterator[Anchor]:
    """The ceiling of products and the memory's rate are alike in both runs, so little of them is left in the ratio."""
    found = _ratio(_network())
    note = f"8,192 tokens, 2 sequences a GPU, selective recomputation; {TITAN}"
    what = "8B with FSDP: tokens per second and GPU on 128 GPUs over 8"
    yield Anchor("A22", what, found, SCALING, "", "+-3 %", within(found, SCALING, 0.03), note)
    for name, found in (
        ("the optimizer's bytes x 10", _ratio(_network(), optimizer=10.0)),
        ("cards at an eighth of their rate", _ratio(_network(outside=1 / 8))),
    ):
        ok = not within(found, SCALING, 0.03)
        yield Anchor("A22", f"the same, {name}", found, SCALING, "", "must miss 3 %", ok, ablation=True)


def _ratio(network: Network, optimizer: float = 1.0) -> float:
    model = StepModel(Model.model_validate({"preset": "8b"}), ROWS, network, fitted())
    layout, load = Layout(zero=3, recompute="selective"), Load(8192, 2, 1)
    few, many = (model.predict(layout, world, load) for world in (8, 128))
    return _scaled(few, optimizer) / _scaled(many, optimizer)


def _scaled(step: StepTime, optimizer: float) -> float:
    return replace(step, optimizer=optimizer * step.optimizer).total


def _network(inside: float = 1.0, outside: float = 1.0) -> Network:
    """Return the 24K cluster's network with links inside of servers, and cards, so many times as fast."""
    network = Network(roce_24k())
    first, *others = network.layers
    network.layers = [
        replace(first, bytes_per_s=inside * first.bytes_per_s),
        *(replace(layer, bytes_per_s=outside * layer.bytes_per_s) for layer in others),
    ]
    return network


def _terms() -> Iterator[Anchor]:
    for name, (seconds, why) in TERMS.items():
        found = _refitted(lambda step, seconds=seconds: step.total - seconds(step))  # type: ignore[misc]
        errors = {row: found[row] / TABLE_4[row].tflops - 1 for row in (1, 2)}
        missed = abs(errors[1]) > 0.03 or abs(errors[2]) > 0.05
        row = max(errors, key=lambda row: abs(errors[row]) / (0.03 if row == 1 else 0.05))
        yield Anchor(
            "A23",
            f"row {row + 1} of Table 4 without {name}, fitted again",
            found[row],
            TABLE_4[row].tflops,
            "TFLOP/s",
            f"must miss {3 if row == 1 else 5} %",
            missed,
            why,
            ablation=True,
            known=bool(why),
        )


def _refitted(total: Callable[[StepTime], float]) -> dict[int, float]:
    """Return TFLOP/s of rows 2 and 3 of Table 4 where `total` is the step, the ceiling fitted on row 1 once more."""
    curves, network = fitted(), Network(roce_24k())

    def tflops(ceiling: float, row: int) -> float:
        model = StepModel(llama_405b(), ROWS, network, replace(curves, gemm=replace(curves.gemm, ceiling=ceiling)))
        published, seq = TABLE_4[row], wanted(row).seq
        step = model.predict(meta_layout(row), published.world, Load(seq, 1, published.sequences))
        work = flops_per_token(llama_405b(), ROWS, seq).causal * TABLE_4_BATCH / published.world
        return work / total(step) / 1e12

    ceiling = float(brentq(lambda ceiling: tflops(ceiling, 0) - TABLE_4[0].tflops, 0.2, 1.5, xtol=1e-6))
    return {row: tflops(ceiling, row) for row in (1, 2)}
