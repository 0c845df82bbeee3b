"""The launch agent of a node: imports torch once, forks the ranks of the node, watches them, reports how they end.

    python -m herd.llama3.train.launch JOB.json --processes 16 --per-node 8 --node 1 --address HOST --port N --logs DIR
    python -m herd.llama3.train.launch --serve        # one attempt for each JSON line on stdin

It replaces torchrun, with the same environment variables for the ranks.
"""

# Why not torchrun: every rank imports torch for itself (kill to next step with 4 ranks on 2 busy cores: 29 s, here 2 to
# 4 s), it names the first rank that complained instead of the one that was killed, and stale addresses break its
# restarts with gloo. An agent that serves keeps only imported modules between attempts: ranks, port and store are new.
# No rendezvous is needed: the scheduler gives the node list.

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from herd.llama3.train import health
from herd.llama3.train.job import (
    OUT_OF_MEMORY,
    SETTLE_S,
    TERMINATED,
    Attempt,
    AttemptResult,
    TrainJob,
    ending,
    health_interval,
    host_name,
    last_lines,
    program_of,
)
from herd.llama3.train.journal import end_attempt
from herd.llama3.train.main import exit_process
from herd.storage.filesystem import write_atomic
from herd.storage.processes import die_with_parent, free_port, memory_kills

PRELOADED = (
    "herd.llama3.train.main",
    "herd.llama3.train.trainer",
    "torch._dynamo",  # the first optimizer step imports it, 1 s
    "torch.fx.experimental.symbolic_shapes",  # and the first weights this, 0.5 s
    "torch.distributed.checkpoint.hf_storage",
    "pyarrow.parquet",
    "herd.llama3.evaluate.evaluate",  # 0.3 s
    "pandas",  # pyarrow imports it with the first list or array that it converts, 0.3 to 0.8 s
)
WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
PR_SET_NAME = 15
REAPS, REAP_EVERY_S = 100, 0.01
"""How often and when the end of a killed sampler is looked for."""


def run_attempt(attempt: Attempt) -> AttemptResult:
    """Fork the ranks of `attempt`, watch them until they end, and write the result beside their logs."""
    attempt.logs.mkdir(parents=True, exist_ok=True)
    attempt.outcome.unlink(missing_ok=True)
    # Signals are blocked, so that they are waited for and never interrupt.
    mask = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)}
    kills_before = memory_kills()
    try:
        port = attempt.port or free_port()
        sys.stdout.flush()
        sys.stderr.flush()
        pids = {_fork(attempt, rank, port, mask): rank for rank in attempt.ranks}
        first = min(pids, key=pids.__getitem__, default=0)
        with _sampler(attempt, mask):
            result = _watch(attempt, pids)
        if attempt.node == 0:  # before the outcome, on which the supervisor acts
            with suppress(OSError, ValueError):  # no job of the trainer, or a full disk
                work = TrainJob.model_validate_json(attempt.job.read_text()).work
                end_attempt(work, first)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if result.status not in (0, TERMINATED):
        causes = [f"hardware error: {fault}" for fault in health.new_faults(attempt.health)]
        if memory_kills() > kills_before:
            causes = [OUT_OF_MEMORY]
        result = result.model_copy(update={"host": host_name(), "message": "; ".join([*causes, result.message])})
    write_atomic(attempt.outcome, result.model_dump_json())
    return result


def _watch(attempt: Attempt, pids: dict[int, int]) -> AttemptResult:
    """Wait until no rank is left; `pids` has the rank of each process id. Passes on a request to stop."""
    failed: list[tuple[int, int, float]] = []  # (rank, exit status, time) of ranks that failed by themselves
    killed: list[int] = []
    stopped = 0.0  # when a stop was requested, or a rank ended by request, in seconds since 1970; 0: not yet
    deadline = float("inf")
    while pids:
        timeout = min(deadline - time.monotonic(), 3600.0)
        received = signal.sigtimedwait(WATCHED, max(timeout, 0.0))
        if received is not None and received.si_signo != signal.SIGCHLD:
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            stopped = stopped or time.time()
        while pids:  # one SIGCHLD may be for several ranks
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid not in pids:  # the sampler of this attempt or of an earlier one
                continue
            rank, status = pids.pop(pid), os.waitstatus_to_exitcode(wait_status)
            if status == TERMINATED:
                stopped = stopped or time.time()  # all ranks agree to stop, so the others are about to
            elif status and rank not in killed and not (stopped and status == -signal.SIGTERM):
                failed.append((rank, status, time.time()))
                deadline = min(deadline, time.monotonic() + SETTLE_S)
        if stopped and not failed:
            deadline = time.monotonic() + attempt.leave_by(stopped) - time.time()
        if pids and time.monotonic() >= deadline:
            killed = sorted(pids.values())
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")

    lines = [f"ranks {killed} did not end by themselves and were killed"] if killed else []
    if not failed:
        return AttemptResult(status=TERMINATED if stopped else 0, message="".join(lines))
    # A killed rank (negative status) is the cause, also if a peer complained earlier.
    rank, status, when = min(failed, key=lambda failure: (failure[1] > 0, failure[2]))
    lines += [f"rank {rank} {ending(status)}; see {attempt.log(rank)}:", last_lines(attempt.log(rank))]
    return AttemptResult(status=status, time=when, message="\n".join(lines))


