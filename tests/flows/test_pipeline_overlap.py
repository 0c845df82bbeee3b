"""Evaluations and gates beside training: a failure ends the run at the start of the stage after next."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from herd.flows.pipeline import StageOverlap
from herd.tasks.pipeline_steps import PipelineStep, pipeline_steps
from herd.tasks.step import Context
from tests.tasks.promotion_room import PromotionRoom

TINY = ("evaluate.next_stage=overlap", "evaluate.after=[ramp-1, main]")


def steps(context: Context) -> dict[str, PipelineStep]:
    return {step.name: step for step in pipeline_steps(context.recipe)}


def test_a_failure_ends_the_run_before_the_stage_after_next(tmp_path: Path) -> None:
    context = PromotionRoom(tmp_path, *TINY).context
    goes_on = threading.Event()

    def fail(own: Context) -> None:
        goes_on.wait(60)
        assert own.agents is not context.agents
        assert own.record is context.record
        raise ValueError("the needle was not found")

    with StageOverlap(context) as overlap:
        assert overlap.start(steps(context)["evaluate-ramp-1"], fail) is None
        overlap.next_stage()  # the next stage begins, though nothing is decided
        goes_on.set()
        with pytest.raises(ValueError, match="needle"):
            overlap.next_stage()


def test_the_last_model_is_evaluated_before_the_gate_and_everything_is_waited_for(tmp_path: Path) -> None:
    context = PromotionRoom(tmp_path, *TINY).context
    done: list[str] = []
    with StageOverlap(context) as overlap:
        overlap.start(steps(context)["evaluate-main"], lambda _: done.append("main"))
        last = f"evaluate-{context.recipe.stages[-1].name}"
        assert overlap.start(steps(context)[last], lambda own: own.record.name) == context.record.name
        overlap.finish()
        assert done == ["main"]


def test_without_overlap_nothing_runs_beside_training(tmp_path: Path) -> None:
    context = PromotionRoom(tmp_path, "evaluate.after=[main]").context
    with StageOverlap(context) as overlap:
        assert overlap.start(steps(context)["evaluate-main"], lambda own: own is context) is True
