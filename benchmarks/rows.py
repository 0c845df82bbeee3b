"""Rows of a benchmark: a measured value beside its target, and the report that holds them.

A row whose library is missing says "not measured" and neither meets nor misses its target: a benchmark without its
peers still gives our own numbers.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from benchmarks.measure import Cost, NotMeasured

LIBRARIES = ("herd-llm", "numpy", "numba", "duckdb", "pyarrow", "tiktoken", "tokenizers", "gigatoken", "s3fs")


@dataclass(frozen=True)
class Target:
    """The bound of a row, and what it is counted in."""

    bound: float | None
    """None: shown for what it is."""
    unit: str
    kind: Literal["at least", "at most"] = "at least"

    def met(self, value: float) -> bool | None:
        """Return whether `value` keeps the bound, if there is one."""
        if self.bound is None:
            return None
        return value >= self.bound if self.kind == "at least" else value <= self.bound

    def __str__(self) -> str:
        return "" if self.bound is None else f"{'>=' if self.kind == 'at least' else '<='} {number(self.bound)}"


@dataclass(frozen=True)
class Row:
    """One line of the table. `value` None: not measured, for the reason in `note`."""

    name: str
    value: float | None
    unit: str
    target: str
    ok: bool | None
    note: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    """What the value was made from: CPU seconds, bytes, documents of either side."""


TARGETS: Mapping[str, Target] = {
    "pipeline/datatrove": Target(50, "x less CPU"),
    "minhash/datatrove": Target(150, "x less CPU"),
    "minhash/datasketch": Target(15, "x less CPU"),
    "near/recall": Target(0.995, "of pairs, J >= 0.8"),
    "near/precision": Target(0.99, "of verified pairs, J >= 0.7"),
    "lines/datatrove": Target(100, "x less CPU"),
    "lines/datatrove-lines": Target(None, "x less CPU"),
    "lines/exact": Target(100, "% equal"),
    "filters/datatrove": Target(60, "x less CPU"),
    "filters/exact": Target(100, "% equal"),
    "filters/agreement": Target(97, "% agree"),
    "rules/default": Target(3, "% of bytes dropped", "at most"),
    "rules/repetition": Target(None, "% of bytes dropped"),
    "drops/cpu": Target(3, "% more CPU", "at most"),
    "decontaminate/questions": Target(90, "% found"),
    "language/accuracy": Target(95, "% right"),
    "scripts/normalize": Target(30, "MB per CPU s"),
    "scripts/repair": Target(30, "MB per CPU s"),
    "scripts/redact": Target(30, "MB per CPU s"),
    "scripts/language": Target(5, "MB per CPU s"),
    "scripts/html": Target(5, "MB per CPU s"),
    "scripts/markdown": Target(5, "MB per CPU s"),
    "scripts/latex": Target(30, "MB per CPU s"),
    "scripts/records": Target(30, "MB per CPU s"),
    "scripts/paragraphs": Target(30, "MB per CPU s"),
    "scripts/tokens": Target(30, "MB per CPU s"),
    "scripts/addresses": Target(10, "us each", "at most"),
    "tokens/huggingface": Target(20, "x less CPU"),
    "tokens/tiktoken": Target(5, "x less CPU"),
    "tokens/pattern": Target(None, "M tokens per CPU s"),
    "tokens/equal": Target(100, "% equal"),
    "mix/documents": Target(15, "CPU s", "at most"),
    "stream/rate": Target(200, "M tokens/s"),
    "memory/peak": Target(100, "% of the limit", "at most"),
    "scale/cpu": Target(1.05, "power of the bytes", "at most"),
    "scale/memory": Target(1.10, "x, of 4 times the bytes", "at most"),
    "scale/written": Target(1.05, "power of the bytes", "at most"),
    "scale/reads": Target(1.05, "power of the bytes", "at most"),
    "scale/requests": Target(1.05, "power of the bytes", "at most"),
    "scale/peers/datatrove": Target(20, "x less CPU"),
    "scale/peers/daft": Target(None, "x less CPU"),
    "scale/peers/memory": Target(None, "x Daft's"),
    "scale/peers/recall": Target(0.95, "of pairs, J >= 0.8"),
    "scale/peers/precision": Target(0.99, "of removed, J >= 0.7"),
    "scale/count/small": Target(0.15, "of the requests off", "at most"),
    "scale/count/large": Target(0.15, "of the requests off", "at most"),
    "scale/15t": Target(None, "USD"),
    "scale/15t/requests": Target(0.1, "of the machines' bill", "at most"),
    "scale/same-bytes/threads": Target(0, "other files", "at most"),
    "scale/same-bytes/dask": Target(0, "other files", "at most"),
    "scale/same-bytes/ray": Target(0, "other files", "at most"),
    "scale/same-bytes/bucket": Target(0, "other files", "at most"),
    "scale/same-bytes/bucket-dask": Target(0, "other files", "at most"),
    "scale/same-bytes/bucket-ray": Target(0, "other files", "at most"),
}
"""Every row of `python -m benchmarks data`, in the order of the table."""

HOUSE_TARGETS: Mapping[str, Target] = {
    "editor/callers": Target(5, "of 5 functions"),
    "folders/cycles": Target(0, "circles", "at most"),
    "folders/upward": Target(0, "imports", "at most"),
    "folders/optional": Target(0, "imports", "at most"),
    "first-step/files": Target(100, "files", "at most"),
    "tracker/downcasts": Target(0, "calls", "at most"),
    "registries/repeated": Target(0, "lists", "at most"),
    "tests/misnamed": Target(0, "test files", "at most"),
    "source/lines": Target(None, "lines"),
}
"""Every row of `python -m benchmarks house`, in order."""

TRAIN_TARGETS: Mapping[str, Target] = {
    "step/d384-fp32": Target(0.97, "x fastest peer"),
    "step/d384-bf16": Target(0.97, "x fastest peer"),
    "step/d512-fp32": Target(0.97, "x fastest peer"),
    "step/d512-bf16": Target(0.97, "x fastest peer"),
    "loss/memory": Target(5, "x less than plain"),
    "loss/time": Target(1.05, "x plain", "at most"),
    "checkpoint/blocked": Target(15, "% of the save", "at most"),
    "checkpoint/save": Target(80, "% of raw disk"),
    "checkpoint/load": Target(80, "% of raw disk"),
    "restart/agent": Target(10, "s", "at most"),
    "restart/torchrun": Target(None, "s"),
    "start/rank": Target(0.3, "CPU s", "at most"),
    "loader/wait": Target(1, "% of step time", "at most"),
    "held-out/time": Target(2, "% of training time", "at most"),
    "layout/time": Target(5, "CPU s", "at most"),
    "layout/memory": Target(1, "GB", "at most"),
    "null-cuda/waits": Target(0, "a step", "at most"),
    "null-cuda/launches": Target(125, "a layer and pass", "at most"),
    "null-cuda/host": Target(0.5, "x GPU time", "at most"),
    "null-cuda/host-8b-compile": Target(0.5, "x GPU time", "at most"),
    "null-cuda/host-70b-tp8": Target(None, "x GPU time"),
    "null-cuda/host-70b-tp8-compile": Target(0.7, "x GPU time", "at most"),
    "null-cuda/host-405b-tp8": Target(0.5, "x GPU time", "at most"),
    "null-cuda/retries": Target(0, "a step", "at most"),
    "null-cuda/memory": Target(6, "% off", "at most"),
    "roofline/1b-eager": Target(None, "% MFU, predicted"),
    "roofline/1b-compile": Target(42, "% MFU, predicted"),
    "roofline/1b-fp8": Target(None, "x bf16, predicted"),
    "roofline/3b-eager": Target(None, "% MFU, predicted"),
    "roofline/3b-compile": Target(None, "% MFU, predicted"),
    "roofline/3b-fp8": Target(None, "x bf16, predicted"),
    "roofline/8b-eager": Target(None, "% MFU, predicted"),
    "roofline/8b-compile": Target(50, "% MFU, predicted"),
    "roofline/8b-fp8": Target(1.3, "x bf16, predicted"),
    "roofline/loss": Target(4, "passes over logits", "at most"),
    "roofline/h200-8-full": Target(60, "% MFU, predicted"),
    "roofline/h200-8-causal": Target(54.5, "% MFU, predicted"),
    "roofline/h200-32-causal": Target(53.8, "% MFU, predicted"),
    "roofline/h200-8-fp8": Target(1.32, "x bf16, predicted"),
    "roofline/layer-fp8-bytes": Target(1.2, "x bf16", "at most"),
    "roofline/layer-fp8-launches": Target(80, "a layer and pass", "at most"),
    "roofline/layer-fp8-held": Target(0.5, "x bf16", "at most"),
    "gpu/attention": Target(1, "% off fp64", "at most"),
    "gpu/values-fp32": Target(0.01, "% off the CPU", "at most"),
    "gpu/values-fp32-documents": Target(0.01, "% off the CPU", "at most"),
    "gpu/values-bf16": Target(1, "% off the CPU", "at most"),
    "gpu/values-bf16-documents": Target(1, "% off the CPU", "at most"),
    "gpu/values-bf16-recompute": Target(1, "% off the CPU", "at most"),
    "gpu/values-bf16-compile": Target(1, "% off the CPU", "at most"),
    "gpu/values-fp8-compile": Target(5, "% off the CPU", "at most"),
    "gpu/chain": Target(0, "runs lost by kill -9", "at most"),
    "gpu/layer": Target(15, "% off predicted time", "at most"),
    "gpu/memory": Target(6, "% off predicted bytes", "at most"),
    "gpu/1b-bf16": Target(50, "% MFU"),
    "gpu/1b-fp8": Target(1.25, "x bf16"),
    "gpu/3b-bf16": Target(50, "% MFU"),
    "gpu/3b-fp8": Target(1.25, "x bf16"),
    "gpu/8b-bf16": Target(50, "% MFU"),
    "gpu/8b-fp8": Target(1.25, "x bf16"),
}
"""Every row of `python -m benchmarks train`, in order; a step is as fast as a peer's within the noise of some 3 %."""

