"""Count what curation of a corpus asks of an object store, without doing it.

A sample of the corpus is collected, annotated and curated in a folder that counts requests (`storage/counted.py`). Then
the same passes run over the shards of the whole corpus with a runner that does nothing but count: the plan is that of
the code, and what an item reads and writes is that of the sample, as many times larger as the item has documents.

Not in it: what trained models (`scores`, `topics`) cost, requests that are repeated, and bookkeeping of runs. The
rounds of MinHash follow from the documents; without being told it counts the most.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute as pc

from herd.llama3.data import collect as collecting
from herd.llama3.data import write_shards
from herd.llama3.data.annotate import annotate, annotate_shards, list_shards
from herd.llama3.data.curate import CURATION, partitions_for, sample_sources, write_curated
from herd.llama3.data.dedup.minhash import CLOSING_ROUNDS, ROUNDS
from herd.llama3.data.mapreduce import DONE, CurationJob, Shard, aggregate_files, do_partition, do_shard
from herd.llama3.data.shuffle import FAN, Shuffle, copy_indexes, merge_files, rows_in
from herd.llama3.data.work_items import BLOCK as ITEM_BLOCK
from herd.llama3.data.work_items import Work, read_table, run_serial, write_table
from herd.llama3.data.write_shards import COUNTS, ITEM_BITS
from herd.llama3.recipe.schema import Recipe
from herd.storage.counted import StoreRequest
from herd.storage.files import BLOCK, file_names
from herd.storage.filesystem import filesystem_of
from herd.storage.s3 import PART

USD_PER_WRITE, USD_PER_READ = 0.005e-3, 0.0004e-3
"""S3 Standard, us-east-1, mid 2025: a PUT, POST or LIST; a GET or HEAD. DELETE is free."""
STARS = 6
"""Rounds that join components, if it is not told: they double with each the length of the paths that they join."""
TEXT_PER_BYTE = {".gz": 3.0, ".zst": 3.5, ".bz2": 4.0, ".xz": 4.0, ".parquet": 2.5}
"""Bytes of text for each byte of a compressed file, as is usual for English."""
_DIMENSIONS = re.compile(r"/\d+-\d+/")
_SHUFFLE = re.compile(r"shuffle/(.+?)/\d+-(\d+)/(\d+)(/indexes)?/\d+\.parquet$")


@dataclass
class Counted:
    """What steps do."""

    tasks: float = 0
    files: float = 0
    """Written."""
    reads: float = 0
    """GET and HEAD."""
    writes: float = 0
    """PUT, POST and LIST."""
    read_bytes: float = 0
    written_bytes: float = 0

    def __add__(self, other: Counted) -> Counted:
        return Counted(*(left + right for left, right in zip(vars(self).values(), vars(other).values(), strict=True)))

    def times(self, count: float) -> Counted:
        """Return the sum of `count` of these."""
        return Counted(*(value * count for value in vars(self).values()))

    @property
    def usd(self) -> float:
        """Price of the requests."""
        return self.reads * USD_PER_READ + self.writes * USD_PER_WRITE


def written(size: float) -> Counted:
    """Return what writing a file of `size` bytes takes: with the HEAD that checks it."""
    puts = 1 if size < 2 * PART else 2 + math.ceil(size / PART)
    return Counted(files=1, reads=1, writes=puts, written_bytes=size)


def opened(size: float, block: int = BLOCK) -> Counted:
    """Return what reading a Parquet file takes: a HEAD for its size, and its blocks."""
    return Counted(reads=1 + max(1, math.ceil(size / block)), read_bytes=size)


class Amounts(NamedTuple):
    """Of a corpus or of a sample."""

    documents: float
    shards: int
    partitions: int


@dataclass
class CountedSample:
    """What every step of a curated sample asked of the store."""

    folder: Path
    recipe: Recipe
    steps: dict[str, list[StoreRequest]] = field(default_factory=dict)
    items: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    """Of each shuffle."""
    grows: set[str] = field(default_factory=set)
    """Files that shards or partitions write, larger the more documents they have."""
    sizes: dict[str, int] = field(default_factory=dict)
    amounts: Amounts = field(default_factory=lambda: Amounts(0, 1, 1))
    text: dict[str, int] = field(default_factory=dict)
    """Bytes by domain."""
    driver: list[StoreRequest] = field(default_factory=list)
    """What no item asked."""

    def take(self, documents: int) -> None:
        """Curate up to `documents` documents of each source."""
        base = f"counted://{self.folder}"
        requests = filesystem_of(base).requests
        sampled, _ = sample_sources(self.recipe, documents, self.folder)
        sources = {
            domain: [source.model_copy(update={"uri": f"counted://{source.uri}"}) for source in listed]
            for domain, listed in sampled.sources.items()
        }
        sampled = sampled.model_copy(update={"sources": sources})
        seen = len(requests)

        def runner(job: Any, step: str, work: Work, items: Sequence[int]) -> None:
            nonlocal seen
            self.driver += requests[seen:]
            start = len(requests)
            run_serial(job, step, work, items)
            name = _DIMENSIONS.sub("/", step)
            self.steps[name], self.items[name] = requests[start:], len(items)
            seen = len(requests)
            each = _function(work) in (do_shard, do_partition) or name == collecting.STEP
            for request in self.steps[name]:
                if request.method == "PUT":
                    self.sizes[request.path] = request.bytes
                    self.grows |= {request.path} if each else set()
                    if (match := _SHUFFLE.search(request.path)) and not match[4]:
                        self.rows[match[1]] = self.rows.get(match[1], 0) + rows_in(request.path, int(match[2]))

        collecting.collect(sampled, f"{base}/collected", runner)
        annotate(sampled, f"{base}/collected", f"{base}/annotated", runner)
        shards = list_shards(f"{base}/collected", f"{base}/annotated")
        job = CurationJob(sampled, shards, f"{base}/scratch", stages=CURATION)
        for stage in job.stages:
            stage.run(runner, job)
        write_curated(runner, job, f"{base}/collected/skipped.parquet", self.folder / "curated")
        self.driver += requests[seen:]
        for shard in shards:
            self.text[shard.domain] = self.text.get(shard.domain, 0) + shard.bytes
        self.amounts = Amounts(sum(shard.documents for shard in shards), len(shards), 1)

    def requests_of(self, name: str) -> tuple[list[StoreRequest], int]:
        """Return the requests of a step and its items; of a round that the sample did not need, those of its last."""
        if name not in self.steps and (match := re.search(r"minhash/(stars-)?(\d\d)/", name)):
            before, after = name[: match.start(2)], name[match.end(2) :]
            rounds = [known for known in self.steps if known.startswith(before) and known.endswith(after)]
            name = max((known for known in rounds if len(known) == len(name)), default=name)
        return self.steps.get(name, []), self.items.get(name, 1)


@dataclass(frozen=True)
class CountedJob(CurationJob):
    """The job of a whole corpus, whose results are those of a sample in the folder `sample`."""

    sample: str = ""
    rounds: int = ROUNDS + CLOSING_ROUNDS
    stars: int = STARS

    def by_partition(self, step: str) -> str:
        return f"{step}/1"

    def file(self, step: str, item: int) -> str:
        step = re.sub(r"/sums/\d+$", "/sums/0", step)
        return f"{self.sample}/{step}/{item:05}.parquet"

    def files(self, step: str) -> list[str]:
        if step.endswith(f"/{DONE}") or step == COUNTS:
            return []
        if match := re.fullmatch(r"minhash/(\d+)/open/1", step):
            return [step] if int(match[1]) < self.rounds else []
        if match := re.fullmatch(r"minhash/stars-(\d+)/changed/1", step):
            return [step] if int(match[1]) < self.stars else []
        return [f"{self.sample}/{step}/{name}" for name in file_names(f"{self.sample}/{step}")]


@dataclass
class Count:
    """The counts of a corpus by step; the runner of its passes."""

    sample: CountedSample
    amounts: Amounts
    pieces: int
    steps: dict[str, Counted] = field(default_factory=lambda: defaultdict(Counted))
    """By name: "collect", "annotate", the stages, "output", "ledger", "driver"."""
    _shuffles: dict[str, Shuffle] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)

    def runner(self, job: Any, step: str, work: Work, items: Sequence[int]) -> None:
        """Count the items of a step."""
        if step in self._done:
            return
        self._done.add(step)
        name = _DIMENSIONS.sub("/", step)
        place = name.removeprefix("shuffle/").split("/")[0]
        place = {"attributes": "annotate", "divergence": "annotate", "items": "collect", "drops": "ledger"}.get(
            place, place
        )
        function = _function(work)
        given: tuple[Any, ...] = getattr(work, "args", ())
        if function in (merge_files, copy_indexes):
            shuffle, level = given
            self._shuffles[shuffle.name] = shuffle
            count = self._merged if function is merge_files else self._indexed
            counted = count(shuffle, level, len(items))
        elif function is aggregate_files:
            source, sources, *_ = given
            sizes = [self.sample.sizes.get(path, 0) for path in self._files_of(source)]
            size = self._grown(sum(sizes) / max(1, len(sizes)))
            counted = opened(size).times(sources) + written(size).times(len(items))
        else:
            each, own = self.amounts, self.sample.amounts
            if function is do_shard or name == collecting.STEP:
                factor = each.documents / len(items) / own.documents
            elif function is do_partition:
                factor = each.documents / each.partitions / own.documents
            else:
                factor = 1.0 / max(1, self.sample.requests_of(name)[1])
            counted = self._item(name, factor).times(len(items))
        counted.tasks = len(items)
        self.steps[place] += counted + Counted(writes=2)  # LIST what is done

    def _grown(self, size: float) -> float:
        own, sample = self.amounts, self.sample.amounts
        return size * own.documents / own.shards * sample.shards / sample.documents

    def _files_of(self, step: str) -> list[str]:
        return [path for path in self.sample.sizes if re.search(rf"/{re.escape(step)}/\d+\.parquet$", path)]

    def _item(self, name: str, factor: float) -> Counted:
        """Return what an item of a step takes that has `factor` times the documents of the sample."""
        requests, items = self.sample.requests_of(name)
        total, read, shuffles = Counted(), dict[str, list[StoreRequest]](), set[str]()
        for request in requests:
            shuffled = _SHUFFLE.search(request.path)
            if request.method == "PUT":
                grows = factor * items if request.path in self.sample.grows else 1.0
                total += written(request.bytes * grows).times(1 / items)
            elif request.method == "LIST":
                total += Counted(writes=1 / items)
            elif request.method == "GET" and shuffled:
                shuffles.add(shuffled[1])
            elif request.method == "GET":
                read.setdefault(request.path, []).append(request)
        for path, each in read.items():
            size = self.sample.sizes.get(path) or max(request.bytes for request in each)
            grows = path in self.sample.grows or "/sample/" in path
            opens = len(each) if self.pieces == 1 else 1  # a file of the sample has one block
            block = ITEM_BLOCK if self.pieces > 1 and "/sample/" not in path else BLOCK
            total += opened(size * (factor * items if grows else 1), block).times(opens / items)
        for shuffle in filter(None, map(self._shuffles.get, shuffles)):
            last = shuffle.levels - 1
            share = self._nonempty(shuffle, last)
            total += Counted(
                reads=1 + share * shuffle.files_read(last), read_bytes=self._bytes(shuffle) / shuffle.partitions
            )
        return total

    def _bytes(self, shuffle: Shuffle) -> float:
        """Return the bytes of a level of a shuffle."""
        name = self._known(shuffle)
        pattern = re.compile(rf"/shuffle/{re.escape(name)}/\d+-\d+/0/\d+\.parquet$")
        size = sum(size for path, size in self.sample.sizes.items() if pattern.search(path))
        return size * self.amounts.documents / self.sample.amounts.documents

    def _known(self, shuffle: Shuffle) -> str:
        """Return the name of the shuffle in the sample."""
        if shuffle.name in self.sample.rows:
            return shuffle.name
        pattern = re.compile(re.sub(r"\d\d", r"\\d\\d", re.escape(shuffle.name)))
        return max((name for name in self.sample.rows if pattern.fullmatch(name)), default=shuffle.name)

    def _nonempty(self, shuffle: Shuffle, level: int) -> float:
        """Return the share of the ranges of `level` that have rows, where rows fall at random."""
        rows = (self.sample.rows.get(self._known(shuffle), 0) + 1) * self.amounts.documents
        return -math.expm1(-rows / self.sample.amounts.documents / shuffle.ranges_read(level))

    def _merged(self, shuffle: Shuffle, level: int, items: int) -> Counted:
        size = self._bytes(shuffle)
        ranges = shuffle.ranges_read(level - 1) * self._nonempty(shuffle, level - 1)
        return written(size / items).times(items) + Counted(reads=items + ranges, read_bytes=size)

    def _indexed(self, shuffle: Shuffle, level: int, items: int) -> Counted:
        files = shuffle.files_written(level)
        size = 16.0 * shuffle.ranges_read(level)
        return written(size / items).times(items) + Counted(reads=files + items, read_bytes=size)

    def add_driver(self) -> None:
        """Add what no item asks: of the files of shards as many times as there are shards."""
        shards = self.amounts.shards / self.sample.amounts.shards
        for request in self.sample.driver:
            step = _DIMENSIONS.sub("/", request.path.removeprefix(f"{self.sample.folder}/").partition("/")[2])
            if request.method == "LIST" and step in self.sample.steps:
                continue  # counted with each step
            times = shards if request.path in self.sample.grows and request.method != "PUT" else 1.0
            reading = request.method in ("GET", "HEAD")
            self.steps["driver"] += Counted(reads=float(reading), writes=float(not reading)).times(times)

    @property
    def total(self) -> Counted:
        """The sum of all steps."""
        return sum(self.steps.values(), Counted())


def count_requests(
    recipe: Recipe,
    folder: Path,
    *,
    size: float | None = None,
    workers: int = 1,
    documents: int = 1000,
    fan: int = FAN,
    rounds: int = ROUNDS + CLOSING_ROUNDS,
    stars: int = STARS,
) -> Count:
    """Return what `collect`, `annotate` and `curate` of the sources of `recipe` ask of a store that has all files.

    `size`: bytes of files to count for, of the same kinds as the sources and as large or of 64 MB; without, those that
    they have now.
    `documents` of each source are a sample, which is curated in the empty `folder`. `rounds` and `stars` are the rounds
    of MinHash that compare documents and that join components. Raises ValueError as `collect` does.
    """
    sample = CountedSample(folder, recipe)
    sample.take(documents)
    plan = collecting.plan_job(recipe, str(folder), workers)
    listed = sum(file.size for item in plan.items for file in item.files)
    more = 1.0 if size is None or not listed else size / listed
    item_bytes = collecting.bytes_of_item(int(listed * more), workers)
    items = len(plan.items) if more == 1 else math.ceil(listed * more / item_bytes)
    files = sum(len(item.files) for item in plan.items)
    if size is not None:
        files = math.ceil(size / max(listed / max(files, 1), collecting.ITEM_BYTES))
    text = _text_of(plan, sample) * more
    own = list_shards(f"{folder}/collected", f"{folder}/annotated")
    piece = write_shards.SHARD_BYTES
    most = max(1, item_bytes // piece)
    shards = max(len(own), items * math.ceil(text / items / (most * piece)))
    pieces = max(1, min(most, math.ceil(text / shards / piece)))
    total = text / sum(sample.text.values()) * sample.amounts.documents
    partitions, partition_pieces = partitions_for(int(total), shards)
    count = Count(sample, Amounts(total, shards, partitions), pieces)
    scratch = folder / "scratch"
    (nothing := folder / "nothing").mkdir()
    job = CountedJob(
        sample.recipe, tuple(_shards(own, shards, pieces)), str(nothing), partitions, stages=CURATION, fan=fan,
        pieces=partition_pieces, sample=str(scratch), rounds=rounds, stars=stars,
    )  # fmt: skip
    count.runner(job, collecting.STEP, collecting.collect_item, range(items))
    count.steps["collect"] += Counted(reads=2 * max(0, files - items), writes=math.ceil(files / 1000))
    annotate_shards(count.runner, replace(job, sample=f"{folder}/annotated"))
    for stage in job.stages:
        stage.run(count.runner, job)
    for path in (scratch / "survivors").rglob("sums/0/*.parquet"):  # the number of output files follows from them
        table = read_table(str(path))
        for name in ("documents", "bytes"):
            scaled = pc.multiply(table[name], int(max(1, text / sum(sample.text.values()))))
            table = table.set_column(table.column_names.index(name), name, scaled)
        write_table(table, path)
    write_curated(count.runner, job, f"{folder}/collected/skipped.parquet", nothing)
    count.add_driver()
    return count


def _function(work: Any) -> Any:
    """Return the function that a runner gets with its first arguments."""
    return getattr(work, "func", work)


def _text_of(plan: collecting.CollectJob, sample: CountedSample) -> float:
    """Return the bytes of text that the files of the sources have, estimated."""
    total = 0.0
    raw = sum(path.stat().st_size for path in (sample.folder / "sample").iterdir())
    plain = sum(sample.text.values()) / max(1, raw)
    for item in plan.items:
        for file in item.files:
            total += file.size * TEXT_PER_BYTE.get(Path(file.uri).suffix, plain)
    return total or float(sum(sample.text.values()))


def _shards(own: Sequence[Shard], shards: int, pieces: int) -> Iterable[Shard]:
    """Yield the shards of the sample, whose documents are read, then others like them up to `shards`."""
    yield from own
    first = (own[-1].number >> ITEM_BITS) + 1
    for number in range(shards - len(own)):
        like = own[number % len(own)]
        yield replace(like, number=(first + number) << ITEM_BITS, documents=0, bytes=0, pieces=pieces)