@contextmanager
def _sampler(attempt: Attempt, mask: set[int]) -> Iterator[None]:
    """If the job has `health_s`, sample this node's health in a child process while the block runs."""
    every_s = health_interval(attempt.job)
    if not every_s:
        yield
        return
    agent = os.getpid()
    if not (pid := os.fork()):
        try:
            _begin_child(agent, "herd-health", mask)
            health.watch(attempt, every_s)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    try:
        yield
    finally:
        with suppress(ChildProcessError):  # it ended before, and `_watch` reaped it
            if not os.waitpid(pid, os.WNOHANG)[0]:
                os.kill(pid, signal.SIGKILL)
            for _ in range(REAPS):  # a driver that hangs keeps it; then `_watch` reaps it during a later attempt
                if os.waitpid(pid, os.WNOHANG)[0]:
                    break
                time.sleep(REAP_EVERY_S)


def preload() -> None:
    """Import the modules of every rank. Do not start a thread or touch CUDA here: the process will fork."""
    for name in PRELOADED:
        importlib.import_module(name)
    from herd.llama3.tokens.interleave import interleave_evenly

    interleave_evenly((1, 1))  # the first call of any numba kernel imports numba's typing rules, 1 to 3 s
    gc.freeze()  # otherwise garbage collection copies every shared page in every rank


def _fork(attempt: Attempt, rank: int, port: int, mask: set[int]) -> int:
    """Fork `rank` and return its pid. The child runs the program with its log and the environment of torchrun."""
    agent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        _begin_child(agent, f"herd-rank-{rank}", mask)
        log = os.open(attempt.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for text in (sys.stdout, sys.stderr):
            text.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": attempt.processes,
            "LOCAL_RANK": rank - attempt.ranks.start,
            "LOCAL_WORLD_SIZE": len(attempt.ranks),
            "GROUP_RANK": attempt.node,
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR=attempt.address)
        os.environ[health.LOGS] = str(attempt.logs)
        program = importlib.import_module(f"herd.llama3.{program_of(attempt.job)}.main")
        exit_process(program.main([str(attempt.job)]))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # whatever happens, this process must not continue as a second agent


def _begin_child(agent: int, name: str, mask: set[int]) -> None:
    """Let this fork of the process `agent` end with it, and take signals again."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != agent:  # the agent died before die_with_parent
        os._exit(1)
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def agent(arguments: list[str]) -> int:
    """Run the attempt given by `arguments`, or all attempts from stdin; return the exit status."""
    parser = argparse.ArgumentParser("python -m herd.llama3.train.launch", description="Start the ranks of one node.")
    parser.add_argument("job", nargs="?", type=Path)
    parser.add_argument("--serve", action="store_true", help="take attempts as JSON lines from stdin instead")
    for name, kind in (("processes", int), ("per-node", int), ("node", int), ("address", str), ("port", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    values = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    attempt = None if values.pop("serve") else Attempt(**values)
    preload()
    if attempt is not None:
        result = run_attempt(attempt)
        print(result.message, file=sys.stderr)
        return result.status if result.status in (0, TERMINATED) else 1
    for line in sys.stdin:
        run_attempt(Attempt.model_validate_json(line))
    return 0


if __name__ == "__main__":
    # Python 3.12 warns of any thread at a fork; the only one belongs to pyarrow's jemalloc, which handles forks
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    exit_process(agent(sys.argv[1:]))
