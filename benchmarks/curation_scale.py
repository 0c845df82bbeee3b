"""Rows about growth: what curation costs on corpora of four sizes, as work items of a corpus 64 times as large.

Text per shard, documents per reducer and DuckDB's memory are a 64th of the engine's, so a few hundred megabytes have as
many shards and hash ranges as tens of gigabytes. Text per shard is the same at all sizes, so shards grow with the
corpus: whatever reads every shard in every work item shows as an exponent above 1.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import yaml

from benchmarks.corpus import SEED, Page, cut, plant, read_texts, write_jsonl
from benchmarks.inputs import letters
from benchmarks.measure import ROOT, Cost
from benchmarks.meter import cpu_seconds
from benchmarks.ours.setup import bench_recipe
from benchmarks.rows import Row, measured
from benchmarks.session import Session
from benchmarks.storage_server import object_store
from herd.llama3.data.text.normalize import normalize
from herd.llama3.data.work_items import Runner, run_serial
from herd.llama3.recipe.load import resolved
from herd.storage.filesystem import filesystem_of
from herd.storage.object_artifact import open_store
from herd.storage.objects import list_objects, put_bytes
from herd.storage.processes import peak_rss
from herd.storage.root import Root
from herd.tasks.runs.records import Runs

SMALLEST = {"small": 5_000_000, "full": 20_000_000}
"""Bytes of text of the smallest corpus; the others have 2, 4 and 8 times as much."""
GROWTH = (1, 2, 4, 8)
SCALE = 64
"""Of the engine's constants, what the benchmark sets is so much smaller."""
CONSTANTS = {
    "herd.llama3.data.write_shards": {"SHARD_BYTES": SCALE},
    "herd.llama3.data.collect": dict.fromkeys(("ITEM_BYTES", "MOST_TEXT", "LARGEST_ITEM", "LEAST_ITEMS"), SCALE),
    "herd.llama3.data.curate": {"PARTITION_DOCUMENTS": SCALE},
    "herd.llama3.data.shuffle": {"BUFFER": SCALE},
    "herd.llama3.data.mapreduce": {"AGGREGATED": SCALE},
}
"""Module -> its constants that say how much text or how many documents one work item has -> how often smaller they are
here."""
MEMORY, WHOLE_MEMORY = "256MiB", "1GiB"
"""Of DuckDB in one work item, small and whole."""
FILE_BYTES = 900_000
"""Text of an input file: below a scaled shard, so that each file is one work item and one shard."""
GROWN_BYTES = 1.53
"""Bytes of a corpus for each byte of different text, see `corpus.plant`."""
QUESTIONS, QUESTION_WORDS, LEAKS = 200, 25, 0.005
"""Evaluation questions, their words, and the share of documents that end with one."""
MOJIBAKE = "The mus\u00c3\u00a9e was clos\u00c3\u00a9 when the visitors came.\n\n"
"""For the warm-up: the repair of such text compiles functions that few documents need."""


# The corpus: different text at any size, with copies, near copies, versions, common lines and questions across files.


def write_corpus(folder: Path, texts: Sequence[str], size: int) -> int:
    """Write jsonl files with about `size` bytes of text into `folder`/text, and `questions.jsonl`; return the bytes.

    `texts` repeat with their letters exchanged by another permutation in each round, so that no shingle, word or line
    is in two rounds. What is planted lies in files of chance.
    """
    chance = random.Random(SEED)
    pieces = [piece for text in texts for piece in cut(text, chance)]
    questions = [" ".join(piece.split()[:QUESTION_WORDS]).translate(letters(chance)) for piece in pieces[:QUESTIONS]]
    (folder / "text").mkdir(parents=True)
    (folder / "questions.jsonl").write_text("".join(json.dumps({"question": line}) + "\n" for line in questions))
    originals: list[Page] = []
    total = 0
    while total < size / GROWN_BYTES:
        table = letters(chance)
        for piece in pieces:
            originals.append(Page(piece.translate(table), f"https://bench.example/{len(originals)}"))
            total += originals[-1].size
            if total >= size / GROWN_BYTES:
                break
    pages = plant(originals, chance)
    chance.shuffle(pages)
    written, files, batch, filled = 0, 0, list[Page](), 0
    for place, planted in enumerate(pages):
        leak = f"\n{chance.choice(questions)}" if chance.random() < LEAKS else ""
        page = Page(planted.text + leak, planted.url, planted.date)
        batch.append(page)
        filled += page.size
        if filled >= FILE_BYTES or place + 1 == len(pages):
            write_jsonl(batch, folder / "text" / f"{files:05}.jsonl")
            written, files, batch, filled = written + filled, files + 1, [], 0
    return written


