"""How a flow ends: one line that says what happened, as the message of its Prefect state.

A user's mistake, a training that got no further and a full disk end as Failed with their own text; Prefect would else
log a traceback of ours above it, once for the task and twice for the flow. Anything else is a bug and keeps its
traceback. What this gives up: a ValueError out of a bug looks like a mistake; its traceback is logged at level DEBUG.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple, cast

from prefect import get_run_logger
from prefect.states import Completed, Failed

from flows.attempts import TooManyCrashes
from llama3.evaluate.gate import Decision, Unfinished
from storage.holder import LeaseHeld
from tasks.failures import EvaluationFailed, StudyIncomplete, TrainingFailed
from tasks.runs import RunRecord
from tasks.step import Context


class Outcome(NamedTuple):
    """What a flow hands back."""

    name: str
    """What callers of the flow get: the run's name."""
    message: str
    """One line for the Prefect UI."""


MISTAKES = (ValueError, TrainingFailed, EvaluationFailed, StudyIncomplete, Unfinished, LeaseHeld, TooManyCrashes)
"""What is told in words."""


BEGUN = threading.Event()
"""Set once a flow of this process has begun its work: what fails before that may be tried again."""


def told(work: Callable[[], Outcome]) -> str:
    """Do `work` and return what the flow is to return: a Prefect state that says how it went.

    Prefect gives callers of the flow what the state holds, hence the type: the outcome's name, or the exception raised.
    """
    BEGUN.set()
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_in_words)
    try:
        outcome = work()
    except MISTAKES as error:
        return _failed(error)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _failed(error)
    return cast(str, Completed(message=outcome.message, data=outcome.name))


def _failed(error: Exception) -> str:
    get_run_logger().debug("it was raised here", exc_info=error)
    return cast(str, Failed(message=str(error), data=error))


def _in_words(record: logging.LogRecord) -> bool:
    """Take the traceback of a mistake out of Prefect's log, and the line that repeats it when the process ends."""
    if not record.exc_info or not isinstance(record.exc_info[1], MISTAKES) or record.levelno <= logging.DEBUG:
        return True
    record.exc_info = record.exc_text = None
    return "unexpected exception" not in record.getMessage()


def run_message(context: Context, decision: Decision | None) -> str:
    """Return what came of a run: `quickstart-7 promoted, bpb 2.715; 11 steps made, 0 reused`."""
    record = context.record
    return f"{record.name} {_verdict(context, decision)}; {_steps(record)}"


def _verdict(context: Context, decision: Decision | None) -> str:
    if decision is None:
        return f"stopped after {context.record.until}, as asked"
    score = context.made[f"evaluate-{context.recipe.stages[-1].name}"].facts.get("eval/bpb")
    bpb = "" if score is None else f", bpb {score:.3f}"
    return f"{context.record.verdict}{bpb}{why_not(decision)}"


def why_not(decision: Decision) -> str:
    """Return the reasons of the gate's rows that did not pass, after a colon; nothing if all did."""
    return f": {'; '.join(decision.refusals)}" if decision.refusals else ""


def _steps(record: RunRecord) -> str:
    reused = sum(step.outcome == "reused" for step in record.steps.values())
    return f"{len(record.steps) - reused} steps made, {reused} reused"
