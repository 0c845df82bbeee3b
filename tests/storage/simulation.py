"""The storage protocol under a deterministic scheduler: leases, commits, cleanup, the promotion log on a false store.

`simulate(seed)` runs herd's own code in several actors, each a greenlet on a simulated machine, against an object
store in memory whose requests are late, lost, repeated or flipped; actors are paused for minutes or die between any two
requests. One seed is one schedule. Time is simulated: an hour takes milliseconds. A broken promise raises `Violation`,
and `minimal` finds the fewest faults that still break it.
"""

from __future__ import annotations

import heapq
import re
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from greenlet import GreenletExit, getcurrent, greenlet

from herd.storage import cleanup, lease, object_artifact, objects, staging
from herd.storage.artifact import ArtifactSpec, DamagedArtifact, Manifest
from herd.storage.filesystem import StoreError, StoreTimeout
from herd.storage.lease import LeaseLost, LeaseTiming
from herd.storage.object_artifact import RemoteStore
from herd.storage.root import Root
from herd.tasks.promotion import log as promotion_log
from herd.tasks.promotion.log import HeadMoved, Promotion, PromotionLog

ROOT, PREFIX = "s3://sim/root", "sim/root/"
START = 1.8e9
"""Seconds since 1970 at which a simulation begins."""
DISTURBED_S, QUIET_S = 400.0, 900.0
"""How long faults happen, and how long the actors then have to end."""
OLD_S = 600.0
"""Age at which the cleanup deletes orphans: above the longest pause and the latest request."""
TIMING = LeaseTiming(beat_s=10, lease_timeout_s=30)
RACE_S, LAG_S = 0.15, 0.5
"""Of weak servers: how long a second writer still wins, and how far listings lag."""
KEPT_S = 70.0
"""Age of an artifact that retention may delete: above the latest request, which may have committed it."""
TRIES = 3
"""Of a request whose reply is lost, as s3fs makes them."""
FAULTS = {"error": 0.01, "lost": 0.03, "late": 0.01, "flip": 0.01, "crash": 0.006, "pause": 0.006}
"""Probability of each fault at a request."""
MANIFEST = re.compile(r"([a-z]+)/([a-z0-9-]+)\.json")


class Violation(AssertionError):
    """The protocol broke a promise."""


@dataclass
class Actor:
    """A process on a simulated machine."""

    name: str
    local: Path
    skew_s: float
    """Error of the machine's clock."""
    alive: bool = True
    paused_until: float = 0.0


@dataclass
class Stored:
    """An object."""

    data: bytes
    modified: float
    created: float


@dataclass
class Simulation:
    """One schedule."""

    seed: int
    folder: Path
    suppressed: frozenset[int] = frozenset()
    """Requests that no fault may happen to."""
    now: float = 0.0
    faults: dict[int, str] = field(default_factory=dict)
    """What happened, by the number of the request."""
    history: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.hub = getcurrent()
        self.waiting: list[tuple[float, float, int, greenlet, Actor]] = []
        self.actors: dict[greenlet, Actor] = {}
        self.requests = self.tokens = self.turns = 0
        self.deadline = DISTURBED_S + QUIET_S
        self.store = SimulatedStore(self)
        self.holders: dict[tuple[str, int], str] = {}
        self.appended: dict[int, str] = {}
        self.violation: BaseException | None = None

    # The scheduler.

    def spawn(self, work: Callable[[], None], actor: Actor) -> greenlet:
        """Begin `work` on `actor` at some time soon."""

        def run() -> None:
            try:
                work()
            except Violation as error:
                self.violation = error
            except (Dead, GreenletExit):
                pass
            except BaseException as error:  # an error of herd's own that no actor expects
                self.violation = Violation(f"{actor.name}: {type(error).__name__}: {error}")
                self.violation.__cause__ = error

        task = greenlet(run, self.hub)
        self.actors[task] = actor
        self._at(self.now + self.random.uniform(0, 5), task, actor)
        return task

    def sleep(self, seconds: float) -> None:
        """Let the others go on for `seconds`."""
        task, actor = getcurrent(), self.current()
        if not actor.alive:
            raise Dead
        self._at(self.now + max(seconds, 1e-6), task, actor)
        self.hub.switch()
        if not actor.alive:
            raise Dead

    def _at(self, when: float, task: greenlet, actor: Actor) -> None:
        self.turns += 1
        heapq.heappush(self.waiting, (when, self.random.random(), self.turns, task, actor))

    def run(self) -> None:
        """Run until no actor waits; raise what went wrong."""
        while self.waiting and self.violation is None:
            when, _, _, task, actor = heapq.heappop(self.waiting)
            if not actor.alive:
                continue
            if actor.paused_until > when:
                self._at(actor.paused_until, task, actor)
                continue
            self.now = when
            if self.now > self.deadline:
                raise Violation(f"{actor.name} still works at {self.now:.0f} s")
            task.switch()
        if self.violation is not None:
            raise self.violation

    def current(self) -> Actor:
        return self.actors[getcurrent()]

    def note(self, text: str) -> None:
        self.history.append(f"{self.now:8.2f}  {self.current().name:<12} {text}")

    def fault(self) -> str:
        """Return what happens to the next request, empty for nothing; a number decides it, not the schedule before."""
        self.requests += 1
        if self.now > DISTURBED_S or self.requests in self.suppressed:
            return ""
        drawn = Random(f"{self.seed}/{self.requests}").random()
        for name, share in FAULTS.items():
            if drawn < share:
                self.faults[self.requests] = name
                self.counts[name] += 1
                return name
            drawn -= share
        return ""

    def crash(self) -> None:
        """End the current actor here, without any of its cleanup; another one takes its place a while later."""
        actor = self.current()
        self.note("dies")
        actor.alive = False
        self.hub.switch()
        raise Dead


