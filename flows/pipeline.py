"""The whole chain, from raw text to a promoted model, as one Prefect flow.

Every step (`herd.tasks.pipeline_steps`) finds or makes an artifact, so a retry, a rerun, a second run
and a run that stops early all take this path.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from typing import Any

from prefect import flow

from herd.flows.crash_recovery import check_attempts, progress_of_run
from herd.flows.recipe_form import PipelineParameters, RerunParameters, chosen_recipe
from herd.flows.run_lifecycle import FlowResult, find_run, flow_state, open_run, run_message
from herd.llama3.evaluate.gate import Decision
from herd.tasks.launch.local import Agents
from herd.tasks.pipeline_steps import first_step, last_step
from herd.tasks.step import Context, PipelineStep


@flow(name="pipeline", persist_result=False)
def pipeline(config: PipelineParameters = PipelineParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Run a recipe from raw text to a promoted model and return the run's name."""
    return flow_state(lambda: run_recipe(config.resolved_parameters()))


def run_recipe(config: PipelineParameters) -> FlowResult:
    """Open a new run, or the one to continue, and do its steps. Raises ValueError and TrainingFailed."""
    recipe = chosen_recipe(config)
    from_step, until = first_step(recipe, config.from_step), last_step(recipe, config.until)
    config = config.model_copy(update={"from_step": from_step, "until": until})
    check_attempts(config.root_at, lambda flow: progress_of_run(config.root_at, recipe, flow))
    with open_run(config, recipe) as context:
        decision = run_chain(context, until)
    return FlowResult(context.record.name, run_message(context, decision))


class StageOverlap:
    """Evaluations and gates that run while the next stage trains; without `evaluate.next_stage: overlap`, before it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        # an agent works on one attempt after the other, so that of the trainer cannot start these
        self.agents = Agents(context.folder / "logs" / "agent-overlap.log")
        self.pool = ThreadPoolExecutor(1)
        self.begun: list[Future[Any]] = []
        """Since the last stage began."""
        self.older: list[Future[Any]] = []

    def __enter__(self) -> StageOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.agents.stopped = True
        self.agents.close()  # what still runs ends with its processes
        self.pool.shutdown(cancel_futures=True)

    def run(self, step: PipelineStep, artifacts: dict[str, Any]) -> Any:
        """Return the result of the step; if the next stage may train while it runs, begin it and return its Future."""
        recipe = self.context.recipe
        if step.span is None:
            self.finish()
        elif not step.overlaps:
            self.next_stage()
        elif recipe.evaluate.next_stage == "overlap" and step.span.stage != recipe.stages[-1]:
            beside = replace(self.context, agents=self.agents)
            self.begun.append(self.pool.submit(copy_context().run, step.run, beside, artifacts))
            return self.begun[-1]
        return step.run(self.context, artifacts)

    def next_stage(self) -> None:
        """Wait for what was begun before the stage that has just ended. Raises as it does, such as GateFailed."""
        for future in self.older:
            future.result()
        self.older, self.begun = self.begun, []

    def finish(self) -> None:
        """Wait for everything."""
        self.next_stage()
        self.next_stage()


def run_chain(context: Context, until: str) -> Decision | None:
    """Do every step in order, up to `until`, and return the gate's decision if the run gets that far."""
    results: dict[str, Any] = {"": None}
    with StageOverlap(context) as overlap:
        for step in context.steps:
            inputs = {name: results[name] for name in step.inputs.values()}
            done = {name: result.result() if isinstance(result, Future) else result for name, result in inputs.items()}
            artifacts = {parameter: done[name] for parameter, name in step.inputs.items()}
            results[step.name] = overlap.run(step, artifacts)
            if step.name == until:
                break
        overlap.finish()
    return results.get(context.steps[-1].name)


# Deployments that stop early. Artifacts of other runs are reused: a schedule may curate every night, a person train.


# A rerun is a new run of the same family. Artifacts upstream of the step or the change have the same keys: reused.


@flow(name="rerun", persist_result=False)
def rerun(config: RerunParameters = RerunParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Run an earlier run's recipe again and return the new run's name."""
    return flow_state(lambda: run_recipe(config.resolved_parameters(find_run(config.root_at, config.run).name)))
