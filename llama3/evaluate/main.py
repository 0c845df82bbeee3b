"""Evaluate one model in its own process: `python -m llama3.evaluate.main JOB.json`, alone, under torchrun, or forked by
the agent of `llama3.train.launch`.

    python -m torch.distributed.run --standalone --nproc-per-node 8 -m llama3.evaluate.main JOB.json

Each process reads the whole model on its own device; rank 0 writes. Exit status 2: a mistake of the user, described on
the last line of stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from llama3.recipe.load import load_recipe
from storage.filesystem import write_atomic

REFUSED = 2
MISTAKE = "evaluate: "
"""Prefix of the line on stderr that describes a mistake."""


class EvaluateJob(BaseModel):
    """Arguments of `evaluate`, as a file for the processes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    recipe: Path
    model: Path
    tokenizer: Path
    documents: Path
    folder: Path
    """Where the tables are written."""
    facts: Path
    """File for what `evaluate` returns."""
    threads: int = Field(default=1, ge=1)
    """Processor threads of each process; another number may round differently."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    timeout_s: int = Field(default=1800, ge=1)
    """How long a process waits for the others, which may have longer texts to read."""


def run_job(job: EvaluateJob) -> None:
    """Run `job` together with the other processes that the launcher started. Raises as `evaluate` does."""
    from llama3.evaluate.distributed import EvalGroup, SingleProcess  # imports torch, which writing a job does not need
    from llama3.evaluate.evaluate import evaluate
    from llama3.parallel.mesh import init_distributed

    with init_distributed(job.device, job.timeout_s) as world:
        facts = evaluate(
            load_recipe(job.recipe),
            job.model,
            job.tokenizer,
            job.documents,
            job.folder,
            threads=job.threads,
            device=str(world.device),
            ranks=EvalGroup() if world.size > 1 else SingleProcess(),
        )
        if world.is_rank0:
            write_atomic(job.facts, json.dumps(facts))


def main(arguments: list[str]) -> int:
    """Run the job file named in `arguments`; return the exit status."""
    try:
        run_job(EvaluateJob.model_validate_json(Path(arguments[0]).read_text()))
    except ValueError as error:
        print(f"{MISTAKE}{error}", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m llama3.evaluate.main JOB.json")
    sys.exit(main(sys.argv[1:]))
