"""Faults without a pause: `python -m benchmarks chaos --minutes 30 --seed 1`.

Three roots in an object store (OpenStack Swift) run the tiny recipe side by side, with a Prefect and an MLflow server.
Every few seconds something is killed, stopped for a while, filled, slowed, cut off or damaged. Whoever ends is started
again by the same command, on one of two machines, which are folders here. What must hold at the end, `broken_promises`
compares with an undisturbed run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil
import yaml

from benchmarks.measure import NotMeasured
from herd.flows.local_server import await_answer, prefect_command
from herd.storage.filesystem import filesystem_of
from herd.storage.processes import die_with_parent, free_port
from tests.dist import Forked
from tests.e2e.conftest import kill_all, trainers, write_recipe
from tests.storage.fault_proxy import Fault as NetworkFault
from tests.storage.fault_proxy import FaultProxy, Rule, fault_proxy
from tests.storage.s3 import pointed_at
from tests.storage.swift import Swift, credentials, swift_server
from tests.tasks.mlflow_server import MlflowServer

BUCKET = "chaos"
PAUSE_S = (5.0, 20.0)
"""Between two faults."""
PATIENCE_S = 1200.0
"""For the runs to end after the last fault."""
DISK = "320m"
"""Size of a machine's disk that may be filled."""
HANG_S = 45
"""`cluster.timeout_s`: a rank that does nothing for so long hangs."""
ENDS_WELL, REFUSED = 0, 3


class NotNow(Exception):
    """The fault needs something that is not there at the moment, such as a rank."""


class PrefectServer:
    """A server on a database that outlives it, with the methods of MlflowServer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}/api"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it without waiting for an answer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PREFECT_HOME": str(self.folder)}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                prefect_command(self.port),
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )

    def signal(self, number: int) -> None:
        """Send a signal to the server and its children."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@dataclass
class Lane:
    """One root after another, and the process that works on it: `herd run`, started again whenever it ends."""

    number: int
    folder: Path
    disk: Path
    """A small file system."""
    elastic: bool
    """Whether each start has another number of processes; then models are equal up to rounding."""
    generation: int = 0
    process: Forked | None = None
    machine: Path = Path()
    printed: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    """Everything that was ever done for this root: files of work in progress, positions of stages."""
    more_options: tuple[str, ...] = ()
    exits: Counter[int] = field(default_factory=Counter)
    ended: list[tuple[str, str]] = field(default_factory=list)
    """Family and URI of each root whose run came to its end."""
    resting_until: float = 0.0

    @property
    def family(self) -> str:
        return f"chaos-{self.number}-{self.generation}"

    @property
    def uri(self) -> str:
        return f"s3://{BUCKET}/{self.family}"

    def alive(self) -> Forked:
        """Return the process of the run. Raises NotNow."""
        if self.process is None or self.process.poll() is not None:
            raise NotNow
        return self.process

    def rank(self, random: Random) -> psutil.Process:
        """Return one of its trainer's ranks. Raises NotNow."""
        ranks = trainers(self.alive().pid)
        if not ranks:
            raise NotNow
        return random.choice(ranks)

    def look(self) -> bool:
        """Return whether more is done than ever before: a file of unfinished work, or a step of a stage."""
        before = len(self.seen)
        for work in (self.disk / "work", self.folder / "work"):
            for path, _, names in os.walk(work):
                place = os.path.relpath(path, work)
                self.seen.update(f"{place}/{name}" for name in names if name[0] != "." and "tmp" not in name)
                if "journal.jsonl" in names:
                    stage = place.partition("/")[0]
                    lines = (Path(path) / "journal.jsonl").read_bytes().count(b"\n")
                    self.seen.add(f"{stage} {lines}")
        return len(self.seen) > before


@dataclass
class Injection:
    """A fault that happened."""

    kind: str
    lanes: list[Lane]
    began: float
    ended: float | None = None
    recovered: dict[int, float] = field(default_factory=dict)
    """Lane -> seconds from the end of the fault until more was done than ever before."""


