"""Which run a flow works on: the one that its flow run began, an unfinished one of the same recipe, or a new one.

Whichever it is, its lease is held as long as it is worked on, its mark says that it is open, and a witness waits for
the end of this process. Who asks for a recipe on which another process works gets a run of its own, which waits for
each step that the other makes and reuses it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from prefect.runtime import flow_run

from flows.attempts import attempt_number, end_flow_run, leave_to_a_live_one
from flows.parameters import PipelineParameters
from flows.witness import witnessed
from llama3.recipe.schema import Recipe
from storage.lease import Lease, LeaseHeld, lease
from tasks.console import Console
from tasks.promotions import WAITS
from tasks.run_settler import mark_open
from tasks.runs import RunRecord, Runs
from tasks.step import code_version


@contextmanager
def claimed(
    config: PipelineParameters, recipe: Recipe, runs: Runs, console: Console
) -> Iterator[tuple[RunRecord, int]]:
    """Yield the record to work on, held for this process, and the fence of its lease."""
    with ExitStack() as held:
        record, mine = _found(held, config, recipe, runs, console) or _begun(held, config, recipe, runs)
        before = record.prefect_run
        record.state, record.error, record.ended, record.code = "running", "", "", code_version()
        record.until, record.prefect_run = config.until, str(flow_run.id or "")
        record.study = config.study or record.study
        runs.hold(record.name, mine)
        mark_open(runs.root, record.name)
        runs.save(record)
        if before and before != record.prefect_run:
            end_flow_run(before, f"its process is gone; {record.name} goes on in another flow run")
        held.enter_context(witnessed(runs.root, f"runs/{record.name}", attempt_number()))
        yield record, mine.fence


def _found(
    held: ExitStack, config: PipelineParameters, recipe: Recipe, runs: Runs, console: Console
) -> tuple[RunRecord, Lease] | None:
    """Return the run to continue and its lease, or None if there is none or another process works on it."""
    begun = runs.of_flow_run(recipe, str(flow_run.id or ""))
    if begun is not None:  # its earlier process may live, though Prefect believes it dead: it is waited for
        leave_to_a_live_one(runs.root, f"runs/{begun.name}", console.say)
        mine = _hold(
            held, runs, begun, lambda holder: console.say(f"waiting until {begun.name} is free: {holder} works on it")
        )
        return _continued(runs, begun, console), mine
    earlier = None if config.new or config.from_step else runs.unfinished(recipe, config.until)
    if earlier is None or earlier.verdict == WAITS:
        return None
    try:
        mine = _hold(held, runs, earlier)
    except LeaseHeld:
        return None
    return _continued(runs, earlier, console), mine


def _continued(runs: Runs, record: RunRecord, console: Console) -> RunRecord:
    """Return the record as it is now that it is ours, one attempt on."""
    now = runs.find(record.name)
    now.attempts += 1
    console.say(f"continuing [bold]{now.name}[/], which did not finish (attempt {now.attempts})")
    return now


def _begun(held: ExitStack, config: PipelineParameters, recipe: Recipe, runs: Runs) -> tuple[RunRecord, Lease]:
    record = runs.begin(recipe, code_version(), config.rerun_of, config.from_step, config.until)
    return record, _hold(held, runs, record)


def _hold(held: ExitStack, runs: Runs, record: RunRecord, wait: Callable[[str], None] | None = None) -> Lease:
    """Take the run's lease for as long as `held` is open. Without `wait`, raises LeaseHeld if another has it."""
    return held.enter_context(lease(runs.root, f"runs/{record.name}", record.name, wait, lost=_leave))


def _leave() -> None:
    """End this process as any stop does, because another has taken the run over: the trainer saves and ends."""
    os.kill(os.getpid(), signal.SIGTERM)
