"""Attributes of documents, as Parquet beside their text: everything that a decision about a document may rest on.

Statistics, line hashes, MinHash bands, scores, topics and word divergence are computed once, shard by shard; a new
threshold is then a query over attributes and not another pass over the text. What this gives up: disk (about a tenth of
the text's size, mostly line hashes and bands).
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

COLUMNS = tuple(statistic.name.lower() for statistic in Statistic)
"""Columns of `document_statistics`, named like fields of Quality without min_ and max_; one for each n of n-grams."""


COUNTS = ("chars", "words", "stop_words", "sentences", "braces", "placeholder_text")
"""Columns that hold whole numbers; the others are shares and means."""


def document_statistics(texts: Any) -> pa.Table:
    """Return one row per text of `texts`, a string or large_string (chunked) array without nulls, in its order.

    Columns: COLUMNS, int64 for COUNTS and float64 for the rest.
    """
    data, offsets = text_buffers(texts)
    values = np.zeros((len(COLUMNS), len(offsets) - 1))
    measure(data, offsets, values)
    return pa.table(
        {
            name: pa.array(row.astype(np.int64) if name in COUNTS else row)
            for name, row in zip(COLUMNS, values, strict=True)
        }
    )


STEP = "attributes"
MODELS = "models"
_BATCH = 2048
"""Documents whose text is in memory at a time: 10 MB of usual text."""


def annotate(recipe: Recipe, collected: Path, scratch: Path, runner: Runner, **settings: Any) -> dict[str, Any]:
    """Write the attributes of all shards of `collected` to `scratch/attributes`, and the score models beside them.

    `settings` go to the job (memory, threads, parts). Returns facts: shards and, by classifier, how it did on seeds
    that it had not seen. Raises ValueError if a file that the recipe names cannot be read.
    """
    job = CurationJob(recipe, shards_in(collected, scratch), scratch, **settings)
    scored: dict[Domain, list[Path]] = {domain: [] for domain in recipe.sources}
    for shard in job.shards:
        scored[shard.domain].append(shard.text)
    facts = prepare_scores(recipe.curate, scored, scratch / MODELS)
    if bounds_divergence(recipe.curate):
        count_words(runner, job)
    run(runner, job, STEP, annotate_shard, range(len(job.shards)))
    return {"shards": len(job.shards), "classifiers": facts}


def shards_in(collected: Path, annotated: Path) -> tuple[Shard, ...]:
    """Return the shards of two artifacts (or folders in the making) in the order of their numbers."""
    found = shards_of(collected)
    return tuple(
        Shard(number, domain, path, annotated / STEP / f"{place:05}.parquet", documents, size)
        for place, (number, domain, path, documents, size) in enumerate(found)
    )


def bounds_divergence(curate: Curate) -> bool:
    """Return whether any rule looks at the divergence of words, which costs a pass of its own."""
    rules = [curate.quality, *(curate.quality.changed(fields) for fields in curate.quality_for.values())]
    return any(rule.max_divergence is not None for rule in rules)


def annotate_shard(job: CurationJob, item: int) -> None:
    """Write the attributes of shard `item`: the columns of its documents but the text, and what is derived from it."""
    shard = job.shards[item]
    file = pq.ParquetFile(shard.text)
    schema = _attributes(job, shard.domain, file.schema_arrow.empty_table()).schema
    with replacing(job.file(STEP, item)) as part, pq.ParquetWriter(part, schema, compression="zstd") as writer:
        for batch in file.iter_batches(_BATCH):
            writer.write_table(_attributes(job, shard.domain, pa.Table.from_batches([batch])))


def _attributes(job: CurationJob, domain: Domain, documents: pa.Table) -> pa.Table:
    curate, texts = job.recipe.curate, documents["text"]
    table = documents.drop_columns(["text"])
    for name, column in _columns(document_statistics(texts)).items():
        table = table.append_column(name, column)
    scores = score_texts(curate, job.folder / MODELS, domain, texts)
    derived = {
        "lines": line_hashes(texts if _counts_lines(curate, domain) else _blank(texts), curate.lines.min_chars),
        "bands": band_hashes(texts, curate.dedup),
        **scores,
        "topic": pa.array(topic_texts(curate, job.folder / MODELS, domain, texts), pa.string()),
        "divergence": _divergence(job, domain, documents),
        "dirty_words": count_words_in(texts, read_words(curate.dirty_words)),
        "rank": np.nan_to_num(next(iter(scores.values()), np.zeros(len(texts)))),
    }
    for name, values in derived.items():
        table = table.append_column(name, values if isinstance(values, pa.Array) else pa.array(values))
    return table


def _counts_lines(curate: Curate, domain: Domain) -> bool:
    return curate.lines.max_copies is not None and domain in curate.lines.domains


def _blank(texts: pa.ChunkedArray) -> pa.Array:
    return pa.array([""] * len(texts), pa.string())


def _columns(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))


def _divergence(job: CurationJob, domain: Domain, documents: pa.Table) -> Any:
    """Return each document's divergence from the words of its domain and language; 0 where nothing bounds it."""
    result = np.zeros(documents.num_rows)
    if not bounds_divergence(job.recipe.curate):
        return result
    languages = documents["language"].to_numpy(zero_copy_only=False)
    for language in np.unique(languages):
        here = np.flatnonzero(languages == language)
        reference = reference_counts(job, domain, str(language))
        result[here] = divergences(documents["text"].take(pa.array(here)), reference)
    return result
