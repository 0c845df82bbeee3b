"""The flow `verify`: a scrub, which reads everything under a root and fails if a byte is not what was committed."""

from __future__ import annotations

from prefect import flow
from pydantic import Field

from flows.outcome import Outcome, told
from flows.parameters import RootParameters
from storage.manifest import DamagedArtifact
from tasks import pages
from tasks.console import current_console
from tasks.integrity import verify as read_all


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
    return told(lambda: _outcome(config))


def _outcome(config: VerifyParameters) -> Outcome:
    done = read_all(config.root_at, config.run, config.set_aside, current_console().say)
    if done.damaged:
        pages.table("damaged", [damage.model_dump() for damage in done.damaged], str(done))
        pages.flush()
        listed = "; ".join(str(damage) for damage in done.damaged[:5])
        more = f" and {len(done.damaged) - 5} more" if len(done.damaged) > 5 else ""
        raise DamagedArtifact(f"{done}: {listed}{more}")
    return Outcome(str(done), str(done))
