"""What the runs of a study cost: every stage is paid for once, by the run that made it.

Operations are counted from the recipe and the model as it was trained, hours are those that the stage's artifact was
made in, times the devices of its run. A stage that was there before the study costs it nothing. What this gives up:
the hours of an attempt that was killed before it committed anything; the steps that it saved are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from llama3.model.files import CONFIG, read_config
from llama3.model.flops import flops_per_token
from llama3.recipe.schedule import Schedule, Segment
from llama3.recipe.schema import Model
from llama3.scaling.posed import ArmRun, Posed
from storage.artifact import Artifact, Store
from tasks.runs import RunRecord, family_number


@dataclass(frozen=True)
class Spent:
    """What one run trained itself."""

    flops: float
    device_hours: float
    reused: tuple[str, ...]
    """Its stages that were there before it."""


def spent(
    posed: Posed, store: Store, answers: Mapping[str, RunRecord], devices: Callable[[str], int]
) -> dict[str, Spent]:
    """Return what each run of a study trained itself, by the name of an arm's run; `devices` are those of a run."""
    payers = _payers(posed, store, answers)
    return {
        run.name: _spent(posed, store, run, answers[run.name], devices, payers)
        for run in posed.runs
        if run.name in answers
    }


def _payers(posed: Posed, store: Store, answers: Mapping[str, RunRecord]) -> dict[str, str]:
    """Return by whom each stage of the study's own is paid: the run that made it, else the first that stands on it."""
    names = {record.name for record in answers.values()}
    payers: dict[str, str] = {}
    for run in posed.runs:
        if run.name in answers:
            for _, _, artifact in _stages(store, run, answers[run.name]):
                made_by = artifact.manifest.made_by
                if family_number(posed.study.name, made_by):
                    payers.setdefault(artifact.label, made_by if made_by in names else answers[run.name].name)
    return payers


def training_flops(posed: Posed, segments: Sequence[Segment], spec: Model, rows: int) -> float:
    """Return the operations of a part of a schedule, by the study's formula."""
    formula = posed.study.ladder.formula if posed.study.ladder else "causal"
    name = {"6N": "six_n"}.get(formula, formula)
    return float(sum(part.tokens * getattr(flops_per_token(spec, rows, part.seq), name) for part in segments))


def _spent(
    posed: Posed,
    store: Store,
    run: ArmRun,
    record: RunRecord,
    devices: Callable[[str], int],
    payers: Mapping[str, str],
) -> Spent:
    flops = hours = 0.0
    reused = []
    for name, segments, artifact in _stages(store, run, record):
        if payers.get(artifact.label) != record.name:
            reused.append(name)
            continue
        spec, rows = read_config(artifact.part(f"model/{CONFIG}").parent)
        flops += training_flops(posed, segments, spec, rows)
        hours += artifact.manifest.seconds * devices(artifact.manifest.made_by) / 3600
    return Spent(flops, hours, tuple(reused))


def _stages(store: Store, run: ArmRun, record: RunRecord) -> Iterator[tuple[str, Sequence[Segment], Artifact]]:
    for span in Schedule(run.recipe).trained:
        with suppress(ValueError):  # deleted by retention
            yield span.name, span.segments, store.at(record.steps[span.name].artifact)
