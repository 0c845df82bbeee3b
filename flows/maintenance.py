"""Maintenance flows: retention, the reconciler, verification of all bytes, and reports written again."""

from __future__ import annotations

from prefect import flow, get_client, get_run_logger
from prefect.artifacts import create_table_artifact

from flows.crash_recovery import thin_out
from flows.recipe_form import ReportParameters, RootParameters, field_at
from flows.run_lifecycle import FlowResult, existing_run, find_run, flow_state
from llama3.recipe.units import Duration
from storage.artifact import DamagedArtifact
from storage.root import Root
from tasks.cluster import Cluster
from tasks.console import Console, current_console
from tasks.format import format_bytes
from tasks.report.run import write_report
from tasks.runs.gc import delete_items, gc_lines, gc_rows, gc_table, plan_gc
from tasks.runs.integrity import verify as read_all
from tasks.runs.recovery import GRACE_S, Reconciled
from tasks.runs.recovery import reconcile as reconcile_root
from tasks.tracking import prefect_artifacts
from tasks.tracking.registry import labels_with_alias

MOST_LISTED = 200


class RetentionParameters(RootParameters):
    """Which artifacts are kept."""

    keep_runs: int = field_at(
        0,
        "Runs to keep",
        5,
        "Newest runs of each recipe family to keep; unfinished runs and models with an alias are always kept.",
        ge=1,
    )
    older_than: str = field_at(
        1, "Older than", "7 d", "Only artifacts that are older than this are deleted: 12 h, 7 d."
    )
    dry_run: bool = field_at(2, "Dry run", True, "Only list the artifacts that would be deleted.")


@flow(name="gc", persist_result=False)
def gc(config: RetentionParameters = RetentionParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Delete artifacts that no kept run, alias or live process needs, and return the result in one line."""

    def delete() -> FlowResult:
        text = clean_up(config.root_at, config.keep_runs, config.older_than, config.dry_run, current_console())
        return FlowResult(text, text)

    return flow_state(delete)


def clean_up(root: Root, keep_runs: int, older_than: str, dry_run: bool, console: Console) -> str:
    """Delete (or list), show the table on the console and in Prefect, and return the result in one line."""
    try:
        age = Duration.parse(older_than)
    except ValueError as error:
        raise ValueError(f"older_than: {error}") from error
    plan = plan_gc(root, keep_runs, int(age), labels_with_alias(root))
    deleted = None if dry_run else delete_items(root, plan)
    for line in gc_lines(plan)[:MOST_LISTED] if dry_run else []:
        console.log(f"  would delete {line}")
    console.table(gc_table(plan, deleted))
    if dry_run:
        text = f"dry run: {len(plan.doomed)} of {len(plan.items)} would be deleted, {format_bytes(plan.freed)}"
    else:
        freed = sum(item.bytes for item in deleted or [])
        text = f"deleted {format_bytes(freed)} of {format_bytes(sum(item.bytes for item in plan.items))}"
    prefect_artifacts.table("gc", gc_rows(plan, deleted), text)
    prefect_artifacts.flush()
    return text


@flow(name="reconcile", persist_result=False)
def reconcile(
    config: RootParameters = RootParameters(),  # noqa: B008  (Prefect reads the default)
    full: bool = False,
    grace_s: float = GRACE_S,
) -> list[dict[str, str]]:
    """Mark runs whose process died as interrupted, restart crashed flow runs, and remove files of killed processes.

    Of each schedule's flow runs that wait for room all but the first are cancelled.

    Args:
        config: Where the runs are.
        full: Look at every run, not only at open ones.
        grace_s: A flow run that Prefect began less than this many seconds ago may still be on its way to its lease.
    """
    with get_client(sync_client=True) as client:
        changes = reconcile_root(config.root_at, client, full, grace_s)
        changes += [Reconciled(late.name, "Prefect", "Late", "Cancelled") for late in thin_out(client)]
    table = [change._asdict() for change in changes]
    for row in table:
        get_run_logger().info("%(run)s: %(where)s said %(before)s, now %(after)s", row)
    create_table_artifact(
        table or [{"run": "all", "where": "everywhere", "before": "true", "after": "true"}], key="reconcile"
    )
    return table


class VerifyParameters(RootParameters):
    """What is read."""

    run: str = field_at(0, "Run", "", "Read the artifacts of this run; empty: everything under the root.")
    set_aside: bool = field_at(
        1, "Set aside", True, "Move damaged artifacts away, so that the next run makes them again."
    )


@flow(name="verify", persist_result=False)
def verify(config: VerifyParameters = VerifyParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Read artifacts, checkpoints, records and promotion logs and compare them with the committed digests."""

    def read() -> FlowResult:
        result = read_all(config.root_at, config.run, config.set_aside, current_console().log)
        if result.damaged:
            prefect_artifacts.table("damaged", [damage.model_dump() for damage in result.damaged], str(result))
            prefect_artifacts.flush()
            first = "; ".join(str(damage) for damage in result.damaged[:5])
            more = f" and {len(result.damaged) - 5} more" if len(result.damaged) > 5 else ""
            raise DamagedArtifact(f"{result}: {first}{more}")
        return FlowResult(str(result), str(result))

    return flow_state(read)


@flow(name="report", persist_result=False)
def report(config: ReportParameters = ReportParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Write a run's report again from its tracked values, show it here and in MLflow, and return the run's name."""

    def write() -> FlowResult:
        name = find_run(config.root_at, config.run).name
        with existing_run(config.root_at, name, Cluster(), read_only=True) as context:
            page = write_report(context)
        return FlowResult(name, f"the report of {name} is {page}")

    return flow_state(write)
