"""Retention as a flow: lists, and on request deletes, what no run, alias or process needs any more."""

from __future__ import annotations

from prefect import flow
from pydantic import Field

from flows.outcome import Outcome, told
from flows.parameters import RootParameters
from llama3.recipe.units import Duration
from storage.root import Root
from tasks import pages
from tasks.aliases import labels_with_alias
from tasks.console import Console, current_console
from tasks.retention import Plan, carry_out, listing, plan_retention, retention_rows, retention_table
from tasks.words import size

MOST_LISTED = 200


class RetentionParameters(RootParameters):
    """What is kept."""

    keep_runs: int = Field(
        default=5,
        ge=1,
        title="Runs to keep",
        description="Newest runs of each recipe family whose artifacts are kept; unfinished runs and models with an "
        "alias are always kept.",
        json_schema_extra={"position": 0},
    )
    older_than: str = Field(
        default="7 d",
        title="Older than",
        description="Only what was made longer ago than this is deleted: 12 h, 7 d.",
        json_schema_extra={"position": 1},
    )
    dry_run: bool = Field(
        default=True,
        title="Dry run",
        description="Only list what would be deleted.",
        json_schema_extra={"position": 2},
    )


@flow(name="retention", persist_result=False)
def retention(config: RetentionParameters = RetentionParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Delete artifacts that no kept run, alias or live process stands on, and return what was done in one line.

    Args:
        config: What is kept.
    """
    return told(lambda: _outcome(config))


def _outcome(config: RetentionParameters) -> Outcome:
    text = clean_up(config.root_at, config.keep_runs, config.older_than, config.dry_run, current_console())
    return Outcome(text, text)


def clean_up(root: Root, keep_runs: int, older_than: str, dry_run: bool, console: Console) -> str:
    """Do it, show the table on the console and in Prefect, and return one line. Raises ValueError for wrong words."""
    try:
        age = Duration.parse(older_than)
    except ValueError as error:
        raise ValueError(f"older_than: {error}") from error
    plan = plan_retention(root, keep_runs, int(age), labels_with_alias(root))
    deleted = None if dry_run else carry_out(root, plan)
    for line in listing(plan)[:MOST_LISTED] if dry_run else []:
        console.say(f"  would delete {line}")
    console.table(retention_table(plan, deleted))
    text = _said(plan, sum(item.bytes for item in deleted or []), dry_run)
    pages.table("retention", retention_rows(plan, deleted), text)
    pages.flush()
    return text


def _said(plan: Plan, freed: int, dry_run: bool) -> str:
    if dry_run:
        return f"dry run: {len(plan.doomed)} of {len(plan.items)} would be deleted, {size(plan.freed)}"
    return f"deleted {size(freed)} of {size(sum(item.bytes for item in plan.items))}"
