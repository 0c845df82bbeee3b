"""The flow `reconcile`: makes what is shown true, by the hour or whenever somebody doubts it."""

from __future__ import annotations

from prefect import flow, get_client, get_run_logger
from prefect.artifacts import create_table_artifact

from flows.parameters import RootParameters
from flows.resume import resume_all
from flows.waiting import thin_out
from tasks.reconcile import reconcile as settle_all
from tasks.settler import GRACE_S, Settled


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
