"""Write the report of a run again, from what was tracked: after an upgrade, or when MLflow was away."""

from __future__ import annotations

from prefect import flow

from flows.existing import existing_run_or_beside, find_run
from flows.outcome import Outcome, told
from flows.parameters import ReportParameters
from tasks.cluster import Cluster
from tasks.report import write_report


@flow(name="report", persist_result=False)
def report(config: ReportParameters = ReportParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Write a run's report again, show it here and in MLflow, and return the run's name.

    Args:
        config: Which run.
    """
    return told(lambda: _report(config))


def _report(config: ReportParameters) -> Outcome:
    name = find_run(config.root_at, config.run).name
    with existing_run_or_beside(config.root_at, name, Cluster()) as (context, _):
        page = write_report(context)
    return Outcome(name, f"the report of {name} is {page}")
