"""What a trainer process is told: one stage of one recipe, and where it works."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from llama3.parallel.layout import Layout
from llama3.recipe.load import to_yaml
from llama3.recipe.schema import Recipe
from llama3.train.profile import Profile


class Predicted(BaseModel):
    """What the planner says of a stage, to be written beside what is measured (`plan/*` metrics)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    processes: int
    """For which it holds; an attempt on fewer has none."""
    by_seq: dict[int, dict[str, float]] = {}
    """Sequence length -> metric -> value."""


class TrainJob(BaseModel):
    """The job file of `python -m llama3.train.main JOB.json`.

    `recipe`, `stage`, `tokens`, `parent` and `start` decide what is made; the rest only where and how fast.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    recipe: Path
    """The resolved recipe, YAML."""
    stage: str
    """Name of the stage to train."""
    tokens: Path
    """Folder of the token shards."""
    parent: Path | None = None
    """Training state (`result/state`) of the stage before; None for the first stage."""
    start: Path | None = None
    """Model folder whose weights the first stage goes on from; None: initial weights."""
    work: Path
    """Folder of this stage: journal, checkpoints and, at the end, `result`."""
    checkpoints: str | None = None
    """URI under which checkpoints are kept instead of in `work` (s3://...)."""
    layout: Layout = Layout()
    """How the model is cut over the processes."""
    micro_batch: int = Field(default=8, ge=1)
    """Sequences per forward pass and process."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    threads: int = Field(default=1, ge=1)
    """Processor threads of each process."""
    deterministic: bool = False
    """Same bits on any number of data-parallel processes: one sequence at a time, gradients summed in fp64, and no
    operation that may differ from run to run. Costs speed; tensor and context parallelism still regroup sums."""
    profile: Profile | None = None
    """What to look into while it trains: a trace of chosen steps, device memory, the last collectives."""
    timeout_s: int = Field(default=600, ge=1)
    """How long a process waits for the others before it gives up."""
    predicted: Predicted | None = None
    """What the planner says of this stage; None: nothing is known."""
    restart_damaged: bool = False
    """Train the stage again from its start if it has checkpoints and all are damaged; else that ends the trainer."""

    @property
    def trained_recipe(self) -> Path:
        """The recipe under which the stage's folder was last worked in."""
        return self.work / "recipe.yaml"

    def trained_under(self, recipe: Recipe) -> bool:
        """Return whether that is `recipe`."""
        return self.trained_recipe.exists() and self.trained_recipe.read_text() == to_yaml(recipe)