Play = Callable[[Simulation], None]
"""Begins actors, runs the simulation and judges the outcome."""


class Dead(BaseException):
    """The actor is dead: what its frames still want to do at collection must not happen."""


class SimulatedStore:
    """The part of fsspec's interface that `storage` uses, on objects in memory."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.objects: dict[str, Stored] = {}
        self.weak = simulation.seed % 3 == 0
        self.visible: dict[str, str] = {}
        """Label -> the attempt that its manifest names."""

    def request(self, what: str, effect: Callable[[], Any], writes: bool = False) -> Any:
        """Send a request: what it does happens at the store at some time before its reply, if one comes."""
        simulation = self.simulation
        if not simulation.current().alive:
            raise Dead
        for _ in range(TRIES):
            fault = simulation.fault()
            simulation.sleep(simulation.random.uniform(0.005, 0.05))
            if fault == "crash" and simulation.random.random() < 0.5:
                simulation.crash()
            if fault == "pause":
                simulation.current().paused_until = simulation.now + simulation.random.uniform(5, 120)
                simulation.note(f"is paused until {simulation.current().paused_until:.0f} before {what}")
                simulation.sleep(0)
            if fault == "error":
                simulation.note(f"{what}: 503 to the end")
                raise StoreError(f"{what}: SlowDown")
            if fault == "late" and writes:  # the store does it after the client gave up
                simulation.note(f"{what}: timed out, will happen")
                actor = Actor("store", Path(), 0)

                def happen(effect: Callable[[], Any] = effect) -> None:
                    simulation.sleep(simulation.random.uniform(0.1, 60))
                    simulation.note(f"{what} happens")
                    with suppress(OSError):
                        effect()

                simulation.spawn(happen, actor)
                simulation.sleep(20)
                raise StoreTimeout(f"{what}: no answer")
            try:
                answer = effect()
                simulation.note(what)
            except OSError as error:
                simulation.note(f"{what}: {type(error).__name__}")
                answer = error
            if fault == "crash":
                simulation.crash()
            simulation.sleep(simulation.random.uniform(0.005, 0.05))
            if fault == "lost":
                simulation.note(f"{what}: the reply is lost, again")
                continue
            if isinstance(answer, OSError):
                raise answer
            if fault == "flip" and isinstance(answer, bytes) and answer:
                simulation.note(f"{what}: a bit is flipped")
                index = simulation.random.randrange(len(answer))
                answer = (
                    answer[:index] + bytes([answer[index] ^ 1 << simulation.random.randrange(8)]) + answer[index + 1 :]
                )
            return answer
        raise StoreTimeout(f"{what}: no answer in {TRIES} tries")

    # What the store does, at once.

    def _put(self, key: str, data: bytes, create: bool = False) -> None:
        if create and key in self.objects and not self._lets_two_win(key):
            raise FileExistsError(key)
        self._guard(key, "overwritten")
        now, before = START + self.simulation.now, self.objects.get(key)
        self.objects[key] = Stored(data, now, before.created if before else now)
        name = key.removeprefix(PREFIX)
        if match := MANIFEST.fullmatch(name):
            self._committed(f"{match[1]}/{match[2]}", Manifest.parse(data, name))

    def _lets_two_win(self, key: str) -> bool:
        """Whether this is a server like OpenStack Swift, and the other writer was there just before."""
        if not self.weak or START + self.simulation.now - self.objects[key].created > RACE_S:
            return False
        self.simulation.counts["two won"] += 1
        return True

    def _listed(self, keys: Iterable[str]) -> list[str]:
        """Return what a listing shows; that of a weak server may lag behind."""
        before = START + self.simulation.now - self.simulation.random.choice((0, LAG_S))
        return [key for key in sorted(keys) if not self.weak or self.objects[key].created <= before]

    def _remove(self, key: str) -> None:
        if key not in self.objects:
            raise FileNotFoundError(key)
        self._guard(key, "deleted")
        del self.objects[key]
        name = key.removeprefix(PREFIX)
        if match := MANIFEST.fullmatch(name):
            self.visible.pop(f"{match[1]}/{match[2]}", None)

    def _guard(self, key: str, verb: str) -> None:
        for label, attempt in self.visible.items():
            if key.startswith(f"{PREFIX}{label}/{attempt}/"):
                raise Violation(f"{key}: a file of a committed artifact is {verb}")

    def _committed(self, label: str, manifest: Manifest) -> None:
        attempt = str(manifest.attempt)
        for name, entry in manifest.files.items():
            stored = self.objects.get(f"{PREFIX}{label}/{attempt}/{name}")
            if stored is None or len(stored.data) != entry.bytes:
                raise Violation(f"{label}: is committed, and its file {name} is not there")
        self.visible[label] = attempt

    @staticmethod
    def _key(uri: str) -> str:
        return uri.removeprefix("s3://").rstrip("/")

    _strip_protocol = _key

    # fsspec's names.

    def pipe_file(self, uri: str, data: bytes, mode: str = "overwrite") -> None:
        key = self._key(uri)
        self.request(f"{mode} {key}", lambda: self._put(key, data, mode == "create"), writes=True)

    def put_file(self, local: str, uri: str) -> None:
        key, data = self._key(uri), Path(local).read_bytes()
        self.request(f"upload {key}", lambda: self._put(key, data), writes=True)

    def cp_file(self, source: str, uri: str) -> None:
        self.request(f"copy {uri}", lambda: self._put(self._key(uri), self._data(source)), writes=True)

    def _data(self, uri: str) -> bytes:
        stored = self.objects.get(self._key(uri))
        if stored is None:
            raise FileNotFoundError(uri)
        return stored.data

    def cat_file(self, uri: str, start: int | None = None, end: int | None = None) -> bytes:
        return bytes(self.request(f"get {self._key(uri)}", lambda: self._data(uri)[start:end]))

    def get_file(self, uri: str, local: str) -> None:
        Path(local).write_bytes(self.cat_file(uri))

    def info(self, uri: str) -> dict[str, Any]:
        info: dict[str, Any] = self.request(f"head {self._key(uri)}", lambda: self._info(self._key(uri)))
        return info

    def _info(self, key: str) -> dict[str, Any]:
        if key not in self.objects:
            raise FileNotFoundError(key)
        stored = self.objects[key]
        modified = datetime.fromtimestamp(stored.modified, UTC)
        return {"name": key, "size": len(stored.data), "type": "file", "LastModified": modified}

    def ls(self, uri: str, detail: bool = True) -> list[dict[str, Any]]:
        before = f"{self._key(uri)}/"

        def listed() -> list[dict[str, Any]]:
            entries = {}
            for key in self._listed(self.objects):
                if key.startswith(before):
                    child = before + key.removeprefix(before).partition("/")[0]
                    folder = {"name": child, "size": 0, "type": "directory"}
                    entries[child] = self._info(key) if child == key else folder
            if not entries:
                raise FileNotFoundError(uri)
            return list(entries.values())

        return list(self.request(f"list {before}", listed))

    def find(self, uri: str, maxdepth: int | None = None, prefix: str = "", detail: bool = False) -> Any:
        before = f"{self._key(uri)}/{prefix}"

        def listed() -> dict[str, Any]:
            keys = [key for key in self._listed(self.objects) if key.startswith(before)]
            return {key: self._info(key) for key in keys if maxdepth is None or "/" not in key.removeprefix(before)}

        entries = self.request(f"find {before}", listed)
        return entries if detail else list(entries)

    def rm_file(self, uri: str) -> None:
        key = self._key(uri)
        self.request(f"delete {key}", lambda: self._remove(key), writes=True)

    def rm(self, uri: str, recursive: bool = False) -> None:
        keys = self.find(uri) or ([self._key(uri)] if self._key(uri) in self.objects else [])
        for key in keys:
            with suppress(FileNotFoundError):
                self.rm_file(key)

    def server_time(self, uri: str) -> float:
        return float(self.request("time", lambda: START + self.simulation.now))

    def abort_uploads(self, uri: str, before: float) -> tuple[int, int]:
        return 0, 0


# What the actors do: herd's own code, as its steps and flows use it.


def maker(simulation: Simulation, actor: Actor, name: str) -> None:
    """Make the artifact of a name under its lease, as a step does; look again while things happen."""
    root = Root(ROOT, actor.local)
    store = RemoteStore(root)
    spec = ArtifactSpec(kind="artifacts", name=name, version=1, parameters={"of": name}, inputs={})
    there = False
    while not there or simulation.now < DISTURBED_S:
        with suppress(OSError, LeaseLost):
            with lease.lease(root, spec.label, actor.name, lambda _: None, timing=TIMING) as held:
                first = simulation.holders.setdefault((spec.label, held.fence), actor.name)
                if first != actor.name:
                    raise Violation(f"{spec.label}: {first} and {actor.name} both hold fence {held.fence}")
                if store.find(spec) is None:
                    with store.staging() as folder:
                        for file in ("a.bin", "b/c.bin"):  # every file says whose it is
                            (folder / file).parent.mkdir(exist_ok=True)
                            (folder / file).write_text(f"{actor.name} {simulation.now}")
                        simulation.sleep(simulation.random.uniform(0, 60))
                        held.check()
                        store.commit(spec, folder, {}, actor.name, "", 0)
            there = True
        simulation.sleep(simulation.random.uniform(5, 60))


def tokens_maker(simulation: Simulation, actor: Actor) -> None:
    """One of several that want the same tokens."""
    maker(simulation, actor, "tokens")


def model_maker(simulation: Simulation, actor: Actor) -> None:
    """One of several that want the same model."""
    maker(simulation, actor, "model")


def reader(simulation: Simulation, actor: Actor) -> None:
    """Read what is committed: whole, by one writer, or not at all."""
    store = RemoteStore(Root(ROOT, actor.local))
    while simulation.now < DISTURBED_S + 100:
        simulation.sleep(simulation.random.uniform(1, 60))
        with suppress(OSError):
            for artifact in store.all("artifacts"):
                with suppress(DamagedArtifact):  # bits that flip three times in a row; `_guard` knows what is stored
                    folder = artifact.path
                    texts = {(folder / file).read_text() for file in artifact.manifest.files}
                    if len(texts) != 1 or len(artifact.manifest.files) != 2:
                        raise Violation(f"{artifact.label}: reads as {sorted(texts)}")
                    simulation.counts["read"] += 1


def janitor(simulation: Simulation, actor: Actor) -> None:
    """Delete orphans, over and over."""
    root = Root(ROOT, actor.local)
    while simulation.now < DISTURBED_S:
        simulation.sleep(simulation.random.uniform(10, 100))
        with suppress(OSError):
            cleanup.clean_up_root(root, OLD_S, ["artifacts"])


def promoter(simulation: Simulation, actor: Actor) -> None:
    """Append three records to the log; one whose writer was told so stays, with its number."""
    root, done = Root(ROOT, actor.local), 0
    while done < 3:
        simulation.sleep(simulation.random.uniform(1, 60))
        with suppress(
            OSError, HeadMoved, ValueError
        ):  # bits that flip three times in a row; the judge reads it in peace
            log = PromotionLog(root, "family")
            record = Promotion(
                time="2026-01-01T00:00:00+00:00", kind="rejected", run=actor.name, family="family", position=done,
                artifact="checkpoint/x-00000000", digest="0" * 64, alias="champion",
            )  # fmt: skip
            written = log.append(record, log.head)
            if simulation.appended.setdefault(written.n, written.id) != written.id:
                raise Violation(f"number {written.n} of the log was given twice")
            done += 1


def deleter(simulation: Simulation, actor: Actor) -> None:
    """Delete an artifact now and then, as retention does; who needs it makes it again."""
    store = RemoteStore(Root(ROOT, actor.local))
    while simulation.now < DISTURBED_S:
        simulation.sleep(simulation.random.uniform(10, 60))
        with suppress(OSError):
            for artifact in store.all("artifacts"):
                manifest = simulation.store.objects.get(f"{PREFIX}{artifact.label}.json")
                if manifest and START + simulation.now - manifest.created > KEPT_S:
                    store.delete(artifact.label)


ROLES: tuple[Callable[[Simulation, Actor], None], ...] = (
    tokens_maker,
    tokens_maker,
    model_maker,
    model_maker,
    reader,
    janitor,
    promoter,
    promoter,
    deleter,
)


def simulate(seed: int, suppressed: Iterable[int] = (), play: Play | None = None) -> Simulation:
    """Run one schedule of `play`; return what happened. Raises Violation, with the simulation as `simulation`.

    Default: some of ROLES, whose outcome is judged when all is quiet.
    """
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="herd-simulation-", dir=memory) as folder:
        simulation = Simulation(seed, Path(folder), frozenset(suppressed))
        try:
            with _in_one_thread(simulation):
                (play or _play)(simulation)
        except Violation as error:
            error.simulation = simulation  # type: ignore[attr-defined]
            raise
        finally:
            for actor in simulation.actors.values():
                actor.alive = False  # their frames are collected now
            simulation.waiting.clear()
    return simulation


def _play(simulation: Simulation) -> None:
    random = simulation.random
    roles = random.sample(ROLES, random.randint(2, 6))
    for number, role in enumerate(roles):
        begin(simulation, f"{role.__name__}-{number}", role)
    simulation.run()
    _judge(simulation)


def begin(simulation: Simulation, name: str, role: Callable[[Simulation, Actor], None], life: int = 0) -> None:
    """Let an actor play `role`; if it dies, another machine continues."""
    local = simulation.folder / f"{name}-{life}"
    local.mkdir()
    actor = Actor(f"{name}-{life}", local, simulation.random.uniform(-7200, 7200))
    nurse = Actor("supervisor", Path(), 0)

    def watch() -> None:
        while actor.alive and not task.dead:
            simulation.sleep(7)
        if not actor.alive:
            begin(simulation, name, role, life + 1)

    task = simulation.spawn(lambda: role(simulation, actor), actor)
    simulation.spawn(watch, nurse)


def _judge(simulation: Simulation) -> None:
    """After all is quiet: the log is a chain with every acknowledged record, and cleanup leaves what is committed."""

    def judge() -> None:
        root = Root(ROOT, simulation.folder / "judge")
        log = PromotionLog(root, "family")
        kept = {record.n: record.id for record in log.records}
        if lost := {number for number, ident in simulation.appended.items() if kept.get(number) != ident}:
            raise Violation(f"the log lost its records {sorted(lost)}")
        simulation.sleep(2 * OLD_S)
        cleanup.clean_up_root(root, OLD_S, ["artifacts"])
        store = simulation.store
        for key in store.objects:
            name = key.removeprefix(PREFIX)
            if name.startswith("artifacts/") and not MANIFEST.fullmatch(name):
                label, attempt = "/".join(name.split("/")[:2]), name.split("/")[2]
                if store.visible.get(label) != attempt:
                    raise Violation(f"{name}: is still there, and no manifest names it")
        for artifact in RemoteStore(root).all("artifacts"):
            artifact.verify()

    simulation.now = max(simulation.now, DISTURBED_S + 61)  # after the last late request
    simulation.deadline = simulation.now + 3 * OLD_S
    simulation.spawn(judge, Actor("judge", simulation.folder, 0))
    simulation.run()


class _Time:
    """The module `time` as the actors see it."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.sleep = simulation.sleep

    def time(self) -> float:
        return START + self.simulation.now + self.simulation.current().skew_s

    def monotonic(self) -> float:
        return self.simulation.now

    perf_counter = monotonic


