"""Forks processes from a server that has imported the large libraries once: importing them costs 7 CPU s each time.

`results = run(2, function, argument)` runs a function on several gloo processes. It must be importable (a module's,
not a test's own) and return plain values. `run_in_turn(function, argument)` runs it on a process that is kept for the
next such call. `Forked("herd.flows.cli.main", "status")` does what `python -P -m herd.flows.cli.main status` does.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import forkserver as server
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from herd.storage.processes import die_with_parent, free_port

PRELOADED = [
    "torch._dynamo",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "torch._subclasses.fake_tensor",
    "herd.llama3.parallel.parallelize",
    "herd.llama3.parallel.comm_trace",
    "herd.llama3.parallel.pipeline",
    "herd.llama3.train.main",
    "herd.llama3.train.trainer",
    "herd.llama3.train.checkpoint.dcp",
    "herd.storage.object_artifact",
    "herd.storage.s3",
    # not flows and tasks: some of their modules read or write the environment when they are imported
    "jinja2",
    "matplotlib.figure",
    "mlflow.store.tracking.sqlalchemy_store",
    "prefect.client.orchestration",
    "prefect.deployments.runner",
    "prefect.main",
    "regex",
    "resiliparse.extract.html2text",
    "rich.markdown",
    "typer",
    "tests.warm",
]
TIMEOUT_S = 240


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


def run_in_turn(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `function(*arguments)` returns on the one process that runs all such calls, one after the other."""
    return _kept_process().submit(function, *arguments).result(TIMEOUT_S)


@cache
def _kept_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, forkserver())


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
                failure, values[rank] = pipe.recv()  # type: ignore[union-attr, call-arg]
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


class Forked:
    """A process that does what `python -P -m module words...` does, with the methods of subprocess.Popen.

    Instead of a module there may be `-c` and code.
    """

    def __init__(self, *words: str, environment: dict[str, str], folder: Path = Path()) -> None:
        self.args = list(words)
        out, their_out = os.pipe()
        their_in, put = os.pipe()
        ready, tell = forkserver().Pipe(duplex=False)
        with Connection(their_out, readable=False) as printed, Connection(their_in, writable=False) as given, tell:
            # a daemon: the test process does not wait for it when it ends
            self.process = forkserver().Process(
                target=_command,
                args=(given, printed, tell, self.args, environment, str(folder.absolute())),
                daemon=True,
            )
            self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid
        self.stdin, self.stdout = os.fdopen(put, "wb"), os.fdopen(out)
        self._reader: threading.Thread | None = None
        self._read: list[str] = []
        with ready:
            ready.recv()  # from now on it leads a process group

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return what it prints to its end, standard error included."""
        if self._reader is None:
            self.stdin.close()
            self._reader = threading.Thread(target=lambda: self._read.append(self.stdout.read()), daemon=True)
            self._reader.start()
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(timeout)
        self.stdout.close()
        return self._read[0], None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _command(
    given: Connection,
    printed: Connection,
    ready: Connection,
    words: list[str],
    environment: dict[str, str],
    folder: str,
) -> None:
    """Make this process what a new interpreter would be, and do in it what `python -m` or `python -c` does."""
    os.setsid()
    die_with_parent(signal.SIGTERM)
    os.chdir(folder)
    for descriptor, end in enumerate((given, printed, printed)):
        os.dup2(end.fileno(), descriptor)
    given.close()
    printed.close()
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has made it the null device
    os.environ.clear()
    os.environ.update(environment)
    _forget_parent()
    ready.send(None)
    ready.close()
    _renew_prefect()
    sys.argv = words
    status = 0
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        status = 1
        if isinstance(error, KeyboardInterrupt):
            status = -signal.SIGINT
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _forget_parent() -> None:
    """Leave the test process's servers alone: they end with it, which this process must not prevent."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.close(server._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    server._forkserver = server.ForkServer()  # type: ignore[attr-defined]
    for name in ("ensure_running", "get_inherited_fds", "connect_to_new_process", "set_forkserver_preload"):
        setattr(server, name, getattr(server._forkserver, name))  # type: ignore[attr-defined]
    os.close(resource_tracker._resource_tracker._fd)  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]


def _renew_prefect() -> None:
    """Have Prefect read its settings from the environment of now, and again after herd has made it quiet there."""
    import prefect.context
    from prefect.logging.configuration import setup_logging

    import herd.flows.local_server

    quiet = herd.flows.local_server.quiet_prefect

    def renew() -> None:
        prefect.context.refresh_global_settings_context()
        setup_logging()

    def quiet_prefect() -> None:
        quiet()
        renew()

    renew()
    herd.flows.local_server.quiet_prefect = quiet_prefect


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