STORAGE_TARGETS: Mapping[str, Target] = {
    "write/wall": Target(0.9, "x put_file"),
    "write/cpu": Target(0.9, "x put_file"),
    "reuse/local": Target(1, "s", "at most"),
    "reuse/remote": Target(1, "s", "at most"),
    "explain/local": Target(1, "s", "at most"),
    "explain/remote": Target(None, "s"),
}
"""Every row of `python -m benchmarks storage`, in order; of several thousand artifacts in one place."""

EVALUATE_TARGETS: Mapping[str, Target] = {
    "lm-eval/wall": Target(2, "x less wall time"),
    "lm-eval/cpu": Target(None, "x less CPU"),
    "lm-eval/equal": Target(100, "% of samples"),
    "lm-eval/written": Target(100, "% of texts"),
    "lm-eval/imports": Target(None, "s"),
    "sharing/wall": Target(None, "x less wall time"),
    "score/arc": Target(None, "%"),
    "score/mmlu_letters": Target(None, "%"),
    "score/mmlu_cloze": Target(None, "%"),
    "score/lambada": Target(None, "%"),
    "score/wikitext": Target(None, "bits per byte"),
    "score/gsm8k": Target(None, "%"),
    "score/humaneval": Target(None, "%"),
}
"""Every row of `python -m benchmarks evaluate`, in order."""