class _Event:
    """threading.Event of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.happened = simulation, False

    def set(self) -> None:
        self.happened = True

    def wait(self, timeout: float) -> bool:
        end = self.simulation.now + timeout
        while not self.happened and self.simulation.now < end:
            self.simulation.sleep(min(1.0, end - self.simulation.now))
        return self.happened


class _Thread:
    """threading.Thread of a simulation: it dies with its actor."""

    def __init__(self, simulation: Simulation, target: Callable[[], None], **_: Any) -> None:
        self.simulation, self.target = simulation, target
        self.ident: int | None = None

    def start(self) -> None:
        self.task = self.simulation.spawn(self.target, self.simulation.current())
        self.ident = 1

    def join(self) -> None:
        while not self.task.dead:
            self.simulation.sleep(0.1)


@contextmanager
def _in_one_thread(simulation: Simulation) -> Iterator[None]:
    """Put the simulation in the place of clock, threads and store."""

    def serial_map(work: Callable[[Any], Any], items: Iterable[Any], threads: int = 1) -> list[Any]:
        return [work(item) for item in items]

    def token() -> uuid.UUID:
        simulation.tokens += 1
        return uuid.UUID(int=Random(f"{simulation.seed}/token/{simulation.tokens}").getrandbits(128), version=4)

    clock = _Time(simulation)
    with ExitStack() as stack:
        for module in (lease, objects, cleanup, staging, promotion_log):
            stack.enter_context(patch.object(module, "time", clock))
        for module in (object_artifact, promotion_log):
            stack.enter_context(patch.object(module, "parallel_map", serial_map))
        stack.enter_context(patch.object(lease, "Event", lambda: _Event(simulation)))
        stack.enter_context(patch.object(lease, "Thread", lambda **given: _Thread(simulation, **given)))
        stack.enter_context(patch.object(lease, "machine_id", lambda: simulation.current().name))
        stack.enter_context(patch("herd.storage.filesystem.remote_filesystem", lambda uri: simulation.store))
        stack.enter_context(patch("uuid.uuid4", token))
        stack.enter_context(patch("os.fsync", lambda descriptor: None))
        yield


def minimal(seed: int, play: Play | None = None) -> str:
    """Return the shortest schedule found that still breaks the promise that `seed` breaks: its faults and its steps."""
    suppressed: set[int] = set()
    broken = _broken(seed, suppressed, play)
    assert broken is not None
    began = time.monotonic()
    for request in sorted(broken[1].faults, reverse=True):
        if time.monotonic() - began < 60 and (tried := _broken(seed, suppressed | {request}, play)) is not None:
            suppressed.add(request)
            broken = tried
    error, simulation = broken
    faults = ", ".join(f"{number} {name}" for number, name in simulation.faults.items())
    return "\n".join([f"seed {seed}: {error}", f"faults: {faults or 'none'}", *simulation.history])


def _broken(seed: int, suppressed: set[int], play: Play | None) -> tuple[Violation, Simulation] | None:
    try:
        simulate(seed, suppressed, play)
    except Violation as error:
        return error, error.simulation  # type: ignore[attr-defined]
    return None


def play_seeds(first: int, end: int, happened: Iterable[str], play: Play | None = None) -> str:
    """Run the schedules, return what happened, and show the shortest that breaks a promise.

    Each of `happened` must have happened in one of them.
    """
    counts = Counter[str]()
    for seed in range(first, end):
        try:
            counts += simulate(seed, play=play).counts
        except Violation:
            pytest.fail(minimal(seed, play), pytrace=False)
    assert all(counts[name] for name in happened)
    return f"{end - first:,} schedules: " + ", ".join(f"{name} {count:,}" for name, count in counts.most_common())