# One process that curates a corpus, and counts.


@cache
def scale_down() -> None:
    """Give this process work items of a 64th of the size. Raises AttributeError if a constant has another name now."""
    modules = [import_module(name) for name in CONSTANTS]  # one may have a constant of another
    for module, constants in zip(modules, CONSTANTS.values(), strict=True):
        for constant, divisor in constants.items():
            setattr(module, constant, getattr(module, constant) // divisor)


@dataclass
class Counts:
    """What a process did so far, by step of curation."""

    opened: int = 0
    """Files that Python opened; DuckDB and Arrow open theirs without telling it."""
    written: int = 0
    """Files that work items wrote, by renaming a temporary one, also those that a later step deleted."""
    written_bytes: int = 0
    between_bytes: int = 0
    """Bytes of those that are no result: shuffles, tables between steps."""
    steps: dict[str, dict[str, float]] = field(default_factory=dict)
    """Step -> items, CPU seconds, peak MB of the process, read calls and MB read."""

    def listen(self) -> None:
        """Count files opened from now on, to the end of the process."""

        def heard(event: str, given: tuple[Any, ...]) -> None:
            self.opened += event == "open"
            if event == "os.rename":
                size = os.stat(given[0]).st_size
                self.written += 1
                self.written_bytes += size
                self.between_bytes += (
                    size if "/work/" in str(given[1]) and "/work/documents/" not in str(given[1]) else 0
                )

        sys.addaudithook(heard)

    @contextmanager
    def step(self, name: str, items: int = 0) -> Iterator[None]:
        """Add to step `name` what the block costs."""
        _forget_peak()
        cpu, before = cpu_seconds(), _io()
        yield
        after, line = _io(), self.steps.setdefault(name, {"items": 0, "cpu_s": 0, "peak_mb": 0, "reads": 0, "mb": 0})
        line["items"] += items
        line["cpu_s"] = round(line["cpu_s"] + cpu_seconds() - cpu, 4)
        line["peak_mb"] = max(line["peak_mb"], round(peak_rss() / 1e6, 1))
        line["reads"] += after["syscr"] - before["syscr"]
        line["mb"] = round(line["mb"] + (after["rchar"] - before["rchar"]) / 1e6, 1)

    def runner(self, job: Any, step: str, work: Any, items: Sequence[int]) -> None:
        """Do the items here, one after another."""
        with self.step(re.sub(r"/\d+-\d+/", "/", step), len(items)):  # a shuffle's folder has its size
            run_serial(job, step, work, items)


def _forget_peak() -> None:
    """Let the peak of this process' memory begin again, where the system can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _io() -> dict[str, int]:
    """Return the counters of this process' input and output: of reads `syscr` (calls) and `rchar` (bytes)."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return {"syscr": 0, "rchar": 0}
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def work(source: Path, folder: Path, scaled: bool = True) -> dict[str, Any]:
    """Collect, annotate and curate the corpus `source` in `folder`, in this process. Returns costs and counts.

    Without `scaled` with the engine's own sizes of work items, and 1 GiB for DuckDB.
    """
    from herd.llama3.data.annotate import annotate
    from herd.llama3.data.collect import collect
    from herd.llama3.data.curate import curate

    global _counts
    if _counts is None:  # this process repeats
        _counts = Counts()
        _counts.listen()
    if scaled:
        scale_down()
    counts, before = _counts, replace(_counts)
    counts.steps = {}
    recipe = corpus_recipe(str(source))
    runner: Runner = counts.runner
    collected, annotated, curated, scratch = (folder / name for name in ("collected", "annotated", "curated", "work"))
    for place in (collected, annotated, curated, scratch):
        place.mkdir()
    marks = [cpu_seconds()]
    collect(recipe, collected, runner)
    marks.append(cpu_seconds())
    memory = MEMORY if scaled else WHOLE_MEMORY
    annotate(recipe, collected, annotated, runner, memory=memory)
    marks.append(cpu_seconds())
    facts = curate(recipe, collected, annotated, curated, scratch, runner, memory=memory)
    marks.append(cpu_seconds())
    stages = ("collect_cpu_s", "annotate_cpu_s", "curate_cpu_s")
    return {
        "documents": sum(facts["documents"].values()),
        **{name: round(stop - start, 3) for name, start, stop in zip(stages, marks, marks[1:], strict=False)},
        "items": sum(int(line["items"]) for line in counts.steps.values()),
        "written": counts.written - before.written,
        "written_mb": round((counts.written_bytes - before.written_bytes) / 1e6, 1),
        "shuffled_mb": round((counts.between_bytes - before.between_bytes) / 1e6, 2),
        "opened": counts.opened - before.opened,
        "reads": sum(int(line["reads"]) for line in counts.steps.values()),
        "read_mb": round(sum(line["mb"] for line in counts.steps.values()), 1),
        "peak_mb": max(line["peak_mb"] for line in counts.steps.values()),
        "steps": counts.steps,
    }


_counts: Counts | None = None


def corpus_recipe(corpus: str) -> Any:
    """Return the recipe of the default rules over `corpus`, and its questions to decontaminate from."""
    questions = {"name": "questions", "uri": f"{corpus}/questions.jsonl", "fields": ["question"]}
    return bench_recipe({"general": [f"{corpus}/text/*.jsonl"]}, {"decontaminate": [questions]}, seq_len=1024)


# `herd data` as a user starts it, with small work items, and with a worker that is killed once.


@dataclass(frozen=True)
class Killed:
    """Work on small items; the process that comes first to `item` is killed there.

    By the system in the middle of its first write to a file (SIGXFSZ), or by SIGKILL where it writes to none in time.
    """

    work: Any
    item: int = -1
    marker: Path = Path()
    """Exists once the process was killed."""

    def __call__(self, job: Any, item: int) -> None:
        scale_down()
        victim = item == self.item and not self.marker.exists()
        if victim:
            self.marker.touch()
            threading.Timer(KILL_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
            ctypes.CDLL(None).signal(signal.SIGXFSZ, 0)  # the default; Python lets only its main thread set it
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (KILL_BYTES, KILL_BYTES))
        self.work(job, item)
        if victim:
            time.sleep(60)


def main(kill: str, marker: str, *words: str) -> None:
    """Run `herd words...` with small work items.

    The steps that have more than one item are counted from 1; in the one numbered `kill`, the last item but one ends
    its process unless the file `marker` exists.
    """
    from herd.flows.cli.main import main as herd

    stages, steps = import_module("herd.tasks.stages.data"), count(1)
    usual = stages.data_runner

    @contextmanager
    def watched(cluster: Any) -> Iterator[Runner]:
        with usual(cluster) as runner:

            def run(job: Any, step: str, work: Any, items: Sequence[int]) -> None:
                victim = -1
                if len(items) > 1 and next(steps) == int(kill):
                    victim = items[-2]
                runner(job, step, Killed(work, victim, Path(marker)), items)

            yield run

    setattr(stages, "data_runner", watched)  # noqa: B010
    scale_down()
    sys.argv = ["herd", *words]
    herd()


KILL_S, KILL_BYTES = 1.0, 100
"""Longest time to the end of the victim, and the bytes that it can still write to a file."""
KILL_IN = 3
"""Number of the step with several items in which a worker is killed: the first two read and measure documents."""


@dataclass(frozen=True)
class Place:
    """Where `herd data` runs."""

    data: str = "threads"
    workers: int = 1
    bucket: bool = False
    killed: bool = False


def herd_data(folder: Path, corpus: str, root: str, place: Place) -> dict[str, str]:
    """Run `herd data` over `corpus` with the root `root`; return the SHA-256 of each file of the curated artifact.

    Raises RuntimeError with the last line that it printed if it fails, or if no process was killed that should be.
    """
    folder.mkdir(parents=True)
    recipe, cluster, marker = folder / "recipe.yaml", folder / "cluster.yaml", folder / "killed"
    plain = {**resolved(corpus_recipe(corpus)), "model": {"preset": "3m"}}
    plain["tokenizer"] = {"train": {"vocab": 600, "sample": "1MB"}}
    recipe.write_text(yaml.safe_dump(plain))
    threads = {"threads": place.workers} if place.data == "threads" else {"data_workers": place.workers, "threads": 1}
    cluster.write_text(yaml.safe_dump({"data": place.data, "memory": MEMORY, **threads}))
    kill = str(KILL_IN if place.killed else 0)
    command = [sys.executable, "-m", "benchmarks.curation_scale", kill, str(marker)]
    command += ["data", str(recipe), "--root", root, "--cluster", str(cluster)]
    environment = {
        **os.environ,
        "HERD_SCRATCH": str(folder / "scratch"),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_LOGGING_LEVEL": "ERROR",
        "RAY_worker_niceness": "0",  # 15 otherwise: its workers would wait for everything else on the machine
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    for _ in range(2):  # threads end with the process; the same command continues
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode == 0 or not marker.exists():
            break
    said = (done.stdout + done.stderr).strip().splitlines() or ["nothing was printed"]
    (folder / "herd.log").write_text("\n".join(said))
    if done.returncode:
        raise RuntimeError(said[-1])
    if marker.exists() != place.killed:
        raise RuntimeError("no worker was killed")
    at = Root.parse(root, str(folder / "scratch"))
    artifact = open_store(at).load(Runs(at).find("bench-1").steps["curate"].artifact)
    return {name: entry.sha256 for name, entry in artifact.manifest.files.items()}


def same_bytes(place: Place) -> Callable[[Session, str], Row]:
    """Return the measure of the curated files that differ from those of one worker on a disk."""

    def measure(run: Session, name: str) -> Row:
        folder = run.settings.folder / "scale"
        corpus = str(_small_corpus(run))
        usual = run.once(
            "scale/usual", lambda: herd_data(folder / "usual", corpus, str(folder / "usual" / "root"), Place())
        )
        own = folder / name.rpartition("/")[2]
        root = f"{_store(run)}/{own.name}" if place.bucket else str(own / "root")
        files = herd_data(own, corpus, root, place)
        differ = [file for file in usual.keys() | files.keys() if usual.get(file) != files.get(file)]
        note = f"{len(usual)} files; {place.workers} workers" + (", one killed" if place.killed else "")
        return measured(name, len(differ), note, differ=sorted(differ)[:5])

    return measure


def _small_corpus(run: Session) -> Path:
    def make() -> Path:
        folder = run.settings.folder / "scale" / "small"
        write_corpus(folder, [normalize(text) for text in read_texts(run.settings.corpus)], SMALLEST["small"])
        return folder

    made: Path = run.once("scale/small", make)
    return made


def _store(run: Session) -> str:
    """Return a prefix in an object store that lives as long as the session."""
    folder = run.settings.folder / "scale"
    folder.mkdir(exist_ok=True)
    uri: str = run.once("store", lambda: run.closing.enter_context(object_store(folder, "", "herd-bench")))
    return uri


# Requests at the object store.

BOOKKEEPING = ("", ".format", ".newest", "leases", "mlflow-artifacts", "open", "promotions", "reachable", "runs")
"""Folders of a root for records of runs, and the root itself."""
METHODS = ("GET", "HEAD", "LIST", "PUT", "POST", "DELETE")
REQUEST = re.compile(r'"(GET|HEAD|PUT|POST|DELETE) (/\S*) HTTP')


def requests_of(log: str, prefix: str) -> dict[str, dict[str, int]]:
    """Return the requests in a log of moto below `prefix` (a URI): folder of the root -> method -> requests."""
    path = prefix.removeprefix("s3:/") + "/"
    found: dict[str, dict[str, int]] = {}
    for method, address in REQUEST.findall(log):
        where, _, query = unquote(address).partition("?")
        if listed := re.search(r"(?:^|&)prefix=([^&]*)", query):
            where, method = f"{where.rstrip('/')}/{listed[1]}", "LIST"
        if where.startswith(path):
            line = found.setdefault(where.removeprefix(path).split("/")[0], dict.fromkeys(METHODS, 0))
            line[method] += 1
    return found


@dataclass(frozen=True)
class Stored:
    """One corpus in a bucket, and what its curation asked of the store."""

    bytes: int
    files: int
    requests: dict[str, dict[str, int]]
    objects: int

    @property
    def total(self) -> int:
        """Requests for sources, artifacts and work; those of BOOKKEEPING go with steps and with time."""
        return sum(sum(line.values()) for folder, line in self.requests.items() if folder not in BOOKKEEPING)


def stored_sizes(run: Session) -> list[Stored]:
    """Return the four corpora, each read from a bucket and curated with its root there."""

    def measure() -> list[Stored]:
        return [_curated(run, f"x{growth}", growth * SMALLEST["small"])[1] for growth in GROWTH]

    found: list[Stored] = run.once("scale/stored", measure)
    return found


def _curated(run: Session, name: str, size: int, fan: int | None = None) -> tuple[str, Stored]:
    """Return the URI of a corpus of about `size` bytes in a bucket, and what its curation asked."""
    texts, place, uri = read_texts(run.settings.corpus), run.settings.folder / "scale", f"{_store(run)}/{name}"
    local, log = place / f"stored-{name}", place / "moto.log"
    size = write_corpus(local, [normalize(text) for text in texts], size)
    paths = [path for path in sorted(local.rglob("*")) if path.is_file()]
    for path in paths:
        put_bytes(f"{uri}/corpus/{path.relative_to(local)}", path.read_bytes())
    before = log.stat().st_size
    command = [sys.executable, "-c", f"from {__name__} import curate_in_store as work; work({uri!r}, {fan})"]
    subprocess.run(command, check=True, cwd=ROOT)
    with log.open() as lines:
        lines.seek(before)
        asked = requests_of(lines.read(), uri)
    return uri, Stored(size, len(paths) - 1, asked, len(filesystem_of(uri).find(uri)))


def curate_in_store(uri: str, fan: int | None = None) -> None:
    """Curate `uri`/corpus by small work items with all their files below `uri`, as workers of a cluster do."""
    from herd.llama3.data.annotate import annotate
    from herd.llama3.data.collect import collect
    from herd.llama3.data.curate import curate

    scale_down()
    recipe = corpus_recipe(f"{uri}/corpus")
    with tempfile.TemporaryDirectory() as folder:
        collect(recipe, f"{uri}/collected")
        annotate(recipe, f"{uri}/collected", f"{uri}/annotated", run_serial)
        curate(recipe, f"{uri}/collected", f"{uri}/annotated", Path(folder), f"{uri}/work", memory=MEMORY, fan=fan)


COUNTED_FAN = 4
"""Of the corpora for which the count is checked, so that their few shards are merged as those of terabytes."""


def print_count(corpus: str, size: float | None, scaled: bool, documents: int, **given: int) -> None:
    """Print as JSON what `herd data --count` counts for `corpus`."""
    from herd.llama3.data.count import count_requests

    if scaled:
        scale_down()
    with tempfile.TemporaryDirectory() as folder:
        count = count_requests(corpus_recipe(corpus), Path(folder), size=size, documents=documents, **given)
    print(json.dumps({**vars(count.total), "usd": count.total.usd, "shards": count.amounts.shards}))


def count_of(corpus: str, size: float | None, scaled: bool, documents: int = 1000, **given: int) -> dict[str, float]:
    """Return what another process counts for `corpus`."""
    words = f"{corpus!r}, {size}, {scaled}, {documents}, **{given}"
    command = [sys.executable, "-c", f"from {__name__} import print_count as work; work({words})"]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def counted(size: int) -> Callable[[Session, str], Row]:
    """Return the measure of how far the count of a corpus of `size` bytes is from the requests of curating it.

    The rounds of MinHash are those that curation needed: without them the count takes the most.
    """

    def measure(run: Session, name: str) -> Row:
        uri, stored = _curated(run, f"count-{size}", size, COUNTED_FAN)
        flags = [name.split("/") for name in list_objects(f"{uri}/work/minhash")]
        rounds = len({flag[0] for flag in flags if flag[1] == "open"})
        stars = len({flag[0] for flag in flags if flag[1] == "changed"})
        count = count_of(f"{uri}/corpus", None, True, size // 40_000, fan=COUNTED_FAN, rounds=rounds, stars=stars)
        lines = [line for folder, line in stored.requests.items() if folder not in BOOKKEEPING]
        reads, writes = (
            sum(line[method] for line in lines for method in methods)
            for methods in (("GET", "HEAD"), ("PUT", "POST", "LIST"))
        )
        off = max(abs(count["reads"] / reads - 1), abs(count["writes"] / writes - 1))
        note = f"{reads:,} GET and HEAD, counted {count['reads']:,.0f}; {writes:,} PUT, POST and LIST, counted "
        return measured(name, off, f"{note}{count['writes']:,.0f}", requests=stored.requests, count=count)

    return measure


def stored_lines(sizes: Sequence[Stored]) -> list[dict[str, Any]]:
    """Return what is measured of each corpus in a bucket, JSON-ready."""
    return [
        {"mb": round(size.bytes / 1e6, 1), "files": size.files, "objects": size.objects, "requests": size.requests}
        for size in sizes
    ]


def requests(run: Session, name: str) -> Row:
    """Requests of collect, annotate and curate to the store that has all their files, as a power of the bytes."""
    sizes = stored_sizes(run)
    note = (
        f"{', '.join(f'{size.total:,}' for size in sizes)} requests for {', '.join(str(size.files) for size in sizes)}"
    )
    power = exponent([size.bytes for size in sizes], [size.total for size in sizes])
    return measured(name, power, note, sizes=stored_lines(sizes))


# The rows.


@dataclass(frozen=True)
class Size:
    """One corpus, and what it cost."""

    bytes: int
    files: int
    cost: Cost


def sizes_of(run: Session) -> list[Size]:
    """Return the four corpora with their costs, made and measured when a row first asks."""

    def measure() -> list[Size]:
        given = run.settings
        texts = [normalize(text) for text in read_texts(given.corpus)]
        sizes = []
        warm_up = given.folder / "scale" / "warm-up"
        write_corpus(warm_up, [MOJIBAKE * 60, *texts], 2 * FILE_BYTES)
        run.bench.cost("curation_scale", warm_up, warm_up)  # what numba compiles is on disk from here on
        for growth in GROWTH:
            folder = given.folder / "scale" / f"x{growth}"
            size = write_corpus(folder, texts, growth * SMALLEST[given.size])
            cost = run.bench.cost("curation_scale", folder, warm_up)
            sizes.append(Size(size, len(os.listdir(folder / "text")), cost))
        return sizes

    found: list[Size] = run.once("scale", measure)
    return found


def whole_items(run: Session) -> Cost:
    """Return the cost of the largest corpus with the engine's own sizes of work items."""
    largest, folder = sizes_of(run)[-1], run.settings.folder / "scale"

    def measure() -> Cost:
        source = (folder / f"x{GROWTH[-1]}").rename(folder / f"whole-x{largest.files}")  # costs lie in folders by name
        return run.bench.cost("curation_scale", source, folder / "warm-up", scaled=False)

    found: Cost = run.once("scale/whole", measure)
    return found


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return k of value = c * size^k, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def grows(fact: str) -> Callable[[Session, str], Row]:
    """Return the measure of how `fact` grows with the bytes of the corpus, as an exponent."""

    def measure(run: Session, name: str) -> Row:
        sizes = sizes_of(run)
        values = [float(size.cost.facts[fact]) for size in sizes]
        note = f"{fact} " + ", ".join(f"{value:,.0f}" for value in values)
        note += " at " + ", ".join(f"{size.bytes / 1e6:,.0f}" for size in sizes)
        note += f" MB in {', '.join(str(size.files) for size in sizes)} files"
        return measured(name, exponent([size.bytes for size in sizes], values), note, sizes=size_lines(sizes))

    return measure


def cpu(run: Session, name: str) -> Row:
    """CPU time of curation for each second of collecting and annotating the same text, as a power of the bytes, plus 1.

    The two others do one document after another. Beside them in one process, because a short process is faster on a
    shared core than a long one.
    """
    sizes = sizes_of(run)
    facts = [size.cost.facts for size in sizes]
    values = [fact["curate_cpu_s"] / (fact["collect_cpu_s"] + fact["annotate_cpu_s"]) for fact in facts]
    note = f"{', '.join(f'{value:.2f}' for value in values)} s a second; "
    note += f"{', '.join(f'{size.cost.cpu_s:,.0f}' for size in sizes)} CPU s in all"
    power = 1 + exponent([size.bytes for size in sizes], values)
    return measured(name, power, note, sizes=size_lines(sizes))


def memory(run: Session, name: str) -> Row:
    """Peak memory of the process with the largest corpus over that with the second smallest."""
    sizes = sizes_of(run)
    peaks = [size.cost.facts["peak_mb"] for size in sizes]
    return measured(name, peaks[-1] / peaks[1], f"{', '.join(f'{peak:,.0f}' for peak in peaks)} MB", peaks=peaks)


def size_lines(sizes: Sequence[Size]) -> list[dict[str, Any]]:
    """Return what is measured of each corpus, JSON-ready."""
    return [
        {"mb": round(size.bytes / 1e6, 1), "files": size.files, "cpu_s": round(size.cost.cpu_s, 3), **size.cost.facts}
        for size in sizes
    ]


if __name__ == "__main__":
    import_module("benchmarks.curation_scale").main(*sys.argv[1:])  # classes of __main__ are not those of the workers
