"""The trainer process: `python -m herd.llama3.train.main JOB.json`, alone or under torchrun.

Exit status 0: `result` is complete. 143: stopped by SIGTERM, a checkpoint is saved. 2: a mistake of the user, or the
recipe ends the run at a bad step. 1: a fault. After 1 and 2 the last line on stderr gives the reason. An invalid job is
refused before torch is imported.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

from herd.llama3.recipe.load import load_recipe
from herd.llama3.train.job import TERMINATED, TrainJob, host_name
from herd.storage.artifact import verify_folder
from herd.storage.lease import LeaseHeld, folder_lease

REFUSED = 2
"""Exit status of errors that another attempt would repeat."""


def train(job: TrainJob) -> bool:
    """Train the stage of `job`; return whether it is complete. Raises LeaseHeld, and what `Trainer` raises."""
    requests: list[int] = []  # filled on SIGTERM; the training loop reads it between steps
    signal.signal(signal.SIGTERM, lambda number, _: requests.append(number))
    recipe = load_recipe(job.recipe)
    is_rank0 = os.environ.get("RANK", "0") == "0"
    with folder_lease(job.work, f"stage {job.stage}") if is_rank0 else nullcontext():
        result = job.work / "result"
        if is_rank0 and result.is_dir() and not job.trained_under(recipe):  # the recipe has changed since
            shutil.rmtree(result)
        if result.is_dir() and job.trained_under(recipe):
            return True

        import torch

        from herd.llama3.model.linear import use_reproducible_matmul
        from herd.llama3.parallel.mesh import init_distributed
        from herd.llama3.train.health import measure_nodes
        from herd.llama3.train.profiler import dump_flight, prepare
        from herd.llama3.train.trainer import Trainer

        prepare(job.profile, job.work)
        for folder in (job.tokens, job.conversations, job.start):  # checkpoints are verified when loaded
            if folder is not None:
                verify_folder(folder)
        torch.set_num_threads(job.threads)
        use_reproducible_matmul()
        if job.deterministic:
            torch.use_deterministic_algorithms(True)  # imports torch's compiler, 0.7 s
        with init_distributed(job.device, job.timeout_s, job.layout, job.deterministic, job.backend) as world:
            if job.preflight and (bad := measure_nodes(world, job.work)):
                if why := bad.get(host_name()):
                    raise RuntimeError(f"hardware error: {why}")
                return False  # the attempt fails where the reason is
            try:
                return Trainer(job, recipe, world, lambda: bool(requests)).run()
            except Exception:
                dump_flight(job.profile, job.work, world.rank)
                raise


def main(arguments: list[str]) -> int:
    """Run the job file named in `arguments`; return the exit status."""
    try:
        job = TrainJob.model_validate_json(Path(arguments[0]).read_text())
        run: Callable[[TrainJob], bool | None] = train
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun reads there which process failed first and why
            from torch.distributed.elastic.multiprocessing.errors import record

            run = record(train)
        return 0 if run(job) else TERMINATED
    except (ValueError, LeaseHeld, FloatingPointError) as error:  # mistakes of the user and bad steps, not faults
        print(f"trainer: {error}", file=sys.stderr)
        return REFUSED
    except Exception as error:
        traceback.print_exc()
        print(f"trainer: {type(error).__name__}: {error}", file=sys.stderr)
    return 1


def exit_process(status: int) -> NoReturn:
    """End the process without shutting down the interpreter: everything is on the disk."""
    # torch's threads can abort during the shutdown ("terminate called without an active exception", about once in 20
    # runs of two gloo processes), and a finished stage would look failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m herd.llama3.train.main JOB.json")
    exit_process(main(sys.argv[1:]))
