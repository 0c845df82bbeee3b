"""Annotate documents: write as Parquet, beside the text, everything that a decision about a document depends on.

Statistics, line hashes, MinHash bands, scores, topics and word divergence are computed once, shard by shard. A new
threshold is then a query over attributes and not another pass over the text. Attributes take about a tenth of the size
of the text on disk, mostly line hashes and bands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from herd.llama3.data.classifiers import prepare_scores, score_texts, topic_texts
from herd.llama3.data.collect import collected_shards
from herd.llama3.data.dedup.lines import flags_of, line_hashes
from herd.llama3.data.kernels.arrow import text_buffers
from herd.llama3.data.kernels.histogram import (
    Floats,
    add_counts,
    allocate_word_arrays,
    longest_text,
    measure_divergence,
)
from herd.llama3.data.kernels.ngrams import Flags
from herd.llama3.data.kernels.paragraphs import join_paragraphs
from herd.llama3.data.kernels.shingles import band_hashes
from herd.llama3.data.kernels.statistics import Statistic, measure
from herd.llama3.data.mapreduce import CurationJob, Shard, aggregate, schema_of
from herd.llama3.data.wordlists import count_words_in, read_words
from herd.llama3.data.work_items import Runner, write_table
from herd.llama3.recipe.base import Domain
from herd.llama3.recipe.data_schema import Curate
from herd.llama3.recipe.schema import Recipe
from herd.storage.files import local_folder, open_file, put_folder
from herd.storage.filesystem import is_local, local_path

# KL divergence of a document's words from those of its domain and language (arXiv 2407.21783, 3.1.1).
# KL = sum of p ln(p / q) over words, in nats per word, minus its expectation for as many words drawn at random from
# q: without that correction it would measure length. Measured: 90 % of English prose against itself lies between
# 0.2 and 2.4 whatever its length, code between 1 and 5, French and Japanese at 6 to 7, random strings at 8 to 10.
# 240 MB/s per core.

BUCKETS = 2**18
"""Hash buckets of words; two words in one bucket count as one word."""
LEAST_WORDS = 20
"""A shorter text gets divergence 0."""
LEAST_REFERENCE = 10_000
"""With fewer reference words, all texts get divergence 0."""
_COUNT, _REFERENCE = "divergence/count", "divergence/reference"
_SCHEMA = schema_of("domain string, language string, bucket int64, count int64")
_SUM = """SELECT domain, language, bucket, sum("count")::BIGINT AS "count" FROM rows GROUP BY ALL ORDER BY ALL"""
_LENGTHS = np.unique(np.geomspace(1, 2**24, 200).round())
"""Word counts for which the expected divergence is computed; in between it is interpolated over ln n."""


@dataclass(frozen=True)
class WordDistribution:
    """The words of a domain in a language."""

    words: int
    log_shares: Floats
    """ln q of each bucket."""
    expected: Floats
    """Expected divergence of random texts with `_LENGTHS` words."""


def count_words(runner: Runner, job: CurationJob) -> None:
    """Count the words of all shards by domain and language: one file per shard, then one with the sums."""
    job.each_shard(runner, _COUNT, count_shard)
    if not job.files(_REFERENCE):
        sums = aggregate(runner, job, _COUNT, len(job.shards), _SUM)
        write_table(sums.cast(_SCHEMA), job.file(_REFERENCE, 0), row_group=1 << 16)


def count_shard(job: CurationJob, index: int) -> None:
    """Write how often each bucket occurs in the text of a piece, by language."""
    shard = job.shard(index)
    counts: dict[str, NDArray[np.int64]] = {}
    for batch in job.texts(index, ["language", "text"]):
        for language in pc.unique(batch["language"]).to_pylist():
            texts = batch["text"].filter(pc.equal(batch["language"], language))
            add_words(texts, counts.setdefault(language, np.zeros(BUCKETS, np.int64)))
    tables = [_SCHEMA.empty_table()]
    for language in sorted(counts):
        buckets = np.flatnonzero(counts[language])
        names = [pa.array([name] * len(buckets), pa.string()) for name in (shard.domain, language)]
        columns = [*names, pa.array(buckets), pa.array(counts[language][buckets])]
        tables.append(pa.Table.from_arrays(columns, schema=_SCHEMA))
    job.write(_COUNT, index, pa.concat_tables(tables))


def add_words(texts: Any, counts: NDArray[np.int64]) -> None:
    """Add the words of an Arrow string column to `counts`, int64[BUCKETS]."""
    data, offsets = text_buffers(texts)
    add_counts(data, offsets, *allocate_word_arrays(longest_text(offsets)), counts)


def reference_counts(job: CurationJob, domain: Domain, language: str) -> WordDistribution:
    """Return the words of `domain` in `language` that `count_words` counted; cached in memory."""
    path = job.file(_REFERENCE, 0)
    return _read(path, Path(path).stat().st_mtime_ns if is_local(path) else 0, domain, language)


def word_distribution(counts: NDArray[np.int64]) -> WordDistribution:
    """Return the distribution of words with `counts`, int64[buckets]."""
    words = int(counts.sum())
    # q = (1 - u) count / words + u / buckets; u, the share of words counted once, is the Good-Turing estimate of the
    # probability of words that the reference has not seen.
    unseen = min(max(int((counts == 1).sum()), 1) / max(words, 1), 0.5)
    # Equal counts have equal shares: a few thousand distinct values represent all buckets.
    values, indices, copies = np.unique(counts, return_inverse=True, return_counts=True)
    shares = (1 - unseen) * values / max(words, 1) + unseen / len(counts)
    mass = copies * shares
    # With n words drawn from q, the count c of a bucket is about Poisson(n q), and E[c ln c] = n q E[ln(1 + c)], so
    # expected(n) = sum over buckets of q (g(n q) - ln(n q)) with g(x) = E[ln(1 + Poisson(x))].
    expected = [(mass * (expected_log(size * shares) - np.log(size * shares))).sum() for size in _LENGTHS]
    return WordDistribution(words, np.log(shares)[indices], np.array(expected))


def divergences(texts: Any, reference: WordDistribution) -> Floats:
    """Return for each text its divergence above that of random words, in nats per word; 0 for too few words."""
    data, offsets = text_buffers(texts)
    out, sizes = np.zeros(len(offsets) - 1), np.zeros(len(offsets) - 1, np.int64)
    if reference.words < LEAST_REFERENCE or not len(out):
        return out
    measure_divergence(data, offsets, *allocate_word_arrays(longest_text(offsets)), reference.log_shares, out, sizes)
    chance = np.interp(np.log(np.maximum(sizes, 1)), np.log(_LENGTHS), reference.expected)
    return np.where(sizes < LEAST_WORDS, 0.0, out - chance)


def expected_log(means: Floats) -> Floats:
    """Return E[ln(1 + c)] for Poisson distributed c, for each mean: a sum up to 60, above it a series (to 1e-6)."""
    few = np.minimum(means, 60.0)
    total, term = np.zeros_like(few), np.exp(-few)
    for count in range(1, 160):
        term = term * few / count
        total += term * np.log1p(count)
    more = 1 + means
    series = np.log(more) - means / (2 * more**2) + means / (3 * more**3) - (3 * means**2 + means) / (4 * more**4)
    series += (10 * means**2 + means) / (5 * more**5) - 15 * means**3 / (6 * more**6)
    return np.where(means > 60, series, total)


@lru_cache(maxsize=32)
def _read(path: str, changed: int, domain: str, language: str) -> WordDistribution:
    filters = [("domain", "==", domain), ("language", "==", language)]
    table = pq.read_table(open_file(path), columns=["bucket", "count"], filters=filters)
    counts = np.zeros(BUCKETS, np.int64)
    counts[table["bucket"].to_numpy()] = table["count"].to_numpy()
    return word_distribution(counts)


VERSION = 3
"""Version of annotated artifacts; raise it if values change, but not for a new statistic: COLUMNS are in the key."""
STEP = "attributes"
MODELS = "models"
COLUMNS = tuple(statistic.name.lower() for statistic in Statistic)
"""Columns of `document_statistics`: the fields of Quality without min_ and max_; one per n for n-grams."""
COUNTS = ("chars", "words", "stop_words", "sentences", "sentences_any_line", "braces", "placeholder_text")
"""Columns that hold integers; the others are fractions and means."""


def annotate(
    recipe: Recipe, collected: str | Path, scratch: str | Path, runner: Runner, **settings: Any
) -> dict[str, Any]:
    """Write the attributes of all shards of `collected` to `scratch`/attributes, and the score models beside them.

    Both are paths or URIs. `settings` go to the job (memory, threads, partitions). Returns metadata: shards, and the
    accuracy of each classifier on seeds that it was not trained on. Raises ValueError if a file named in the recipe
    cannot be read.
    """
    job = CurationJob(recipe, list_shards(collected, scratch), str(scratch), **settings)
    text_files: dict[Domain, list[str]] = {domain: [] for domain in recipe.sources}
    for shard in job.shards:
        text_files[shard.domain].append(shard.text)
    metadata = _prepare_models(recipe.curate, text_files, f"{scratch}/{MODELS}")
    annotate_shards(runner, job)
    return {"shards": len(job.shards), "classifiers": metadata}


def annotate_shards(runner: Runner, job: CurationJob) -> None:
    """Write the attributes of all shards of `job`."""
    if job.recipe.curate.needs_divergence:
        count_words(runner, job)
    job.each_shard(runner, STEP, annotate_shard)


def _prepare_models(curate: Curate, text_files: dict[Domain, list[str]], uri: str) -> dict[str, Any]:
    """Train the score models into the folder `uri` unless they exist, and return their metadata."""
    if is_local(uri):
        return prepare_scores(curate, text_files, local_path(uri))
    folder = local_folder(uri)  # of an earlier attempt, or empty
    metadata = prepare_scores(curate, text_files, folder)
    put_folder(folder, uri)
    return metadata


def list_shards(collected: str | Path, annotated: str | Path) -> tuple[Shard, ...]:
    """Return the shards of two artifacts (or unfinished folders), by path or URI, in the order of their numbers."""
    return tuple(
        Shard(number, domain, uri, f"{annotated}/{STEP}/{index:05}.parquet", documents, size, pieces)
        for index, (number, domain, uri, documents, size, pieces) in enumerate(collected_shards(collected))
    )


def attribute_files(curate: Curate) -> list[str]:
    """Return the files (URIs) named in the recipe that attributes depend on."""
    scores = [uri for score in curate.scores for uri in (*score.good, *score.bad, *filter(None, [score.model]))]
    topics = [uri for uris in (curate.topics.seeds if curate.topics else {}).values() for uri in uris]
    return [*scores, *topics, *curate.dirty_words]


def annotate_shard(job: CurationJob, index: int) -> None:
    """Write the attributes of a piece: the columns of its documents except the text, and the derived ones."""
    for batch in job.texts(index):
        attributes = _attributes(job, job.shard(index).domain, pa.Table.from_batches([batch]))
        job.write(STEP, index, attributes, compression="zstd")


def _attributes(job: CurationJob, domain: Domain, documents: pa.Table) -> pa.Table:
    curate, texts = job.recipe.curate, documents["text"]
    flags = flags_of(*text_buffers(texts)) if domain != "code" else None
    statistics = document_statistics(texts, flags)
    scores = score_texts(curate, local_folder(f"{job.folder}/{MODELS}"), domain, texts)
    counts_lines = curate.lines.max_copies is not None and domain in curate.lines.domains
    line_texts, line_flags = (texts, flags) if counts_lines else (pa.array([""] * len(texts), pa.string()), None)
    derived = {
        **dict(zip(statistics.column_names, statistics.columns, strict=True)),
        "lines": line_hashes(line_texts, curate.lines.min_chars, line_flags),
        "bands": band_hashes(texts, curate.dedup),
        **scores,
        "topic": pa.array(topic_texts(curate, local_folder(f"{job.folder}/{MODELS}"), domain, texts), pa.string()),
        "divergence": _divergence(job, domain, documents),
        "dirty_words": count_words_in(texts, read_words(curate.dirty_words)),
        "rank": np.nan_to_num(next(iter(scores.values()), np.zeros(len(texts)))),
    }
    table = documents.drop_columns(["text"])
    for name, values in derived.items():
        table = table.append_column(name, pa.array(values) if isinstance(values, np.ndarray) else values)
    return table


def document_statistics(texts: Any, flags: Flags | None = None) -> pa.Table:
    """Return one row per text of `texts`, a string or large_string (chunked) array without nulls, in its order.

    Columns: COLUMNS, int64 for COUNTS and float64 for the rest. With the `flags` of the lines (`flags_of`) the wrapped
    lines of a paragraph count as one line.
    """
    data, offsets = text_buffers(texts)
    if flags is not None:
        data = data.copy()
        join_paragraphs(data, offsets, flags)
    values = np.zeros((len(COLUMNS), len(offsets) - 1))
    measure(data, offsets, values)
    columns = zip(COLUMNS, values, strict=True)
    return pa.table({name: pa.array(row.astype(np.int64) if name in COUNTS else row) for name, row in columns})


def _divergence(job: CurationJob, domain: Domain, documents: pa.Table) -> Any:
    """Return each document's divergence from the words of its domain and language; 0 if no rule bounds it."""
    result = np.zeros(documents.num_rows)
    if not job.recipe.curate.needs_divergence:
        return result
    languages = documents["language"].to_numpy(zero_copy_only=False)
    for language in np.unique(languages):
        members = np.flatnonzero(languages == language)
        reference = reference_counts(job, domain, str(language))
        result[members] = divergences(documents["text"].take(pa.array(members)), reference)
    return result