PLAN_TARGETS: Mapping[str, Target] = {
    "search/rate": Target(1000, "layouts per CPU s"),
    "recipe/cpu": Target(5, "CPU s", "at most"),
    "start/help": Target(0.5, "CPU s", "at most"),
    "start/usage": Target(0.5, "CPU s", "at most"),
    "start/status": Target(1, "CPU s", "at most"),
    "start/plan": Target(1, "CPU s", "at most"),
    "start/engine": Target(3, "CPU s", "at most"),
}
"""Every row of `python -m benchmarks plan`, in order."""

MIX_LAWS = ("log", "exponential", "power")
STUDY_TARGETS: Mapping[str, Target] = {
    "alpha/laptop": Target(93, "of 100 ladders"),
    "alpha/published": Target(93, "of 100 ladders"),
    "alpha/shipped": Target(93, "of 100 ladders"),
    "constants/figure": Target(0.5, "% off 16.3T", "at most"),
    "constants/text": Target(0.5, "% off 10.5T", "at most"),
    "same/annealing": Target(5, "of 100 studies", "at most"),
    "same/sources": Target(5, "of 100 studies", "at most"),
    "same/mix": Target(5, "of 100 searches", "at most"),
    **{f"gain/{law}-{count}": Target(93, "of 100 searches") for law in MIX_LAWS for count in (12, 24)},
    "scatter/3-repeats": Target(93.5, "% of intervals"),
    "scatter/2-repeats": Target(93.5, "% of intervals"),
}
"""Every row of `python -m benchmarks study`, in order."""

