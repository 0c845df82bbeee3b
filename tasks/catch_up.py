"""What a run does about an MLflow that goes away: say it, note it in the record, and publish again when it is back."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from rich.markup import escape

from storage.holder import LeaseLost
from tasks.republish import republish
from tasks.step import Context


def watch(context: Context) -> None:
    """Have outages told on the console and noted in the run's record; call it before the first step."""
    reach = context.tracker.reach
    reach.stale = reach.stale or context.record.mlflow_stale
    reach.changed = partial(_changed, context)
    reach.refused = lambda words: context.console.say(f"  [yellow]MLflow refused: {escape(words)}[/]")


def catch_up(context: Context) -> bool:
    """Return whether MLflow has everything of the run; what it missed is sent now if it answers."""
    tracker, record = context.tracker, context.record
    if tracker.stale and tracker.available():
        try:
            republish(context.root, record.name, tracker, record)
        except (ValueError, OSError) as error:  # the truth itself cannot be read now; later, or by hand
            tracker.reach.stale = True
            context.console.say(f"  [yellow]MLflow lacks a part of this run: {escape(str(error))}[/]")
        else:
            if not tracker.stale:
                context.console.say("  MLflow has everything again")
    if record.mlflow_stale != tracker.stale:
        record.mlflow_stale = tracker.stale
        with suppress(LeaseLost):
            context.runs.save(record)
    return not tracker.stale


def _changed(context: Context, away: bool, why: str) -> None:
    if away:
        context.record.mlflow_stale = True
        with suppress(LeaseLost):
            context.runs.save(context.record)
        say = f"  [yellow]MLflow cannot be reached ({escape(why)}); the run goes on, what it misses is sent later[/]"
        context.console.say(say)
    else:
        context.console.say("  MLflow answers again")
