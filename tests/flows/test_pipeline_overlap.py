"""Evaluations and gates beside training: a failure ends the run at the start of the stage after next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from herd.flows.pipeline import StageOverlap
from herd.tasks.pipeline_steps import pipeline_steps
from herd.tasks.step import Context, PipelineStep
from tests.tasks.promotion_workspace import PromotionWorkspace

TINY = ("evaluate.next_stage=overlap", "evaluate.after=[ramp-1, main]")


def step(context: Context, name: str, task: Callable[..., Any]) -> PipelineStep:
    """Return the step `name` with `task`, which gets the context and the stage, in place of its own."""
    steps = {step.name: step for step in pipeline_steps(context.recipe)}
    return replace(steps[name], task=lambda: task)


def test_a_failure_ends_the_run_before_the_stage_after_next(tmp_path: Path) -> None:
    context = PromotionWorkspace(tmp_path, *TINY).context
    goes_on = threading.Event()

    def fail(own: Context, stage: str) -> None:
        goes_on.wait(60)
        assert own.agents is not context.agents
        assert own.record is context.record
        assert stage == "ramp-1"
        raise ValueError("the needle was not found")

    with StageOverlap(context) as overlap:
        assert isinstance(overlap.run(step(context, "evaluate-ramp-1", fail), {}), Future)
        overlap.run(step(context, "ramp-2", lambda *_: None), {})  # it begins, though nothing is decided
        goes_on.set()
        with pytest.raises(ValueError, match="needle"):
            overlap.run(step(context, "main", lambda *_: None), {})


def test_the_last_model_is_evaluated_before_the_gate_and_everything_is_waited_for(tmp_path: Path) -> None:
    context = PromotionWorkspace(tmp_path, *TINY).context
    done: list[str] = []
    with StageOverlap(context) as overlap:
        overlap.run(step(context, "evaluate-main", lambda *_: done.append("main")), {})
        last = f"evaluate-{context.recipe.stages[-1].name}"
        assert overlap.run(step(context, last, lambda own, _: own.record.name), {}) == context.record.name
        overlap.run(step(context, "promote", lambda _: done.append("promote")), {})
        assert done == ["main", "promote"]


def test_without_overlap_nothing_runs_beside_training(tmp_path: Path) -> None:
    context = PromotionWorkspace(tmp_path, "evaluate.after=[main]").context
    with StageOverlap(context) as overlap:
        assert overlap.run(step(context, "evaluate-main", lambda own, _: own is context), {}) is True
