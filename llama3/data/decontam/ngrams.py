"""Examples of evaluation sets as word 8-grams: the index that decontamination scans documents for.

Words, not tokens as in arXiv 2407.21783, section 5.1.4: curation runs before there is a tokenizer. An example of
several fields is compared as a whole and field by field, because pages often contain a question without its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from herd.llama3.data.kernels.arrow import Hashes, Offsets, hash_lists, list_buffers, text_buffers
from herd.llama3.data.kernels.ngrams import NgramIndex, gram_endings, key_table, text_grams
from herd.llama3.data.mapreduce import CurationJob
from herd.llama3.data.readers.files import file_format
from herd.llama3.data.text.words import BARE_WORD
from herd.llama3.data.work_items import read_table, write_table
from herd.llama3.recipe.data_schema import Benchmark
from herd.llama3.recipe.units import Share
from herd.storage.filesystem import filesystem_of, glob, is_local, local_path

STEP = "contaminated/benchmarks"
GRAM = 8
"""Words per n-gram. A shorter example is one gram of all its words; it is counted but never drops a document."""
TEMPLATE_LEAST, TEMPLATE_MOST, TEMPLATE_SHARE = 4, 100, 10
"""A gram is *template* (instructions, answer formats) if more than a tenth of the examples of its set share it (at
least 4, at most 100). Template grams count in the corpus ratio, as in the paper, but not when one document is compared
with one example: a page with a prompt template would match every example."""
NEVER = np.iinfo(np.int32).max
_COMPRESSION = {"gz": "gzip", "zst": "zstd"}
Flags = NDArray[np.bool_]


def check_benchmarks(benchmarks: Sequence[Benchmark]) -> None:
    """Read all examples once. Raises ValueError that names the field, the file and line, and what to write instead."""
    for number, benchmark in enumerate(benchmarks):
        for _ in read_benchmark(number, benchmark):
            pass


def read_benchmark(number: int, benchmark: Benchmark) -> Iterator[list[str]]:
    """Yield the field texts of every example of benchmark `number` of the recipe. Raises ValueError."""
    where = f"curate.decontaminate.{number}"
    files = [(uri, kind) for uri in glob(benchmark.uri) if (kind := file_format(uri)) in ("jsonl", "parquet")]
    if not files:
        raise ValueError(
            f"{where}.uri: {benchmark.uri!r} names no jsonl or parquet file; name one, or a folder of them"
        )
    examples = 0
    for uri, kind in files:
        try:
            for location, record in _records(uri, kind == "parquet"):
                examples += 1
                yield [_field(record, field, f"{where}.fields: {location}") for field in benchmark.fields]
        except (OSError, EOFError, pa.ArrowException, orjson.JSONDecodeError) as error:
            raise ValueError(f"{where}.uri: {uri!r} cannot be read ({error}); repair it or name another") from error
    if not examples:
        raise ValueError(f"{where}.uri: {benchmark.uri!r} holds no example; name another file")


def _records(uri: str, parquet: bool) -> Iterator[tuple[str, Any]]:
    """Yield (file and line, record) of one file."""
    with filesystem_of(uri).open(str(local_path(uri)) if is_local(uri) else uri, "rb") as raw:
        if parquet:
            batches = pq.ParquetFile(raw).iter_batches()
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from ((f"{uri} row {number}", row) for number, row in enumerate(rows))
            return
        compression = _COMPRESSION.get(uri.lower().rsplit(".", 1)[-1])
        data = (pa.input_stream(raw, compression=compression) if compression else raw).read()
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():
                yield f"{uri}:{number}", orjson.loads(line)


def _field(record: Any, field: str, location: str) -> str:
    """Return the text of `field`, or its texts joined."""
    if not isinstance(record, dict):
        raise ValueError(f"{location} holds {type(record).__name__}, not an object; write one object a line")
    if field not in record:
        raise ValueError(f"{location} has no field {field!r}; name one of {', '.join(sorted(record))}")
    value = record[field]
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return " ".join(value)
    if not isinstance(value, str):
        raise ValueError(
            f"{location} holds {type(value).__name__} in {field!r}, not text or a list of texts; name another"
        )
    return value


def write_benchmarks(job: CurationJob, item: int) -> None:
    """Write the n-grams of all examples: each example as a whole, then its fields of at least GRAM words."""
    numbers: list[int] = []
    examples: list[int] = []
    texts: list[str] = []
    example_numbers = count()
    for number, benchmark in enumerate(job.recipe.curate.benchmarks):
        for fields, example in zip(read_benchmark(number, benchmark), example_numbers, strict=False):
            long_fields = [text for text in fields if len(BARE_WORD.findall(text)) >= GRAM] if len(fields) > 1 else []
            variants = ["\n".join(fields), *long_fields]
            numbers += [number] * len(variants)
            examples += [example] * len(variants)
            texts += variants
    column = pa.array(texts, pa.large_string())
    keys, ends, words, last = text_grams(*text_buffers(column), GRAM)
    benchmark_of, example_of = np.array(numbers, np.int32), np.array(examples, np.int64)
    template = _template(keys, np.repeat(np.arange(len(texts)), np.diff(ends)), benchmark_of, example_of)
    flags = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(template))
    columns = {"benchmark": benchmark_of, "example": example_of, "text": column, "words": words, "last": last}
    write_table(pa.table({**columns, "grams": hash_lists(keys, ends), "template": flags}), job.file(STEP, item))


def _template(keys: Hashes, text: Offsets, benchmark_of: NDArray[np.int32], example_of: Offsets) -> Flags:
    """Return for each gram of each text whether it is template: shared by too many examples of its set."""
    flags = np.zeros(len(keys), np.bool_)
    if not len(keys):
        return flags
    sizes = np.bincount(benchmark_of[np.diff(example_of, prepend=-1) != 0])
    limits = np.maximum(TEMPLATE_LEAST, np.minimum(TEMPLATE_MOST, sizes // TEMPLATE_SHARE))
    sets, owner = benchmark_of[text], example_of[text]
    order = np.lexsort((owner, keys, sets))
    keys, owner, sets = keys[order], owner[order], sets[order]
    new_gram = np.ones(len(keys), np.bool_)
    new_gram[1:] = (np.diff(keys) != 0) | (np.diff(sets) != 0)
    new_owner = new_gram.copy()
    new_owner[1:] |= np.diff(owner) != 0
    shared = np.add.reduceat(new_owner.astype(np.int64), np.flatnonzero(new_gram))
    flags[order] = shared[np.cumsum(new_gram) - 1] > limits[sets]
    return flags


@dataclass(frozen=True)
class EvalExamples:
    """The texts of all examples of all benchmarks, each whole and its fields: n texts with g grams in total."""

    benchmark: NDArray[np.int32]
    """int32[n]: index of its benchmark in the recipe."""
    example: Offsets
    """int64[n]: number of its example, over all benchmarks; the first text of an example is the whole."""
    text: pa.ChunkedArray
    words: Offsets
    """int64[n]"""
    last: Hashes
    """uint64[n]: hash of the last word."""
    grams: Hashes
    """uint64[g]: gram k of text i is grams[ends[i] + k]."""
    ends: Offsets
    template: Flags

    @classmethod
    def read(cls, job: CurationJob) -> EvalExamples:
        """Return the n-grams that `write_benchmarks` wrote."""
        return _read(job.file(STEP, 0), _changed(job))

    @cached_property
    def whole(self) -> Offsets:
        """Index of the first text of every example."""
        return np.flatnonzero(np.diff(self.example, prepend=-1))

    @cached_property
    def owner(self) -> Offsets:
        """Text of every gram."""
        return np.repeat(np.arange(len(self.words)), np.diff(self.ends))

    @cached_property
    def first_word(self) -> Offsets:
        """First word of every text if all words are numbered consecutively, then their total; int64[n + 1]."""
        return np.concatenate(([0], np.cumsum(self.words)))

    @cached_property
    def gram_start(self) -> Offsets:
        """First word of every gram."""
        within: Offsets = np.arange(len(self.grams)) - self.ends[self.owner]
        return self.first_word[self.owner] + within

    @cached_property
    def width(self) -> Offsets:
        """Words of every gram."""
        return np.minimum(self.words, GRAM)[self.owner]

    @cached_property
    def own(self) -> Offsets:
        """Words of each text inside non-template grams."""
        return self.covered(~self.template)

    def covered(self, grams: Flags) -> Offsets:
        """Return how many words of each text are inside one of the flagged grams."""
        size = int(self.first_word[-1]) + 1
        starts = np.bincount(self.gram_start[grams], minlength=size)
        stops = np.bincount((self.gram_start + self.width)[grams], minlength=size)
        inside = np.concatenate(([0], np.cumsum(np.cumsum(starts - stops) > 0)))
        return np.diff(inside[self.first_word])

    def least(self, thresholds: Sequence[Share]) -> Offsets:
        """Return the own words that reach the threshold of each text; NEVER for a text without own words."""
        numerators = np.array([threshold.numerator for threshold in thresholds], object)[self.benchmark]
        denominators = np.array([threshold.denominator for threshold in thresholds], object)[self.benchmark]
        needed = np.maximum(1, -(-numerators * self.own // denominators)).astype(np.int64)
        return np.where(self.own > 0, needed, NEVER)

    def index(self, thresholds: Sequence[Share]) -> NgramIndex:
        """Return the index that the kernel scans for; grams are numbered in the order of their hashes."""
        keys, gram = np.unique(self.grams, return_inverse=True)
        own = np.flatnonzero(~self.template)
        order = own[np.argsort(gram[own], kind="stable")]
        postings = np.concatenate(([0], np.cumsum(np.bincount(gram[own], minlength=len(keys)))))
        widths = np.zeros(len(keys), np.int32)
        widths[gram] = self.width
        owner = np.repeat(np.arange(len(self.words), dtype=np.int32), self.words)
        need = np.where(self.words >= GRAM, self.least(thresholds), NEVER).astype(np.int32)
        positions, benchmark = self.gram_start[order].astype(np.int32), self.benchmark.astype(np.int32)
        endings = gram_endings(self.last, self.words, GRAM)
        return NgramIndex(key_table(keys), GRAM, endings, postings, positions, widths, owner, benchmark, need)


@lru_cache(maxsize=1)  # a worker scans many shards for the same examples; 2 million grams take a second to read
def _read(file: str, changed: int) -> EvalExamples:
    table = read_table(file)
    grams, ends = list_buffers(table["grams"])
    template = table["template"].combine_chunks().values.to_numpy(zero_copy_only=False)
    benchmark, example, words, last = (table[name].to_numpy() for name in ("benchmark", "example", "words", "last"))
    return EvalExamples(benchmark, example, table["text"], words, last, grams, ends, template)


def _changed(job: CurationJob) -> int:
    """Return when a local file of the examples was written; jobs of one folder in a store have the same examples."""
    file = job.file(STEP, 0)
    return Path(file).stat().st_mtime_ns if is_local(file) else 0


def ngram_index(job: CurationJob) -> NgramIndex:
    """Return the index that the documents of `job` are scanned for."""
    return _index(job.file(STEP, 0), _changed(job), thresholds(job))


@lru_cache(maxsize=1)
def _index(file: str, changed: int, least: tuple[Share, ...]) -> NgramIndex:
    return _read(file, changed).index(least)


def thresholds(job: CurationJob) -> tuple[Share, ...]:
    """Return the thresholds of the job's benchmarks."""
    return tuple(benchmark.threshold for benchmark in job.recipe.curate.benchmarks)
