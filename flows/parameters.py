"""Parameters of the flows: one model, so that Prefect draws one form and refuses what it can by schema."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from tasks.cluster import Cluster

DEFAULT_ROOT = "herd-data"


def default_root() -> str:
    """Return `HERD_ROOT`, or `herd-data` in the current folder."""
    return os.environ.get("HERD_ROOT", DEFAULT_ROOT)


class PipelineParameters(BaseModel):
    """What to run and where."""

    model_config = ConfigDict(extra="forbid")

    recipe: str = Field(
        default="recipes/quickstart.yaml",
        title="Recipe",
        description="A YAML recipe, relative to the checkout.",
        json_schema_extra={"position": 0},
    )
    overrides: list[str] = Field(
        default=[],
        title="Overrides",
        description="Recipe fields to change, such as stages.main.until=3M or curate.dedup.jaccard=0.7.",
        json_schema_extra={"position": 1},
    )
    rerun_of: str = Field(
        default="",
        title="Rerun of",
        description="Name of an earlier run (quickstart-7) whose recipe is taken instead of the file.",
        json_schema_extra={"position": 2},
    )
    from_step: str = Field(
        default="",
        title="Redo from",
        description="Step from which all is made anew: curate, tokenise, a stage's name, ...; the rest is reused.",
        json_schema_extra={"position": 3},
    )
    new: bool = Field(
        default=False,
        title="New run",
        description="Begin a new run even if the last run of this recipe did not finish.",
        json_schema_extra={"position": 4},
    )
    root: str = Field(
        default_factory=default_root,
        title="Root",
        description="Folder for artifacts, runs and the MLflow file.",
        json_schema_extra={"position": 5},
    )
    cluster: Cluster = Field(
        default_factory=Cluster,
        title="Cluster",
        description="Where it works; changes nothing about what is made.",
        json_schema_extra={"position": 6},
    )

    @property
    def root_path(self) -> Path:
        """The root as an absolute path. Raises ValueError for a remote one."""
        if "://" in self.root:
            raise ValueError(f"root: {self.root} is remote; artifacts are committed by a rename: give a local folder")
        return Path(self.root).expanduser().absolute()
