"""End a flow run that crashes again and again, but not one that gets further between crashes or that a person retries.

The automation `resume crashed runs` (flows/setup.py) schedules a crashed flow run again for ever. So each attempt notes
in the flow run's labels how much there was when it began: steps done and bytes of the stages' journals, which grow with
every new optimizer step and with no repeated one. An attempt that a machine resumed and that finds no more than the one
before is a fruitless one; the sixth in a row fails instead of working. A Retry by a person starts the count again. What
this gives up: shards of a data step that is half done do not count, and the journals are those of this machine.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

from httpx import HTTPError
from prefect import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelled, Crashed

from flows.temporary import is_temporary
from flows.waiting import steps_back
from llama3.recipe.schema import Recipe
from storage.lease import holders
from storage.root import Root
from tasks.runs import Runs

RESUMED = "resumed by the automation for crashed runs"
"""Message of the state in which the automation puts a crashed run; a person's Retry has another."""
FRUITLESS = 5
"""So many resumed attempts in a row may bring nothing new."""
FOUND, COUNT = "herd.found", "herd.fruitless"


LEAVE_S = 20.0
"""As long as an earlier process of the same flow run may take to end."""


class TooManyCrashes(RuntimeError):
    """A flow run crashed again and again and got no further."""


def attempt_number() -> int:
    """Return which attempt of the flow run this is, counted from 1; 0 where no server outlives this process."""
    return 0 if is_temporary() else int(flow_run.run_count or 0)


def leave_to_a_live_one(root: Root, work: str, say: Callable[[str], None]) -> None:
    """End this process without a word to Prefect if an earlier one of the same flow run goes on with `work`.

    A worker under load reports a death minutes later a second time, when the next attempt works already; then Prefect
    starts one more. A person's Retry is not ended so: what it finds at work is on its way out.
    """
    if not flow_run.id or is_temporary():
        return
    with get_client(sync_client=True) as client:
        if not was_resumed(client.read_flow_run_states(UUID(str(flow_run.id)))):
            return
    until = time.monotonic() + LEAVE_S
    while holder := holders(root, [work]).get(work, ""):
        if time.monotonic() > until:
            say(f"{work} is used by {holder}, an earlier process of this flow run: this one leaves")
            leave_quietly()
        time.sleep(1)


def leave_quietly() -> NoReturn:
    """End this process with status 0, of which the worker says nothing: the flow run is another process's to end."""
    logging.shutdown()  # sends the lines that wait for the server
    sys.stdout.flush()
    os._exit(0)


def end_flow_run(flow_run_id: str, message: str) -> None:
    """Give a flow run whose process is gone its final state, if this server knows it and it has none.

    Crashed, unless it is a deployment's, of which that would start another attempt: then Cancelled.
    """
    if is_temporary():
        return
    with suppress(ObjectNotFound, HTTPError), get_client(sync_client=True) as client:
        dead = client.read_flow_run(UUID(flow_run_id))
        if dead.state is not None and not (dead.state.is_final() or dead.state.is_paused()):
            state: State[Any] = Cancelled(message=message) if dead.deployment_id else Crashed(message=message)
            client.set_flow_run_state(dead.id, state, force=True)


def check_attempts(found: Callable[[str], str]) -> None:
    """Note what this attempt of the flow run finds: `found` says it, given the flow run's id.

    Raises TooManyCrashes if resuming it has become pointless.
    """
    if not flow_run.id or is_temporary():  # no automation resumes it, and nobody can retry it
        return
    with get_client(sync_client=True) as client:
        own = client.read_flow_run(UUID(str(flow_run.id)))
        if steps_back(client, own):
            leave_quietly()
        here = found(str(own.id))
        fruitless = count_fruitless(own.labels, here, was_resumed(client.read_flow_run_states(own.id)))
        client.update_flow_run_labels(own.id, {FOUND: here, COUNT: fruitless})
    if fruitless > FRUITLESS:
        raise TooManyCrashes(
            f"attempt {own.run_count}: it crashed {fruitless} times in a row without a new step; the logs of its "
            "attempts say why (an out-of-memory kill leaves no words). Mend that, then Retry: nothing done is lost"
        )


def count_fruitless(labels: Mapping[str, object], now: str, resumed: bool) -> int:
    """Return how many resumed attempts in a row have found no more than the one before them."""
    before = str(labels.get(FOUND, ""))
    if not resumed or _amounts(now) > _amounts(before):
        return 0
    return int(str(labels.get(COUNT, 0))) + 1


def found_of_run(root: Root, recipe: Recipe, flow: str) -> str:
    """Return how far the run of the flow run `flow` is, as `steps:bytes`; larger compares as further."""
    record = Runs(root).of_flow_run(recipe, flow)
    return _amount(root, len(record.steps) if record else 0)


def found_of_study(root: Root, name: str) -> str:
    """Return the same of a study: the steps of all its runs."""
    return _amount(root, sum(len(record.steps) for record in Runs(root).family(name)))


def _amount(root: Root, steps: int) -> str:
    journals = (root.local / "work").glob("*/journal.jsonl")
    return f"{steps}:{sum(_bytes(path) for path in journals)}"


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # the stage was committed at this moment
        return 0


def _amounts(text: str) -> tuple[int, int]:
    steps, _, journals = text.partition(":")
    return int(steps or -1), int(journals or -1)


def was_resumed(states: Iterable[State[Any]]) -> bool:
    """Return whether the automation started the newest attempt: whether its word is the last that scheduled it.

    `Late` and `AwaitingConcurrencySlot` are scheduled states too, but only say that it waits.
    """
    asked = [state for state in states if state.name in ("Scheduled", "AwaitingRetry")]
    return bool(asked) and max(asked, key=lambda state: state.timestamp).message == RESUMED
