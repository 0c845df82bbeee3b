"""Evaluate one model in its own process, `python -m herd.llama3.evaluate.main JOB.json`: alone, under torchrun, or
forked by the agent of `herd.llama3.train.launch`.

    python -m torch.distributed.run --standalone --nproc-per-node 8 -m herd.llama3.evaluate.main JOB.json

The processes split the model as the job's layout says and share the work; rank 0 writes. A job that was killed
continues from the work that is finished. Exit status 2: a mistake of the user, described on the last line of stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from herd.llama3.parallel.layout import Backend, Layout
from herd.llama3.recipe.load import load_recipe
from herd.storage.filesystem import write_atomic

REFUSED = 2
MISTAKE = "evaluate: "
"""Prefix of the line on stderr that describes a mistake."""


class GateScores(BaseModel):
    """What the gates of a long-context stage measure: see `score_long_context`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    short: int | None = None
    needle: int | None = None


class EvaluateJob(BaseModel):
    """What to evaluate, as a file for the processes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    program: Literal["evaluate"] = "evaluate"
    """Tells the launch agent to run this module."""
    recipe: Path
    model: Path
    """A model folder, or a checkpoint of a stage in progress."""
    tokenizer: Path
    """The folder of the model's tokenizer."""
    documents: Path
    """The curated folder."""
    conversations: Path | None = None
    """File of held-out conversations."""
    gate: GateScores | None = None
    """Measure these scores instead of the recipe's suite."""
    work: Path
    """Folder of the job, which keeps finished work and, at the end, the tables in `result` and `facts.json`."""
    layout: Layout = Layout()
    """How the model is split over the processes: `tp` and `pp`; the rest of the processes are replicas."""
    threads: int = Field(default=1, ge=1)
    """Processor threads of each process; another number may round differently."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    backend: Backend = "auto"
    """Library of collectives; auto: NCCL on GPUs, gloo on processors."""
    timeout_s: int = Field(default=1800, ge=1)
    """How long a process waits for the others, which may have longer texts to read."""

    @property
    def result(self) -> Path:
        """The folder of the tables."""
        return self.work / "result"

    @property
    def facts(self) -> Path:
        """The file with what `evaluate` returns; it is written last."""
        return self.work / "facts.json"


def run_job(job: EvaluateJob) -> None:
    """Run `job` together with the other processes that the launcher started. Raises as `evaluate` does."""
    import torch  # which writing a job does not need

    from herd.llama3.evaluate.distributed import EvalRanks
    from herd.llama3.evaluate.evaluate import evaluate
    from herd.llama3.evaluate.long_context_gate import score_long_context
    from herd.llama3.model.linear import use_reproducible_matmul
    from herd.llama3.parallel.mesh import init_distributed

    torch.set_num_threads(job.threads)
    use_reproducible_matmul()
    with init_distributed(job.device, job.timeout_s, job.layout, backend=job.backend) as world:
        done = job.work / "done"
        done.mkdir(parents=True, exist_ok=True)
        ranks, device, recipe = EvalRanks(world, done), str(world.device), load_recipe(job.recipe)
        if job.gate is not None:
            facts = score_long_context(
                recipe, job.model, job.documents, job.result, **dict(job.gate), device=device, ranks=ranks
            )
        else:
            facts = evaluate(
                recipe,
                job.model,
                job.tokenizer,
                job.documents,
                job.result,
                conversations=job.conversations,
                threads=job.threads,
                device=device,
                ranks=ranks,
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
        sys.exit("usage: python -m herd.llama3.evaluate.main JOB.json")
    sys.exit(main(sys.argv[1:]))