class World:
    """Servers, lanes, and the faults of one seed."""

    def __init__(self, folder: Path, seed: int, log: Callable[[str], None]) -> None:
        self.folder, self.random, self.log = folder, Random(seed), log
        self.mlflow, self.prefect = MlflowServer(folder / "mlflow"), PrefectServer(folder / "prefect")
        self.lanes: list[Lane] = []
        self.injections: list[Injection] = []
        self.broken: list[str] = []
        self.swift: Swift
        self.proxy: FaultProxy

    @contextmanager
    def running(self) -> Iterator[World]:
        """Start the servers and make the lanes; end everything."""
        with ExitStack() as stack:
            (self.folder / "swift").mkdir()
            self.swift = stack.enter_context(swift_server(self.folder / "swift"))
            stack.enter_context(pointed_at(credentials(self.swift.endpoint)))  # this process looks without a proxy
            filesystem_of("s3://").call_s3("create_bucket", Bucket=BUCKET)
            self.proxy = stack.enter_context(fault_proxy(self.swift.endpoint))
            os.environ["MLFLOW_TRACKING_URI"] = self.mlflow.uri
            stack.callback(os.environ.pop, "MLFLOW_TRACKING_URI", None)
            stack.callback(self.prefect.kill)
            stack.callback(self.mlflow.kill)
            self.prefect.start()
            self.mlflow.start()
            assert self.prefect.process is not None
            await_answer(f"{self.prefect.uri}/health", self.prefect.process)
            self.recipe = write_recipe(self.folder / "corpus")
            for number in range(3):
                folder, disk = self.folder / f"machine-{number}", self.folder / f"disk-{number}"
                folder.mkdir()
                disk.mkdir()
                if os.system(f"mount -t tmpfs -o size={DISK} tmpfs {disk} 2>/dev/null"):
                    raise NotMeasured("this machine does not let us mount a small file system; be root")
                stack.callback(os.system, f"umount -l {disk}")
                self.lanes.append(Lane(number, folder, disk, elastic=number == 2))
            try:
                yield self
            finally:
                for lane in self.lanes:
                    if lane.process is not None:
                        kill_all(lane.process.pid)

    def environment(self, root: str, scratch: Path) -> dict[str, str]:
        """Return the variables of a command on the machine `scratch`."""
        store = credentials(self.proxy.endpoint) if root.startswith("s3://") else {}
        return {
            **os.environ,
            **store,
            "HERD_ROOT": root,
            "HERD_SCRATCH": str(scratch),
            "HERD_THREADS": "1",
            "HERD_S3_DEADLINE_S": "60",
            "MLFLOW_TRACKING_URI": self.mlflow.uri,
            "PREFECT_API_URL": self.prefect.uri,
            "PREFECT_HOME": str(self.folder / "client"),
            "COLUMNS": "160",
        }

    def command(self, *words: str, root: str, scratch: Path, printed: list[str]) -> Forked:
        """Start `herd words...`; what it prints is appended to `printed` and to a log file."""
        return self.forked("herd.flows.cli.main", *words, root=root, scratch=scratch, printed=printed)

    def forked(self, *words: str, root: str, scratch: Path, printed: list[str]) -> Forked:
        """Start `python -m words...`, as `command` does."""
        process = Forked(*words, environment=self.environment(root, scratch), folder=self.folder)
        process.stdin.close()

        def read() -> None:
            with (self.folder / "printed.log").open("a") as log:
                for line in process.stdout:
                    printed.append(line)
                    log.write(f"{time.monotonic():9.1f} {Path(root).name} {process.pid} {line}")
                    log.flush()

        threading.Thread(target=read, daemon=True).start()
        return process

    def run_words(self, family: str, processes: int, folder: Path) -> list[str]:
        """Return the command of a run of `family`."""
        data = yaml.safe_load(Path(self.recipe).read_text())
        recipe, cluster = folder / f"{family}.yaml", folder / f"cluster-{processes}.yaml"
        recipe.write_text(yaml.safe_dump({**data, "name": family}))
        cluster.write_text(yaml.safe_dump({"processes": processes, "timeout_s": HANG_S, "attempts": 3, "threads": 1}))
        return ["run", str(recipe), "--cluster", str(cluster)]

    def step(self, lane: Lane, more: bool) -> None:
        """Start the lane's command if it ended; with `more`, a new root where the run came to its end."""
        if lane.process is not None:
            if (status := lane.process.poll()) is None:
                return
            self._ended(lane, status)
            lane.process, lane.resting_until = None, time.monotonic() + self.random.uniform(1, 3)
        idle = lane.generation and lane.ended and lane.ended[-1][0] == lane.family
        if time.monotonic() < lane.resting_until or (idle and not more):
            return
        if idle or not lane.generation:
            lane.generation += 1
            lane.seen.clear()
        lane.machine = self.random.choice((lane.folder, lane.disk))
        processes = self.random.choice((1, 2)) if lane.elastic else 1
        words = self.run_words(lane.family, processes, self.folder / "corpus")
        lane.printed = []
        lane.process = self.command(
            *words, *lane.more_options, root=lane.uri, scratch=lane.machine, printed=lane.printed
        )
        lane.more_options = ()

    def _ended(self, lane: Lane, status: int) -> None:
        """Record how a command ended, and do what it says."""
        lane.exits[status] += 1
        text = "".join(lane.printed)
        self.log(f"{lane.family}: status {status}: {' '.join(text.split())[-200:]}")
        if "Traceback" in text:
            self.broken.append(f"{lane.family}: a traceback: {' '.join(text.split())[-300:]}")
        if status == ENDS_WELL:
            lane.ended.append((lane.family, lane.uri))
            for machine in (lane.folder, lane.disk):
                os.system(f"rm -rf {machine}/*")
        elif status == REFUSED:
            self.broken.append(f"{lane.family}: the gate refused the first model")
            lane.ended.append((lane.family, lane.uri))
        elif "--restart-damaged" in text:
            lane.more_options = ("--restart-damaged",)

    def inject(self, minutes: float) -> None:
        """Let faults happen for so long, then let every run come to its end."""
        end, due = time.monotonic() + 60 * minutes, time.monotonic() + 10
        held: list[tuple[Injection, Iterator[float], float]] = []
        while time.monotonic() < end or any(lane.process is not None for lane in self.lanes):
            now = time.monotonic()
            if now > end + PATIENCE_S:
                self.broken += [f"{lane.family}: did not end" for lane in self.lanes if lane.process is not None]
                return
            for injection, fault, until in list(held):
                if now >= until:
                    held.remove((injection, fault, until))
                    longer = None
                    with suppress(psutil.Error):  # what was to be resumed has died meanwhile
                        longer = next(fault, None)
                    if longer is not None:
                        held.append((injection, fault, now + longer))
                    else:
                        injection.ended = time.monotonic()
            if now >= due and now < end:
                held += self._next_fault()
                due = now + self.random.uniform(*PAUSE_S)
            for lane in self.lanes:
                self.step(lane, now < end)
                if lane.look():
                    for injection in self.injections:
                        if lane in injection.lanes and injection.ended is not None:
                            injection.recovered.setdefault(lane.number, time.monotonic() - injection.ended)
            time.sleep(0.2)

    def _next_fault(self) -> list[tuple[Injection, Iterator[float], float]]:
        """Begin a fault: of those that can happen now, one that happened least often so far."""
        happened = Counter(injection.kind for injection in self.injections)
        for kind in sorted(FAULTS, key=lambda kind: (happened[kind], self.random.random())):
            lane = self.random.choice(self.lanes)
            fault = FAULTS[kind](self, lane)
            try:
                seconds = next(fault, None)
            except (NotNow, psutil.Error, OSError):
                continue
            now = time.monotonic()
            self.log(f"[{kind}] {lane.family}" + (f" for {seconds:.0f} s" if seconds else ""))
            lanes = self.lanes if kind in OF_ALL else [lane]
            self.injections.append(Injection(kind, list(lanes), now, None if seconds else now))
            return [(self.injections[-1], fault, now + seconds)] if seconds else []
        return []


