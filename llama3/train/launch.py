"""The agent of a node: imports torch once, forks the node's ranks from itself, watches them, says how they ended.

    python -m llama3.train.launch JOB.json --processes 16 --per-node 8 --node 1 --address HOST --port PORT --logs FOLDER
    python -m llama3.train.launch --serve        # one attempt for each JSON line on stdin

It stands where torchrun would, with the same environment variables for the ranks. Reasons: torchrun has every rank
import torch for itself (kill to next step, 4 ranks on 2 busy cores: 29 s, here 2 to 4 s), and without restarts it names
the first rank that complained instead of the one that was killed. An agent that serves lives through all attempts on
its node, but holds nothing except imported modules: ranks, port and store of an attempt are new, since stale addresses
are what breaks torchrun's restarts with gloo. What this gives up: no rendezvous, so the node list is the scheduler's
business; and nothing may touch CUDA or start threads of Python before the fork.
"""

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
from typing import NoReturn

from llama3.train.job import TERMINATED, Attempt, AttemptResult, last_lines
from llama3.train.main import leave
from storage.filesystem import write_atomic
from storage.processes import die_with_parent, free_port

SETTLE_S = 1.0
"""From the first failure to SIGKILL: so long the others may print what they saw. A stopped one never would."""
PRELOADED = (
    "llama3.train.main",
    "llama3.train.trainer",
    "torch._dynamo",  # the first optimizer step imports it, 1 s
    "torch.fx.experimental.symbolic_shapes",  # and the first weights this, 0.5 s
    "torch.distributed.checkpoint.hf_storage",
    "pyarrow.parquet",
    "pandas",  # pyarrow imports it with the first list or array that it converts, 0.3 to 0.8 s
)
WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
PR_SET_NAME = 15


def run_attempt(attempt: Attempt) -> AttemptResult:
    """Fork the ranks of `attempt`, watch them to the end, and write the outcome beside their logs."""
    attempt.logs.mkdir(parents=True, exist_ok=True)
    attempt.outcome.unlink(missing_ok=True)
    with _held_back(WATCHED) as mask:
        port = attempt.port or free_port()
        sys.stdout.flush()
        sys.stderr.flush()
        pids = {_fork(attempt, rank, port, mask): rank for rank in attempt.ranks}
        outcome = RunningRanks(attempt, pids).to_the_end()
    write_atomic(attempt.outcome, outcome.model_dump_json())
    return outcome


class RunningRanks:
    """The running ranks of one attempt, by process id."""

    def __init__(self, attempt: Attempt, pids: dict[int, int]) -> None:
        self.attempt, self.pids = attempt, pids
        self.failed: list[tuple[int, int, float]] = []
        """(rank, exit status, time) of those that failed by themselves."""
        self.killed: list[int] = []
        self.stopped = 0.0
        """When they were told to stop, or one of them said so, in seconds since 1970; 0: not."""
        self.deadline = float("inf")

    def to_the_end(self) -> AttemptResult:
        """Return when no rank is left."""
        while self.pids:
            left = min(self.deadline - time.monotonic(), 3600.0)
            told = signal.sigtimedwait(WATCHED, max(left, 0.0))
            if told is not None and told.si_signo != signal.SIGCHLD:
                self._stop()
            self._reap()
            if self.stopped and not self.failed:
                self.deadline = time.monotonic() + self.attempt.leave_by(self.stopped) - time.time()
            if self.pids and time.monotonic() >= self.deadline:
                self.killed = sorted(self.pids.values())
                self._send(signal.SIGKILL)
                self.deadline = float("inf")
        return self._outcome()

    def _stop(self) -> None:
        self._send(signal.SIGTERM)
        self.stopped = self.stopped or time.time()

    def _send(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def _end_within(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def _reap(self) -> None:
        while self.pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._ended(self.pids.pop(pid), os.waitstatus_to_exitcode(status))

    def _ended(self, rank: int, status: int) -> None:
        if status == TERMINATED:
            self.stopped = self.stopped or time.time()  # all ranks agree to stop, so the others are about to
        elif status and rank not in self.killed and not (self.stopped and status == -signal.SIGTERM):
            self.failed.append((rank, status, time.time()))
            self._end_within(SETTLE_S)

    def _outcome(self) -> AttemptResult:
        killed = [f"ranks {self.killed} did not end by themselves and were killed"] if self.killed else []
        if not self.failed:
            return AttemptResult(status=TERMINATED if self.stopped else 0, words="".join(killed))
        rank, status, when = min(self.failed, key=lambda failure: (failure[1] > 0, failure[2]))
        words = [*killed, f"rank {rank} {_ending(status)}; the end of {self.attempt.log(rank)}:"]
        return AttemptResult(status=status, time=when, words="\n".join([*words, last_lines(self.attempt.log(rank))]))


def preload() -> None:
    """Import what every rank needs. Nothing here may start a thread that computes, or touch CUDA."""
    for name in PRELOADED:
        importlib.import_module(name)
    from llama3.tokens.interleave import even_order

    even_order((1, 1))  # the first call of any numba kernel imports numba's typing rules, 1 to 3 s
    gc.freeze()  # the collector would copy every shared page in every rank


def _fork(attempt: Attempt, rank: int, port: int, mask: set[int]) -> int:
    agent = os.getpid()
    pid = os.fork()
    if not pid:
        try:
            _be_rank(attempt, rank, port, mask, agent)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # whatever happens, this process must not go on as a second agent
    return pid


def _be_rank(attempt: Attempt, rank: int, port: int, mask: set[int], agent: int) -> NoReturn:
    """Take the log for output, the environment that torchrun would give, and do what is asked."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != agent:  # it died before it could be waited for
        os._exit(1)
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"herd-rank-{rank}".encode())
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    log = os.open(attempt.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for text in (sys.stdout, sys.stderr):
        text.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    local = attempt.ranks
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": attempt.processes,
        "LOCAL_RANK": rank - local.start,
        "LOCAL_WORLD_SIZE": len(local),
        "GROUP_RANK": attempt.node,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR=attempt.address)
    program = importlib.import_module(f"llama3.{attempt.program}.main")
    leave(program.main([str(attempt.job)]))


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


@contextmanager
def _held_back(numbers: tuple[signal.Signals, ...]) -> Iterator[set[int]]:
    """Hold signals back, so that they are waited for and never interrupt; yield the mask as it was."""
    mask = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, numbers)}
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _parsed(arguments: list[str]) -> Attempt | None:
    parser = argparse.ArgumentParser("python -m llama3.train.launch", description="Start the ranks of one node.")
    parser.add_argument("job", nargs="?", type=Path)
    parser.add_argument("--serve", action="store_true", help="take attempts as JSON lines from stdin instead")
    for name, kind in (("processes", int), ("per-node", int), ("node", int), ("address", str), ("port", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    return None if given.pop("serve") else Attempt(**given)


def agent(arguments: list[str]) -> int:
    """Run the attempt that `arguments` name, or all that come on stdin; return the exit status."""
    attempt = _parsed(arguments)
    preload()
    if attempt is not None:
        outcome = run_attempt(attempt)
        print(outcome.words, file=sys.stderr)
        return outcome.status if outcome.status in (0, TERMINATED) else 1
    for line in sys.stdin:
        run_attempt(Attempt.model_validate_json(line))
    return 0


if __name__ == "__main__":
    # Python 3.12 warns of any thread at a fork; the one there is belongs to pyarrow's jemalloc, which handles forks
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    leave(agent(sys.argv[1:]))
