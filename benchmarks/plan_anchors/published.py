"""Llama 3's published runs: Table 4 of arXiv 2407.21783, the constant fitted to it, and how rows compare.

The step-time model has one free constant on Hopper, the efficiency of an infinite matrix product. It is fitted on the
first row of Table 4 and absorbs all that is not modeled: launch gaps, clocks under load, overlap. The two other rows
are predictions. Most anchors come with ablations: the same model without one of its parts, which must miss.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from scipy.optimize import brentq

from herd.llama3.hardware.topology import Fabric, load_fabric
from herd.llama3.model.flops import flops_per_token
from herd.llama3.parallel.layout import LLAMA3_VOCAB_SIZE, TABLE_4, Layout
from herd.llama3.parallel.memory import Load
from herd.llama3.planner.collectives import Network
from herd.llama3.planner.device_curves import Curves, prior_curves
from herd.llama3.planner.layout_search import Candidate, LayoutQuery, evaluate_layout
from herd.llama3.planner.step_time import StepModel
from herd.llama3.recipe.sections import Model


@dataclass(frozen=True)
class Anchor:
    """A prediction, the published figure, and the verdict: `ok` if it meets its target, or as an ablation misses it."""

    number: str
    """A1 .. A26."""
    what: str
    """The quantity, in words."""
    predicted: float
    published: float | None
    """None where only a bound is published, which is in the target."""
    unit: str
    target: str
    """Condition for `ok` as text: `+-3 %`, `>= 30 %`, `must miss`."""
    ok: bool
    note: str = ""
    """Fitted or assumed inputs, and the source of the published figure."""
    ablation: bool = False
    """The model without one of its parts: `ok` means that it misses, as it must."""
    known: bool = False
    """Whether the row is known to be wrong (see the note and limits.md); such a row does not fail the command."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None where there is no figure to compare it with."""
        return self.predicted / self.published - 1 if self.published else None

    @property
    def verdict(self) -> str:
        """The verdict as text for the table."""
        if self.ablation:
            return "misses" if self.ok else "NOT CAUGHT" if self.known else "DOES NOT MISS"
        return "ok" if self.ok else "known miss" if self.known else "OUTSIDE"

    @property
    def wrong(self) -> bool:
        """Whether `plan-anchors` fails: wrong without being known, or right although listed as a known miss."""
        return self.ok == self.known

    def as_dict(self) -> dict[str, Any]:
        """Return every field with error and verdict."""
        return {**asdict(self), "error": self.error, "verdict": self.verdict}


def within(predicted: float, published: float, tolerance: float) -> bool:
    """Return whether the relative error of `predicted` is at most `tolerance` (a fraction)."""
    return abs(predicted / published - 1) <= tolerance


TABLE_4_BATCH = 2**24
"""Tokens of a step: 32 sequences of 8,192 on 64 replicas (Table 4; the paper's 16M)."""
VIRTUAL = 8
"""Stages per rank: 126 layers with embedding and output as one each are 128 = 16 x 8 (section 3.3.2)."""


def meta_layout(row: int, vpp: int = VIRTUAL) -> Layout:
    """Return the layout of a row of Table 4, 0 the first."""
    layout = TABLE_4[row].layout
    return layout.model_copy(update={"vpp": vpp, "microbatch_group_size": layout.pp})


def table4_query(row: int) -> LayoutQuery:
    """Return the layout query of a row of Table 4."""
    published = TABLE_4[row]
    return LayoutQuery(llama_405b_config(), LLAMA3_VOCAB_SIZE, published.seq_len, TABLE_4_BATCH, published.world, 80e9)


@cache
def llama_405b_config() -> Model:
    """Return the model shape of the 405B."""
    return Model.model_validate({"preset": "405b"})


@cache
def roce_24k_fabric() -> Fabric:
    """Return the cluster on which it was trained."""
    return load_fabric("roce-24k")


def step_model(curves: Curves) -> StepModel:
    """Return the step model of the 405B on the RoCE cluster."""
    return StepModel(llama_405b_config(), LLAMA3_VOCAB_SIZE, Network(roce_24k_fabric()), curves)


def predict_table4_row(row: int, curves: Curves, vpp: int = VIRTUAL) -> Candidate:
    """Return the prediction of a row of Table 4."""
    return evaluate_layout(table4_query(row), meta_layout(row, vpp), 1, step_model(curves))


@cache
def fitted_h100_curves(vpp: int = VIRTUAL, attention_tflops: float | None = None) -> Curves:
    """Return Hopper's curves with the ceiling of products that gives the first row of Table 4."""
    start = prior_curves(roce_24k_fabric().accelerator)
    if attention_tflops is not None:
        start = start.with_attention(attention_tflops * 1e12)

    def curves(ceiling: float) -> Curves:
        return replace(start, gemm=replace(start.gemm, ceiling=ceiling))

    target = TABLE_4[0].tflops
    work = (
        flops_per_token(llama_405b_config(), LLAMA3_VOCAB_SIZE, table4_query(0).seq_len).causal
        * TABLE_4_BATCH
        / TABLE_4[0].world
        / 1e12
    )
    layout, load = meta_layout(0, vpp), Load(table4_query(0).seq_len, 1, TABLE_4[0].sequences)

    def miss(ceiling: float) -> float:
        return work / step_model(curves(ceiling)).predict(layout, TABLE_4[0].world, load).total - target

    return curves(float(brentq(miss, 0.2, 1.5, xtol=1e-6)))


def llama3_model() -> StepModel:
    """Return the step model fitted on the first row of Table 4."""
    return step_model(fitted_h100_curves())
