"""An earlier run once more: from a step on, or with changes, or both.

It is a new run of the same family. What is upstream of the step or of the change is reused, because its artifacts have
the same keys; the log says for each step what is new about it.
"""

from __future__ import annotations

from prefect import flow

from flows.existing import find_run
from flows.hooks import HOOKS
from flows.outcome import Outcome, told
from flows.parameters import RerunParameters
from flows.pipeline import run_recipe


@flow(name="rerun", persist_result=False, **HOOKS)
def rerun(config: RerunParameters = RerunParameters()) -> str:  # noqa: B008  (Prefect reads the default)
    """Run an earlier run's recipe again and return the new run's name.

    Args:
        config: Which run, from where, and what to change.
    """
    return told(lambda: _rerun(config))


def _rerun(config: RerunParameters) -> Outcome:
    return run_recipe(config.settled(find_run(config.root_at, config.run).name))
