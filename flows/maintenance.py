"""Retention as a flow: lists, and on request deletes, what no run, alias or process needs any more."""

from __future__ import annotations

from prefect import flow, get_client, get_run_logger
from prefect.artifacts import create_table_artifact
from pydantic import Field

from flows.crash_recovery import resume_all, thin_out
from flows.recipe_form import ReportParameters, RootParameters
from flows.run_lifecycle import FlowResult, existing_run_or_beside, find_run, flow_state
from llama3.recipe.units import Duration
from storage.artifact import DamagedArtifact
from storage.root import Root
from tasks.cluster import Cluster
from tasks.console import Console, current_console
from tasks.format import format_bytes
from tasks.report.run import write_report
from tasks.runs.gc import GcPlan, carry_out, listing, plan_retention, retention_rows, retention_table
from tasks.runs.integrity import verify as read_all
from tasks.runs.recovery import GRACE_S, Settled
from tasks.runs.recovery import reconcile as settle_all
from tasks.tracking import prefect_artifacts
from tasks.tracking.registry import labels_with_alias

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
    return flow_state(lambda: _gc_outcome(config))


def _gc_outcome(config: RetentionParameters) -> FlowResult:
    text = clean_up(config.root_at, config.keep_runs, config.older_than, config.dry_run, current_console())
    return FlowResult(text, text)


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
    prefect_artifacts.table("retention", retention_rows(plan, deleted), text)
    prefect_artifacts.flush()
    return text


def _said(plan: GcPlan, freed: int, dry_run: bool) -> str:
    if dry_run:
        return f"dry run: {len(plan.doomed)} of {len(plan.items)} would be deleted, {format_bytes(plan.freed)}"
    return f"deleted {format_bytes(freed)} of {format_bytes(sum(item.bytes for item in plan.items))}"


# The flow `reconcile`: makes what is shown true, by the hour or whenever somebody doubts it.


@flow(name="reconcile", persist_result=False)
def reconcile(
    config: RootParameters = RootParameters(),  # noqa: B008  (Prefect reads the default)
    full: bool = False,
    grace_s: float = GRACE_S,
) -> list[dict[str, str]]:
    """Settle the runs that say running though nobody works on them, and clear what killed processes left.

    Crashed training runs that the automation has overlooked are started again, and of each schedule's runs that wait
    for room one is left.

    Args:
        config: Where the runs are.
        full: Look at every run, not only at those that are marked open.
        grace_s: A flow run that Prefect began less than so many seconds ago is left alone.
    """
    with get_client(sync_client=True) as client:
        found = [line._asdict() for line in settle_all(config.root_at, client, full, grace_s)]
        for again in resume_all(client, grace_s):
            found.append(Settled(again.name, "Prefect", "Crashed", "AwaitingRetry")._asdict())
        for late in thin_out(client):
            found.append(Settled(late.name, "Prefect", "Late", "Cancelled")._asdict())
    for line in found:
        get_run_logger().info("%(run)s: %(where)s said %(before)s, now %(after)s", line)
    create_table_artifact(
        found or [{"run": "all", "where": "everywhere", "before": "true", "after": "true"}], key="reconcile"
    )
    return found


# The flow `verify`: a scrub, which reads everything under a root and fails if a byte is not what was committed.


class VerifyParameters(RootParameters):
    """What is read."""

    run: str = Field(
        default="",
        title="Run",
        description="Read what this run stands on; empty: everything under the root.",
        json_schema_extra={"position": 0},
    )
    set_aside: bool = Field(
        default=True,
        title="Set aside",
        description="Move damaged artifacts out of sight, so that the next run makes them again.",
        json_schema_extra={"position": 1},
    )


@flow(name="verify", persist_result=False)
def verify(config: VerifyParameters = VerifyParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Read artifacts, checkpoints, records and promotion logs and compare them with what was committed.

    Args:
        config: What is read.
    """
    return flow_state(lambda: _verify_outcome(config))


def _verify_outcome(config: VerifyParameters) -> FlowResult:
    done = read_all(config.root_at, config.run, config.set_aside, current_console().say)
    if done.damaged:
        prefect_artifacts.table("damaged", [damage.model_dump() for damage in done.damaged], str(done))
        prefect_artifacts.flush()
        listed = "; ".join(str(damage) for damage in done.damaged[:5])
        more = f" and {len(done.damaged) - 5} more" if len(done.damaged) > 5 else ""
        raise DamagedArtifact(f"{done}: {listed}{more}")
    return FlowResult(str(done), str(done))


# Write the report of a run again, from what was tracked: after an upgrade, or when MLflow was away.


@flow(name="report", persist_result=False)
def report(config: ReportParameters = ReportParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Write a run's report again, show it here and in MLflow, and return the run's name.

    Args:
        config: Which run.
    """
    return flow_state(lambda: _report(config))


def _report(config: ReportParameters) -> FlowResult:
    name = find_run(config.root_at, config.run).name
    with existing_run_or_beside(config.root_at, name, Cluster()) as (context, _):
        page = write_report(context)
    return FlowResult(name, f"the report of {name} is {page}")
