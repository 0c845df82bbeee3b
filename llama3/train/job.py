"""What a trainer process is told: one stage of one recipe, and where it works."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TrainJob(BaseModel):
    """The job file of `python -m llama3.train.main JOB.json`.

    `recipe`, `stage`, `tokens` and `parent` decide what is made; the rest only where and how fast.
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
    work: Path
    """Folder of this stage: journal, checkpoints and, at the end, `result`."""
    micro_batch: int = Field(default=8, ge=1)
    """Sequences per forward pass and process."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    threads: int = Field(default=1, ge=1)
    """Processor threads of each process."""
    deterministic: bool = False
    """Refuse operations that may differ from run to run (matters on GPUs; on CPU there are none)."""
    timeout_s: int = Field(default=600, ge=1)
    """How long a process waits for the others before it gives up."""
