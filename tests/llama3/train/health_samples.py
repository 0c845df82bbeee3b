"""GPUs of a stand-in NVML library (nvml.c), for a test's own process: a library that is loaded stays."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from pathlib import Path

from herd.llama3.parallel.mesh import init_distributed
from herd.llama3.train import health, launch, main
from herd.llama3.train.health import Gpus
from herd.llama3.train.job import Attempt, AttemptResult

SOURCE = Path(__file__).with_name("nvml.c")
SOUND = {
    "temperature": 61, "power": 412_000, "sm_clock": 1755, "utilization": 97, "reasons": 0, "ecc_volatile": 0,
    "ecc_lifetime": 2, "remapped": 1, "lanes": 16, "most_lanes": 16, "generation": 5,
}  # fmt: skip


def library(folder: Path) -> Path:
    """Compile the stand-in as `folder`/libnvidia-ml.so.1, where the dynamic linker finds it by LD_LIBRARY_PATH."""
    path = folder / "libnvidia-ml.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(path), str(SOURCE)]
    subprocess.run(command, check=True)
    return path


def write_state(path: Path, **values: int) -> None:
    """Write what the GPUs report; `gpu1_lanes` is for GPU 1 alone."""
    lines = [f"{name.replace('gpu1_', '1:')} {value}\n" for name, value in (SOUND | values).items()]
    path.write_text("".join(lines))


def use(library: Path, state: Path) -> None:
    os.environ["NVML_STATE"] = str(state)
    ctypes.CDLL(str(library))  # from now on it is what this process finds under its soname


def sample_each(library: Path, state: Path, texts: list[str], judge_lanes: bool) -> list[tuple[dict, list[str]]]:
    """Return what is sampled in each of the states `texts`, one after the other."""
    use(library, state)
    state.write_text(texts[0])
    gpus, samples = Gpus(judge_lanes), []
    for text in texts:
        state.write_text(text)
        gpus.wait(0.001)
        values, faults = gpus.sample()
        samples.append((dict(values), faults))
    return samples


def attempt_that_dies(library: Path, state: Path, attempt: Attempt) -> AttemptResult:
    """Run an attempt on these GPUs, of node n7, whose program fails after a second."""
    use(library, state)
    os.environ["SLURMD_NODENAME"] = "n7"

    def program(arguments: list[str]) -> int:
        time.sleep(1.0)
        return 1

    main.main = program
    return launch.run_attempt(attempt)


def measured_on_two_nodes(work: Path, logs: Path, slow_rank: int, broken_rank: int) -> dict[str, str]:
    """Measure this process's node, n0 or n1; products of `slow_rank` take longer, those of `broken_rank` fail."""
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    os.environ["HERD_HOST"], os.environ[health.LOGS] = f"n{rank}", str(logs)
    product = torch.mm

    def worse(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if rank == broken_rank:
            return out.fill_(0)
        for _ in range(11):
            product(left, right, out=out)
        return out

    if rank in (slow_rank, broken_rank):
        torch.mm = worse
    state = torch.get_rng_state().clone()
    with init_distributed("cpu", 60) as world:
        bad = health.measure_nodes(world, work)
        assert torch.equal(state, torch.get_rng_state()), "the model's random numbers begin elsewhere"
        return bad
