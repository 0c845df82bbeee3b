"""The trainer process: `python -m llama3.train.main JOB.json`, alone or under torchrun.

Exit status 0: `result` is complete. 143: told to stop (SIGTERM), a checkpoint is saved. 2: a mistake, or a step at
which the recipe ends the run; 1: a fault; in both cases the last line on stderr says why. A wrong job is refused before
torch is imported.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import NoReturn

from llama3.recipe.load import load_recipe
from llama3.recipe.schema import Recipe
from llama3.train.job import TERMINATED, TrainJob
from storage.artifact import verify_folder
from storage.lease import LeaseHeld, folder_lease

REFUSED = 2
"""Another attempt would end in the same way."""


class Stop:
    """Becomes true on SIGTERM; the loop looks at it between steps."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def __call__(self) -> bool:
        return self.asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def train(job: TrainJob) -> bool:
    """Train the stage of `job` in this process; return whether it is complete.

    Raises LeaseHeld if another trainer works in the same folder, and what `Trainer` raises.
    """
    stop = Stop()
    recipe = load_recipe(job.recipe)
    leads = os.environ.get("RANK", "0") == "0"
    with folder_lease(job.work, f"stage {job.stage}") if leads else nullcontext():
        return True if _complete(job, recipe) else _train(job, recipe, stop)


def _complete(job: TrainJob, recipe: Recipe) -> bool:
    """Return whether the stage's result is there; one of a recipe that has changed since is given up."""
    result = job.work / "result"
    if result.is_dir() and not job.trained_under(recipe) and os.environ.get("RANK", "0") == "0":
        shutil.rmtree(result)
    return result.is_dir() and job.trained_under(recipe)


def _train(job: TrainJob, recipe: Recipe, stop: Stop) -> bool:
    import torch

    from llama3.model.rounding import keep_rounding
    from llama3.parallel.mesh import init_distributed
    from llama3.train.profiler import dump_flight, prepare
    from llama3.train.trainer import Trainer

    prepare(job.profile, job.work)
    for folder in (job.tokens, *([job.start] if job.start else [])):  # checkpoints are verified while they are loaded
        verify_folder(folder)
    torch.set_num_threads(job.threads)
    keep_rounding()
    if job.deterministic:
        torch.use_deterministic_algorithms(True)  # imports torch's compiler, 0.7 s
    with init_distributed(job.device, job.timeout_s, job.layout, meshed=job.deterministic) as world:
        try:
            return Trainer(job, recipe, world, stop).run()
        except Exception:
            dump_flight(job.profile, job.work, world.rank)
            raise


def main(arguments: list[str]) -> int:
    """Run the job file named in `arguments`; return the exit status."""
    try:
        job = TrainJob.model_validate_json(Path(arguments[0]).read_text())
        return 0 if _recorded(job) else TERMINATED
    except (ValueError, LeaseHeld, FloatingPointError) as error:  # mistakes and bad numbers, not faults of ours
        print(f"trainer: {error}", file=sys.stderr)
        return REFUSED
    except Exception as error:
        traceback.print_exc()
        print(f"trainer: {type(error).__name__}: {error}", file=sys.stderr)
    return 1


def leave(status: int) -> NoReturn:
    """End the process without taking the interpreter apart.

    Everything is on the disk by now, but torch's threads can abort in the interpreter's last moments ("terminate called
    without an active exception", about once in 20 runs of two gloo processes), and a finished stage would look failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _recorded(job: TrainJob) -> bool:
    """Train so that torchrun, if it started us, learns which process failed first and why."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return train(job)
    from torch.distributed.elastic.multiprocessing.errors import record

    return bool(record(train)(job))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m llama3.train.main JOB.json")
    leave(main(sys.argv[1:]))
