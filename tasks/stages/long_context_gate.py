"""The gates between the sequence lengths of a long-context stage, as tracked steps.

The scores are an artifact, so a run that is started again does not measure them again; the decision is made anew from
them and the recipe's thresholds, so loosening a threshold takes effect at once. A failed gate ends the run before the
next length, with the numbers and what can be done.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from rich.markup import escape

from llama3.evaluate.gate import Decision, GateRow, decide
from llama3.evaluate.long_context_gate import METRICS, measure
from llama3.evaluate.needle import KEY as NEEDLE
from llama3.evaluate.scores import read_scores
from llama3.recipe.load import resolved
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.units import Tokens
from storage.artifact import Artifact, ArtifactSpec
from storage.filesystem import write_atomic
from tasks.errors import HeldBack
from tasks.stages.alerts import gate_failed
from tasks.step import Context, ensure

VERSION = 1


@task(name="advance", task_run_name="advance-{name}", cache_policy=NO_CACHE, persist_result=False)
def advance(context: Context, name: str, checkpoint: Artifact, began: Artifact | None, curated: Artifact) -> Decision:
    """Judge `checkpoint`, the end of the stage or part called `name`, by the stage's gates.

    `began` is the checkpoint that the whole stage started from. Raises HeldBack if a gate fails.
    """
    schedule = Schedule(context.recipe)
    span = schedule.span(name)
    gates = span.stage.advance
    short = _length_before(schedule, span) if "short-context" in gates else None
    before = None
    if short is not None:
        assert began is not None
        before = read_scores(_scores(context, f"{span.stage.name}-start", began, curated, short, None).path)
    needle = span.lengths[-1] if "needle" in gates else None
    found = _scores(context, name, checkpoint, curated, short, needle)
    decision = decide({METRICS[gate]: rule for gate, rule in gates.items()}, read_scores(found.path), before)
    write_atomic(context.folder / f"advance-{name}.json", decision.model_dump_json(indent=1))
    rows = [row for row in decision.rows if row.metric in METRICS.values() or not row.passed]
    for row in rows:
        context.console.say(f"  {escape(_line(row))}")
    if not decision.accepted:
        reasons = "; ".join(_line(row) for row in rows if not row.passed)
        position = checkpoint.facts["end"]
        gate_failed(context.root, context.console, context.record.name, name, reasons, position)
        raise HeldBack(_remedies(schedule, span, rows, found))
    return decision


def _length_before(schedule: Schedule, span: StageSpan) -> int:
    """Return the sequence length that was trained before the whole stage of `span`."""
    segments = schedule.segments
    return segments[next(place for place, part in enumerate(segments) if part.stage == span.stage.name) - 1].seq


def _scores(
    context: Context, name: str, checkpoint: Artifact, curated: Artifact, short: int | None, needle: int | None
) -> Artifact:
    recipe = context.recipe
    design = ArtifactSpec(
        kind="advance",
        name=checkpoint.manifest.name,
        version=VERSION,
        parameters={
            "short": short,
            "needle": needle,
            "documents": recipe.evaluate.documents,
            "needles": recipe.evaluate.needles if needle else None,
            "weights": resolved(recipe)["mix"][recipe.stages[0].mix],
        },
        inputs={"checkpoint": checkpoint.key, "curated": curated.key},
    )

    def build(folder: Path, _: str) -> dict[str, Any]:
        model, device = checkpoint.part("model"), context.cluster.device
        return measure(recipe, model, curated.path, folder, short=short, needle=needle, device=device)

    return ensure(context, f"advance-{name}", design, build)


def _line(row: GateRow) -> str:
    """Say what one gate measured, what it asks for and whether it is passed."""
    verdict = "passed" if row.passed else "failed"
    if row.metric not in METRICS.values() or row.candidate is None:
        return f"{row.metric} {verdict}: {row.reason}"
    if row.metric == NEEDLE:
        return f"needle {verdict}: {row.candidate:.1%} of the sentences found; the gate asks for {row.rule}"
    return (
        f"short-context {verdict}: {row.candidate:.4f} bits per byte, {row.champion:.4f} before the stage; "
        f"the gate allows {row.threshold:.4f} ({row.rule})"
    )


def _remedies(schedule: Schedule, span: StageSpan, rows: list[GateRow], found: Artifact) -> str:
    """Return the numbers of a failed gate and what the author can do about them."""
    stage, last = span.stage, span.segments[-1]
    prefix = f"{NEEDLE}/depth_"
    depths = [(int(key.removeprefix(prefix)), found.facts[key]) for key in sorted(found.facts) if prefix in key]
    return "\n".join(
        [
            f"stages.{stage.name}.advance: {span.name} does not pass at sequence {last.seq}; "
            f"the run stops at position {last.end:,}",
            *(f"  {_line(row)}" for row in rows),
            *(["  needle by depth: " + ", ".join(f"{d} %: {share:.0%}" for d, share in depths)] if depths else []),
            "the future of a recipe may change; change one of these and start the run again:",
            f"  stages.{stage.name}.{_longer(schedule, span)}  # trains twice as long at this length",
            f"  stages.{stage.name}.advance: {_loosened(span, rows)}  # takes the model as it is",
        ]
    )


def _longer(schedule: Schedule, span: StageSpan) -> str:
    """Return the field of a stage, and its value, that doubles the training at this length and keeps the others."""
    segments = schedule.span(span.stage.name).segments
    sizes = [Tokens(segment.tokens) for segment in segments]
    last = span.part if span.part is not None else len(sizes) - 1
    sizes[last] = Tokens(2 * sizes[last])
    if len(sizes) > 1:
        return f"for: [{', '.join(map(str, sizes))}]" + (" in place of until" if span.stage.until else "")
    return f"until: {Tokens(span.start + sizes[0])}" if span.stage.until else f"for: {sizes[0]}"


def _loosened(span: StageSpan, rows: list[GateRow]) -> str:
    """Return the gates with the bounds of those that failed moved as far as what was measured."""
    measured = {row.metric: row for row in rows}
    gates = []
    for gate, rule in span.stage.advance.items():
        row, text = measured[METRICS[gate]], str(rule)
        if not row.passed and row.candidate is not None and gate == "needle":
            text = f"at least {math.floor(100 * row.candidate) / 100:g}"
        elif not row.passed and row.candidate is not None and row.champion is not None:
            text = f"no worse than {math.ceil(1000 * (row.candidate / row.champion - 1)) / 10:g}%"
        gates.append(f"{gate}: {text}")
    return f"{{{', '.join(gates)}}}"
