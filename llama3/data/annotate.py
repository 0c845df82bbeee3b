"""Annotate documents: write as Parquet, beside the text, everything that a decision about a document depends on.

Statistics, line hashes, MinHash bands, scores, topics and word divergence are computed once, shard by shard. A new
threshold is then a query over attributes and not another pass over the text. Attributes take about a tenth of the size
of the text on disk, mostly line hashes and bands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llama3.data.classifiers import prepare_scores, score_texts, topic_texts
from llama3.data.collect import shards_of
from llama3.data.dedup.lines import line_hashes
from llama3.data.kernels.arrow import text_buffers
from llama3.data.kernels.shingles import band_hashes
from llama3.data.kernels.statistics import Statistic, measure
from llama3.data.kl import count_words, divergences, reference_counts
from llama3.data.mapreduce import CurationJob, Runner, Shard, replacing, run
from llama3.data.wordlists import count_words_in, read_words
from llama3.recipe.base import Domain
from llama3.recipe.data_schema import Curate
from llama3.recipe.schema import Recipe

STEP = "attributes"
MODELS = "models"
COLUMNS = tuple(statistic.name.lower() for statistic in Statistic)
"""Columns of `document_statistics`: the fields of Quality without min_ and max_; one per n for n-grams."""
COUNTS = ("chars", "words", "stop_words", "sentences", "braces", "placeholder_text")
"""Columns that hold integers; the others are fractions and means."""
_BATCH = 2048
"""Documents whose text is in memory at a time, typically 10 MB."""


def annotate(recipe: Recipe, collected: Path, scratch: Path, runner: Runner, **settings: Any) -> dict[str, Any]:
    """Write the attributes of all shards of `collected` to `scratch/attributes`, and the score models beside them.

    `settings` go to the job (memory, threads, parts). Returns facts: shards, and the accuracy of each classifier on
    seeds that it was not trained on. Raises ValueError if a file named in the recipe cannot be read.
    """
    job = CurationJob(recipe, shards_in(collected, scratch), scratch, **settings)
    text_files: dict[Domain, list[Path]] = {domain: [] for domain in recipe.sources}
    for shard in job.shards:
        text_files[shard.domain].append(shard.text)
    facts = prepare_scores(recipe.curate, text_files, scratch / MODELS)
    if bounds_divergence(recipe.curate):
        count_words(runner, job)
    run(runner, job, STEP, annotate_shard, range(len(job.shards)))
    return {"shards": len(job.shards), "classifiers": facts}


def shards_in(collected: Path, annotated: Path) -> tuple[Shard, ...]:
    """Return the shards of two artifacts (or unfinished folders) in the order of their numbers."""
    return tuple(
        Shard(number, domain, path, annotated / STEP / f"{place:05}.parquet", documents, size)
        for place, (number, domain, path, documents, size) in enumerate(shards_of(collected))
    )


def bounds_divergence(curate: Curate) -> bool:
    """Return whether any rule bounds word divergence, which needs an extra pass over the text."""
    rules = [curate.quality, *(curate.quality.changed(fields) for fields in curate.quality_for.values())]
    return any(rule.max_divergence is not None for rule in rules)


def annotate_shard(job: CurationJob, item: int) -> None:
    """Write the attributes of shard `item`: the columns of its documents except the text, and the derived ones."""
    shard = job.shards[item]
    file = pq.ParquetFile(shard.text)
    schema = _attributes(job, shard.domain, file.schema_arrow.empty_table()).schema
    with (
        replacing(job.file(STEP, item)) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        for batch in file.iter_batches(_BATCH):
            writer.write_table(_attributes(job, shard.domain, pa.Table.from_batches([batch])))


def _attributes(job: CurationJob, domain: Domain, documents: pa.Table) -> pa.Table:
    curate, texts = job.recipe.curate, documents["text"]
    statistics = document_statistics(texts)
    scores = score_texts(curate, job.folder / MODELS, domain, texts)
    counts_lines = curate.lines.max_copies is not None and domain in curate.lines.domains
    line_texts = texts if counts_lines else pa.array([""] * len(texts), pa.string())
    derived = {
        **dict(zip(statistics.column_names, statistics.columns, strict=True)),
        "lines": line_hashes(line_texts, curate.lines.min_chars),
        "bands": band_hashes(texts, curate.dedup),
        **scores,
        "topic": pa.array(topic_texts(curate, job.folder / MODELS, domain, texts), pa.string()),
        "divergence": _divergence(job, domain, documents),
        "dirty_words": count_words_in(texts, read_words(curate.dirty_words)),
        "rank": np.nan_to_num(next(iter(scores.values()), np.zeros(len(texts)))),
    }
    table = documents.drop_columns(["text"])
    for name, values in derived.items():
        table = table.append_column(name, pa.array(values) if isinstance(values, np.ndarray) else values)
    return table


def document_statistics(texts: Any) -> pa.Table:
    """Return one row per text of `texts`, a string or large_string (chunked) array without nulls, in its order.

    Columns: COLUMNS, int64 for COUNTS and float64 for the rest.
    """
    data, offsets = text_buffers(texts)
    values = np.zeros((len(COLUMNS), len(offsets) - 1))
    measure(data, offsets, values)
    columns = zip(COLUMNS, values, strict=True)
    return pa.table({name: pa.array(row.astype(np.int64) if name in COUNTS else row) for name, row in columns})


def _divergence(job: CurationJob, domain: Domain, documents: pa.Table) -> Any:
    """Return each document's divergence from the words of its domain and language; 0 if no rule bounds it."""
    result = np.zeros(documents.num_rows)
    if not bounds_divergence(job.recipe.curate):
        return result
    languages = documents["language"].to_numpy(zero_copy_only=False)
    for language in np.unique(languages):
        members = np.flatnonzero(languages == language)
        reference = reference_counts(job, domain, str(language))
        result[members] = divergences(documents["text"].take(pa.array(members)), reference)
    return result