GATE_POLICIES = ("quickstart", "gpt2-24gb", "llama3-1b-100b", "domain-adaptation", "default", "each-task")
"""Recipes whose rules are judged; `default` has no rules of its own, `each-task` is the 1B with a margin on each task.
The few questions of `quickstart` and `default` cannot show two points, so their `worse` has no target."""
_UNJUDGED = {
    "quickstart": ("worse",),
    "default": ("worse",),
    "each-task": ("equal", "better", "worse", "false", "promoted"),
}
_GATE_ROWS = {
    "equal": Target(90, "% pass the vetoes"),
    "better": Target(95, "% pass the vetoes"),
    "worse": Target(5, "% pass the vetoes", "at most"),
    "false": Target(5, "% called better", "at most"),
    "power-0.2": Target(None, "% called better"),
    "power-0.5": Target(None, "% called better"),
    "power-1": Target(None, "% called better"),
    "promoted": Target(90, "% pass all rules"),
}
NULL_KINDS = tuple(
    f"{shape}-{clusters}-of-{documents}"
    for shape in ("normal", "skewed", "heavy")
    for clusters, documents in ((32, 32), (8, 32), (4, 64), (16, 64))
)
"""Shape of the differences of equal models, clusters and documents of a domain."""
GATE_TARGETS: Mapping[str, Target] = {
    **{f"null/{kind}": Target(5, "% called better", "at most") for kind in NULL_KINDS},
    **{f"independent/{kind}": Target(None, "% called better", "at most") for kind in NULL_KINDS},
} | {
    f"{policy}/{name}": target if name not in _UNJUDGED.get(policy, ()) else replace(target, bound=None)
    for policy in GATE_POLICIES
    for name, target in _GATE_ROWS.items()
}
"""Every row of `python -m benchmarks gate`, in order."""

CHAOS_TARGETS: Mapping[str, Target] = {
    "chaos/violations": Target(0, "broken promises", "at most"),
    "chaos/faults": Target(None, "faults"),
    "chaos/runs": Target(None, "runs"),
    "chaos/tries": Target(None, "commands a run"),
    "chaos/true-after": Target(60, "s", "at most"),
    "chaos/goodput": Target(None, "% of trained tokens"),
}
"""Rows of `python -m benchmarks chaos`, before those of the recovery times."""

OWNERS_TARGETS: Mapping[str, Target] = {
    "owners/kills": Target(None, "kills"),
    "owners/not-run": Target(0, "kills", "at most"),
    "owners/blocked": Target(0, "after two passes", "at most"),
    "owners/slots": Target(0, "lost", "at most"),
    "owners/not-once": Target(0, "flow runs", "at most"),
    "owners/lies": Target(0, "differences", "at most"),
    "owners/seconds": Target(None, "s to the second pass"),
}
"""Every row of `python -m benchmarks owners`, in order."""

LOAD_TARGETS: Mapping[str, Target] = {
    "status/cpu": Target(2, "CPU s", "at most"),
    "compare/cpu": Target(3, "CPU s", "at most"),
    "compare/server": Target(None, "CPU s"),
    "gc/cpu": Target(None, "CPU s"),
    "gc/linear": Target(1.1, "power of the artifacts", "at most"),
    "verify/cpu": Target(None, "CPU s"),
    "verify/linear": Target(1.1, "power of the artifacts", "at most"),
    "mlflow/list": Target(3, "CPU s", "at most"),
    "mlflow/curves": Target(3, "CPU s", "at most"),
    "postgres/list": Target(3, "CPU s", "at most"),
    "postgres/curves": Target(3, "CPU s", "at most"),
    "queued/ended": Target(100, "% of the runs"),
}
"""Every row of `python -m benchmarks load`, in order."""