Fault = Callable[[World, Lane], Iterator[float]]
"""Begins a fault, yields for how many seconds it lasts, and ends it. Raises NotNow."""


def kill_rank(world: World, lane: Lane) -> Iterator[float]:
    lane.rank(world.random).kill()
    yield from ()


def kill_run(world: World, lane: Lane) -> Iterator[float]:
    kill_all(lane.alive().pid)
    yield from ()


def kill_supervisor(world: World, lane: Lane) -> Iterator[float]:
    lane.alive().kill()
    yield from ()


def kill_agent(world: World, lane: Lane) -> Iterator[float]:
    rank = lane.rank(world.random)
    agent = rank.parent()
    if agent is None or agent.pid == lane.alive().pid:
        raise NotNow
    agent.kill()
    yield from ()


def interrupt_run(world: World, lane: Lane) -> Iterator[float]:
    lane.alive().send_signal(world.random.choice((signal.SIGTERM, signal.SIGINT)))
    yield from ()


def slow_rank(world: World, lane: Lane) -> Iterator[float]:
    rank = lane.rank(world.random)
    for _ in range(8):
        rank.suspend()
        yield world.random.uniform(0.5, 1.0)
        rank.resume()
        yield 0.5


def hang_rank(world: World, lane: Lane) -> Iterator[float]:
    rank = lane.rank(world.random)
    rank.suspend()
    yield HANG_S + 15.0
    rank.resume()


