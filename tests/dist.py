"""Runs a function on several gloo processes: `results = run(2, function, argument)`.

Processes are forked from a server that has imported torch once, so a pair costs a fraction of a second; starting
each anew takes 15 s. The function must be importable (a module's, not a test's own) and return plain values.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

from storage.processes import free_port

PRELOADED = [
    "torch._dynamo",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "torch._subclasses.fake_tensor",
    "llama3.parallel.fsdp",
    "llama3.parallel.trace",
    "llama3.train.loading",
    "llama3.train.main",
    "llama3.train.trainer",
    "llama3.train.writer",
    "storage.remote_store",
    "storage.s3",
]
TIMEOUT_S = 60


def run(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `function(*arguments)` returns on each of `world` ranks; raise RuntimeError if one fails or hangs."""
    port = free_port()
    pipes, processes = [], []
    for rank in range(world):
        mine, theirs = forkserver().Pipe(duplex=False)
        process = forkserver().Process(target=_rank, args=(theirs, rank, world, port, function, arguments))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        return _collect(pipes)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join()


def _collect(pipes: list[Connection]) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(pipes):
        left = [pipe for rank, pipe in enumerate(pipes) if rank not in values]
        ready = wait(left, TIMEOUT_S)
        if not ready:
            raise RuntimeError(f"ranks {sorted(set(range(len(pipes))) - values.keys())} gave no result")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                failure, values[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                failure = "died"
            if failure:
                raise RuntimeError(f"rank {rank}: {failure}")
    return [values[rank] for rank in range(len(pipes))]


@cache
def forkserver() -> ForkServerContext:
    """Return what forks from the one server that Python has: whoever asks first decides what it has imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _rank(
    pipe: Connection, rank: int, world: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({**address, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    try:
        pipe.send((None, function(*arguments)))
    except BaseException:  # CheckpointException is one
        pipe.send((traceback.format_exc(), None))
