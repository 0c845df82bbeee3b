"""The tables on Prefect's page of a run: what each stage came to, and at the end what the whole run did."""

from __future__ import annotations

from typing import Any

from llama3.evaluate.scores import Score, read_scores
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.units import tokens
from llama3.train.averaging import Choice
from storage.artifact import Artifact
from tasks import pages
from tasks.runs import StepRecord
from tasks.scores import SCORE
from tasks.step import Context
from tasks.words import bits_per_byte, clock, losses, size


def stage_done(context: Context, stage: str) -> None:
    """Show the result of a training stage that has just been recorded; on the page of its task."""
    span = {span.name: span for span in Schedule(context.recipe).trained}[stage]
    # The UI fails on a table with a column of no name.
    rows = [{"what": name, "value": value} for name, value in _facts(context, span).items() if value]
    pages.table(f"{context.record.name}-{stage}-result", rows, f"Stage **{stage}** of {context.record.name}")


def run_done(context: Context) -> None:
    """Show every step of the run and its scores, and wait a moment for the last pages."""
    record, spans = context.record, {span.name: span for span in Schedule(context.recipe).trained}
    steps = [_row(step, entry, context.made.get(step), spans.get(step)) for step, entry in record.steps.items()]
    verdict = f" **{record.verdict}**" if record.verdict else ""
    pages.table(f"{record.name}-steps", steps, f"{record.name}{verdict}: steps")
    if scores := _scores(context):
        pages.table(f"{record.name}-scores", scores, f"{record.name}{verdict}: scores of the last evaluation")
    pages.flush()


def _facts(context: Context, span: StageSpan) -> dict[str, str]:
    entry, artifact = context.record.steps[span.name], context.made[span.name]
    facts = artifact.facts
    return {
        "outcome": entry.outcome,
        "why": entry.why,
        "positions": f"{span.start:,} to {span.end:,}",
        "tokens": tokens(span.tokens),
        "steps": f"{span.steps:,}",
        "mean loss": losses(facts, 4),
        "held out, bits per byte": bits_per_byte(facts, 4),
        "time": clock(entry.seconds) if entry.seconds else "",
        "average": str(Choice.model_validate(facts["average"])) if "average" in facts else "",
        "artifact": f"{artifact.label} ({size(artifact.bytes)})",
        "SHA-256 of the model": facts["model_sha256"],
    }


def _row(step: str, entry: StepRecord, artifact: Artifact | None, span: StageSpan | None) -> dict[str, Any]:
    facts = artifact.facts if artifact is not None and span is not None else {}
    return {
        "step": step,
        "outcome": entry.outcome,
        "why": entry.why,
        "tokens": tokens(span.tokens) if span else "",
        "mean loss": losses(facts) if facts else "",
        "held out, bits per byte": bits_per_byte(facts),
        "time": clock(entry.seconds) if entry.seconds else "",
        "artifact": entry.artifact,
    }


def _scores(context: Context) -> list[dict[str, Any]]:
    evaluation = context.made.get(f"evaluate-{context.recipe.stages[-1].name}")
    if evaluation is None:
        return []
    return [_score_row(score) for _, score in sorted(read_scores(evaluation.path).items())]


def _score_row(score: Score) -> dict[str, Any]:
    return {
        "score": score.key.removeprefix(SCORE),
        "value": round(score.value, 4),
        "95 %": score.interval(),
        "n": f"{score.n}, {score.unjudged} not judged" if score.unjudged else score.n,
        "chance": "" if score.chance is None else round(score.chance, 4),
        "shots": score.shots,
        "version": score.version,
    }