_BOUNDS = {
    **TARGETS,
    **HOUSE_TARGETS,
    **TRAIN_TARGETS,
    **STORAGE_TARGETS,
    **EVALUATE_TARGETS,
    **PLAN_TARGETS,
    **STUDY_TARGETS,
    **GATE_TARGETS,
    **CHAOS_TARGETS,
    **OWNERS_TARGETS,
    **LOAD_TARGETS,
}


def measured(name: str, value: float, note: str = "", **detail: Any) -> Row:
    """Return the row `name` with its value."""
    target = _BOUNDS[name]
    return Row(name, value, target.unit, str(target), target.met(value), note, detail)


def not_measured(name: str, why: str) -> Row:
    """Return the row `name` without a value."""
    target = _BOUNDS[name]
    return Row(name, None, target.unit, str(target), None, f"not measured: {why}")


def failed(name: str, why: str) -> Row:
    """Return the row `name` of a measurement that broke down."""
    target = _BOUNDS[name]
    return Row(name, None, target.unit, str(target), False, f"failed: {why}")


class BenchmarkRun(Protocol):
    """One run of a benchmark."""

    @property
    def settings(self) -> Any:
        """What the user chose; `only` has names of rows or of their groups."""
        ...


R = TypeVar("R", bound=BenchmarkRun)


def rows_of(run: R, targets: Iterable[str], measures: Mapping[str, Callable[[R, str], Row]]) -> Iterator[Row]:
    """Yield the wanted rows as they are measured; what a missing library or an error prevents says so.

    Raises ValueError if the user asked for a row that there is not.
    """
    only, known = run.settings.only, {*measures, *(name.split("/")[0] for name in measures)}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise ValueError(f"--only: {', '.join(unknown)} is no row; the rows are {', '.join(measures)}")
    wanted = [name for name in targets if not only or name in only or name.split("/")[0] in only]
    for name in wanted:
        try:
            yield measures[name](run, name)
        except NotMeasured as error:
            yield not_measured(name, str(error))
        except RuntimeError as error:
            yield failed(name, str(error).splitlines()[-1])


def ratio(name: str, ours: Cost, peer: Cost, ours_bytes: int, peer_bytes: int) -> Row:
    """Return the row `name`: CPU time per byte of the peer over ours."""
    value = (peer.cpu_s / peer_bytes) / (ours.cpu_s / ours_bytes)
    note = f"{ours.cpu_s:.2f} s against {peer.cpu_s:.2f} s"
    if ours_bytes != peer_bytes:
        note += f", per byte: {ours_bytes / 1e6:.1f} MB against {peer_bytes / 1e6:.1f} MB"
    sides = {"ours": (ours, ours_bytes), "peer": (peer, peer_bytes)}
    return measured(name, value, note, **{side: _side(cost, size) for side, (cost, size) in sides.items()})


def _side(cost: Cost, size: int) -> dict[str, Any]:
    return {
        "cpu_s": round(cost.cpu_s, 4),
        "mb_per_cpu_s": round(size / 1e6 / cost.cpu_s, 3),
        "bytes": size,
        "peak_mb": round(cost.peak_bytes / 1e6),
        "repeats": cost.repeats,
        "facts": {key: fact for key, fact in cost.facts.items() if not isinstance(fact, list)},
    }


def report(rows: Sequence[Row], corpus: Mapping[str, Any], peers: Mapping[str, str]) -> dict[str, Any]:
    """Return the rows with what a reader must know about them: date, machine, versions, corpus. JSON-ready."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **installed(LIBRARIES)},
        "peers": dict(peers),
        "corpus": dict(corpus),
        "rows": [asdict(row) for row in rows],
    }


def machine() -> dict[str, Any]:
    """Return the processor's name and the number of its cores."""
    return {"cpu": _processor(), "cores": os.cpu_count(), "system": platform.system()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def installed(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of those of `names` that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def number(value: float) -> str:
    """Return `value` as people write it: three digits or, above a thousand, all before the point."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}" if abs(value) < 1 else f"{value:.3g}"
