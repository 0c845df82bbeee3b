"""Maintenance flows: retention, the reconciler, verification of all bytes, and reports written again."""

from __future__ import annotations

from contextlib import ExitStack

from prefect import flow, get_client, get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.settings import PREFECT_API_URL
from rich.markup import escape

from herd.flows.crash_recovery import thin_out
from herd.flows.local_server import is_temporary
from herd.flows.recipe_form import ReportParameters, RootParameters, field_at
from herd.flows.run_lifecycle import FlowResult, existing_run, find_run, flow_state
from herd.llama3.recipe.units import Duration
from herd.storage.artifact import DamagedArtifact
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import Console, current_console
from herd.tasks.format import format_bytes
from herd.tasks.operate.gc import GcPlan, delete_items, delete_rows, gc_lines, gc_rows, gc_table, plan_gc, plan_rows
from herd.tasks.operate.integrity import verify as read_all
from herd.tasks.operate.recovery import GRACE_S, Reconciled
from herd.tasks.operate.recovery import reconcile as reconcile_root
from herd.tasks.promotion.registry import labels_with_alias
from herd.tasks.report.run import write_report
from herd.tasks.tracking import prefect_artifacts

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
    dry_run: bool = field_at(2, "Dry run", True, "Only list what would be deleted.")
    databases: str = field_at(
        3,
        "Databases",
        "90 d",
        "In Prefect's and MLflow's databases only what ended before: 90 d; empty: delete nothing there.",
    )


@flow(name="gc", persist_result=False)
def gc(config: RetentionParameters = RetentionParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Delete artifacts that no kept run, alias or live process needs, and old rows of databases; return one line."""

    def delete() -> FlowResult:
        keep, age = config.keep_runs, config.older_than
        text = clean_up(config.root_at, keep, age, config.dry_run, current_console(), config.databases)
        return FlowResult(text, text)

    return flow_state(delete)


def clean_up(root: Root, keep_runs: int, older_than: str, dry_run: bool, console: Console, databases: str = "") -> str:
    """Delete (or list), show the table on the console and in Prefect, and return the result in one line.

    `databases` is the age from which on rows of Prefect's and MLflow's databases are deleted; empty: none are.
    """
    ages = {}
    for field, text in {"older_than": older_than, **({"databases": databases} if databases.strip() else {})}.items():
        try:
            ages[field] = int(Duration.parse(text))
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error
    aliases = labels_with_alias(root)
    plan = plan_gc(root, keep_runs, ages["older_than"], aliases)
    damaged = list[str]()
    deleted = None if dry_run else delete_items(root, plan, damaged.append)
    for line in damaged:
        console.log(f"  [yellow]{escape(line)}[/]")
    if "databases" in ages:
        with ExitStack() as stack:
            lasting = PREFECT_API_URL.value() and not is_temporary()
            client = stack.enter_context(get_client(sync_client=True)) if lasting else None
            rows = plan_rows(root, plan, keep_runs, ages["databases"], aliases, client)
            if deleted is not None:
                deleted += delete_rows(root, rows, ages["databases"], client)
        plan = GcPlan((*plan.items, *rows.items), plan.time)
    for line in gc_lines(plan)[:MOST_LISTED] if dry_run else []:
        console.log(f"  would delete {line}")
    console.table(gc_table(plan, deleted))
    if dry_run:
        text = f"dry run: {len(plan.doomed)} of {len(plan.items)} would be deleted, {format_bytes(plan.freed)}"
    else:
        freed = format_bytes(sum(item.bytes for item in deleted or []))
        text = "; ".join([f"deleted {len(deleted or [])} of {len(plan.items)}, {freed}", *damaged])
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