def pause_run(world: World, lane: Lane) -> Iterator[float]:
    """Long enough for another machine to take the run over."""
    process = psutil.Process(lane.alive().pid)
    stopped = [process, *process.children(recursive=True)]
    for each in stopped:
        with suppress(psutil.Error):
            each.suspend()
    yield world.random.uniform(5, 60)
    for each in stopped:
        with suppress(psutil.Error):
            each.resume()


def second_run(world: World, lane: Lane) -> Iterator[float]:
    """The same command on the other machine, while the first one works."""
    lane.alive()
    other = lane.disk if lane.machine == lane.folder else lane.folder
    words = world.run_words(lane.family, 1, world.folder / "corpus")
    printed: list[str] = []
    second = world.command(*words, root=lane.uri, scratch=other, printed=printed)
    yield world.random.uniform(10, 30)
    kill_all(second.pid)
    if "Traceback" in (text := "".join(printed)):
        world.broken.append(f"{lane.family}: a traceback of a second run: {' '.join(text.split())[-300:]}")


def no_memory(world: World, lane: Lane) -> Iterator[float]:
    rank = lane.rank(world.random)
    rank.rlimit(psutil.RLIMIT_AS, (rank.memory_info().vms, psutil.RLIM_INFINITY))
    yield 10.0
    rank.rlimit(psutil.RLIMIT_AS, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))


def full_disk(world: World, lane: Lane) -> Iterator[float]:
    if lane.machine != lane.disk:
        raise NotNow
    filler = lane.disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass
    yield world.random.uniform(5, 20)
    filler.unlink(missing_ok=True)


def file_size_limit(world: World, lane: Lane) -> Iterator[float]:
    process = psutil.Process(lane.alive().pid)
    process.rlimit(psutil.RLIMIT_FSIZE, (1 << 16, psutil.RLIM_INFINITY))
    yield world.random.uniform(5, 15)
    process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))


def damage_checkpoint(world: World, lane: Lane) -> Iterator[float]:
    """Flip a bit of a file of a checkpoint in progress, in the store."""
    files = filesystem_of(lane.uri).find(f"{lane.uri}/in-progress")
    files = [file for file in files if file.endswith(".safetensors") or file.endswith(".distcp")]
    if not files:
        raise NotNow
    file = f"s3://{world.random.choice(files)}"
    content = bytearray(filesystem_of(file).cat_file(file))
    content[world.random.randrange(len(content))] ^= 1
    filesystem_of(file).pipe_file(file, bytes(content))
    yield from ()


def mistakes(world: World, lane: Lane) -> Iterator[float]:
    """Commands that must be refused with status 2, and change nothing."""
    words = world.run_words(lane.family, 1, world.folder / "corpus")
    for wrong in ([*words, "--set", "stages.main.until=1"], ["status", "../chaos"], ["inspect", "none-1"]):
        printed: list[str] = []
        process = world.command(*wrong, root=lane.uri, scratch=world.folder / "mistakes", printed=printed)
        while process.poll() is None:
            yield 1.0
        if process.returncode not in (1, 2):
            world.broken.append(f"{' '.join(wrong)}: status {process.returncode}")


def race_promotions(world: World, lane: Lane) -> Iterator[float]:
    """Two people judge the model of a finished run at once."""
    if not lane.ended:
        raise NotNow
    family, uri = world.random.choice(lane.ended)
    lost: list[str] = []
    both = [
        world.command("promote", f"{family}-1", root=uri, scratch=world.folder / f"person-{n}", printed=lost)
        for n in (1, 2)
    ]
    while any(process.poll() is None for process in both):
        yield 1.0


def killed_server(name: str) -> Fault:
    def fault(world: World, lane: Lane) -> Iterator[float]:
        server = getattr(world, name)
        if not (server.running if name == "swift" else server.process):
            raise NotNow
        server.kill()
        yield world.random.uniform(3, 20)
        if name == "mlflow":
            server.start(wait=False)
            return
        try:
            server.start()
        except RuntimeError:  # Swift, on a machine that is too busy at the moment
            server.start()

    return fault


def stopped_server(name: str) -> Fault:
    def fault(world: World, lane: Lane) -> Iterator[float]:
        server = getattr(world, name)
        process = server.process
        if process is None:
            raise NotNow
        server.signal(signal.SIGSTOP)
        yield world.random.uniform(5, 20)
        if server.process is process:
            server.signal(signal.SIGCONT)

    return fault


def network(kind: NetworkFault, method: str = "", times: tuple[int, int] = (1, 12)) -> Fault:
    def fault(world: World, lane: Lane) -> Iterator[float]:
        lane.alive()
        count = world.random.randint(*times)
        rule = Rule(kind, method=method, path=f"/{BUCKET}/{lane.family}", times=count, seconds=2.0)
        world.proxy.rules.append(rule)
        yield world.random.uniform(3, 12)
        world.proxy.rules.remove(rule)

    return fault


def cut_off(world: World, lane: Lane) -> Iterator[float]:
    """No request of the root's machines arrives."""
    lane.alive()
    rule = Rule("reset", path=f"/{BUCKET}/{lane.family}", times=None)
    world.proxy.rules.append(rule)
    yield world.random.uniform(5, 40)
    world.proxy.rules.remove(rule)


FAULTS: dict[str, Fault] = {
    "F1 rank killed": kill_rank,
    "F1 agent killed": kill_agent,
    "F2 run killed": kill_run,
    "F2 supervisor killed": kill_supervisor,
    "F3 checkpoint damaged": damage_checkpoint,
    "F3 bits flipped in replies": network("flip", "GET", (1, 2)),
    "F3 bits flipped in requests": network("flip-sent", "PUT", (1, 2)),
    "F3 replies truncated": network("truncate", "GET"),
    "F4 store killed": killed_server("swift"),
    "F4 store slow": network("delay"),
    "F4 429": network("too-many"),
    "F4 500": network("error"),
    "F4 503": network("slow-down"),
    "F4 connections reset": network("reset"),
    "F4 replies reset halfway": network("reset-in-body", "GET"),
    "F4 no answer": network("hang", times=(1, 2)),
    "F4 cut off": cut_off,
    "F5 replies to writes lost": network("drop-reply", "PUT|POST|DELETE", (1, 4)),
    "F6 disk full": full_disk,
    "F6 file size limit": file_size_limit,
    "F9 rank hangs": hang_rank,
    "F10 rank slow": slow_rank,
    "F11 SIGTERM or SIGINT": interrupt_run,
    "F13 second run": second_run,
    "F14 run paused": pause_run,
    "F15 MLflow killed": killed_server("mlflow"),
    "F15 MLflow stopped": stopped_server("mlflow"),
    "F16 Prefect killed": killed_server("prefect"),
    "F16 Prefect stopped": stopped_server("prefect"),
    "F17 mistakes": mistakes,
    "F25 no memory": no_memory,
    "F26 promotions race": race_promotions,
}
"""F20 (secrets) and F23 (another number of processes) happen all the time. What is not here comes from inside a
computation (F7, F8, F21, F22), needs files that nobody wrote (F18, F19), or cannot be done to one process (F12, F24);
docs/reference/faults.md names their tests."""
OF_ALL = {kind for kind in FAULTS if kind.split()[1] in ("MLflow", "Prefect", "store") and "slow" not in kind}
