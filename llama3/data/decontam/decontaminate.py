"""Decontamination: find evaluation examples in documents, drop the documents that contain them, report overlap.

The measure of arXiv 2407.21783, section 5.1.4: a word of an example is contaminated if it is in an 8-gram that occurs
in the training text; the ratio of an example is its share of contaminated words. Over the whole corpus, common phrases
of a thousand documents add up, so a document is dropped only if it covers an example up to the threshold *alone*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llama3.data.decontam.ngrams import GRAM, STEP, EvalExamples, index_of, thresholds, write_benchmarks
from llama3.data.kernels.arrow import Hashes, Offsets, text_buffers
from llama3.data.kernels.ngrams import nothing_found, scan
from llama3.data.mapreduce import (
    CurationJob,
    Runner,
    listed,
    quoted,
    rows_of_part,
    run,
    write_by_key,
    write_drops,
    write_table,
)
from llama3.data.text.words import WORD, words

MAP, FOUND, VERIFIED = "contaminated/map", "contaminated/found", "contaminated/verified"
REPORT, RATIOS, EXAMPLES = "contaminated/report", "contaminated/ratios", "contaminated/examples"
RUN = 13
"""Words in a row that example and document must share to confirm a flag."""
_EXCERPT = 300
_BATCH = 2048
"""Documents whose text is in memory at a time."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that it maps numbers to distinct keys all over the range of hashes."""
_LOWER = {upper: upper + 32 for upper in range(0x41, 0x5B)}
_FOUND = pa.schema(
    {
        "key": pa.uint64(),
        "kind": pa.string(),
        "item": pa.int64(),
        "words": pa.int64(),
        "row": pa.int64(),
        "id": pa.string(),
    }
)
"""Rows by kind. `gram`: the gram with hash `key` occurs. `best`: the document that covers most own words (`words`) of
example `item`. `document`: the document contains an example of benchmark `item`."""
_VERIFIED = pa.schema({"item": pa.int64(), "words": pa.int64(), "run": pa.int64(), "excerpt": pa.string()})
_REPORT = pa.schema(
    {
        "benchmark": pa.string(),
        "action": pa.string(),
        "threshold": pa.string(),
        "examples": pa.int64(),
        "short": pa.int64(),
        "template": pa.int64(),
        "flagged": pa.int64(),
        "confirmed": pa.int64(),
        "precision": pa.float64(),
        "documents": pa.int64(),
        "dropped": pa.int64(),
    }
)
"""`short`: examples of fewer than 8 words in total; `template`: examples with no own words; `flagged`: examples with a
corpus ratio at or above the threshold, as a whole or in a field; `precision`: confirmed / flagged, null without flags;
`documents`: those that contain an example; `dropped`: the same, or 0 if the action is to report."""
_RATIOS = pa.schema(
    {
        "benchmark": pa.string(),
        "ratio": pa.float64(),
        "corpus": pa.int64(),
        "document": pa.int64(),
        "examples": pa.int64(),
    }
)
"""Examples whose ratio over the corpus, or in one document, is at least `ratio`."""
_EXAMPLES = pa.schema(
    {
        "benchmark": pa.string(),
        "example": pa.int64(),
        "words": pa.int64(),
        "ratio": pa.float64(),
        "document": pa.string(),
        "document_ratio": pa.float64(),
        "run": pa.int64(),
        "confirmed": pa.bool_(),
        "excerpt": pa.string(),
    }
)
"""`example`: its index in the benchmark; `document`: id of the document that covers most of it, `document_ratio`: the
share. For an example of several fields, the row is that of the field, or of the whole, that documents cover most. `run`
and `excerpt`: longest run of shared words, if it was verified."""


def decontaminate(runner: Runner, job: CurationJob) -> None:
    """Run all sub-steps: drops in `contaminated/drop` and three report tables, a step of one file each.

    Tables: `contaminated/report` (one row per benchmark), `contaminated/ratios` (examples by ratio)
    and `contaminated/examples` (those that the corpus covers in part). No-op without benchmarks. Raises ValueError if a
    benchmark cannot be read.
    """
    if not job.recipe.curate.decontaminate:
        return
    shards, parts = range(len(job.shards)), range(job.parts)
    run(runner, job, STEP, write_benchmarks, [0])
    run(runner, job, MAP, scan_shard, shards)
    run(runner, job, "contaminated/drop", drop_documents, parts)
    run(runner, job, FOUND, reduce_found, parts)
    run(runner, job, VERIFIED, verify_shard, shards)
    run(runner, job, REPORT, report_benchmarks, [0])
    run(runner, job, RATIOS, report_ratios, [0])
    run(runner, job, EXAMPLES, report_examples, [0])


def scan_shard(job: CurationJob, item: int) -> None:
    """Scan the documents of a shard that no earlier step has dropped for all examples.

    The output is bounded by the grams, the examples and the documents that contain one, not by how often a gram occurs.
    """
    shard, benchmarks = job.shards[item], job.recipe.curate.decontaminate
    index = index_of(job)
    matches, stamp = nothing_found(index), 0
    alive = job.query(job.survivors(shard, "contaminated", '"row"'))["row"].to_numpy()
    document_batches, benchmark_batches = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for batch in pq.ParquetFile(shard.text).iter_batches(_BATCH, columns=["row", "text"]):
        rows = batch["row"].to_numpy()
        use = np.isin(rows, alive).astype(np.uint8)
        contains = np.zeros((len(rows), len(benchmarks)), np.uint8)
        stamp = scan(*text_buffers(batch["text"]), rows.copy(), use, index, matches, stamp, contains)
        document, number = np.nonzero(contains)
        document_batches.append(rows[document])
        benchmark_batches.append(number)
    slots, where, _ = index.table
    used = slots != 0
    seen = slots[used][matches.seen[where[used]] == 1]
    examples = np.flatnonzero(matches.best)
    best_words, best_rows = matches.best[examples].astype(np.int64), matches.best_row[examples]
    texts = pq.read_table(shard.text, columns=["row", "id"])
    best_ids = texts["id"].take(pa.array(np.searchsorted(texts["row"].to_numpy(), best_rows)))
    documents, numbers = np.concatenate(document_batches), np.concatenate(benchmark_batches)
    tables = [
        _matches("gram", seen, np.zeros(len(seen), np.int64)),
        _matches("best", examples.astype(np.uint64) * _SPREAD, examples, best_words, best_rows, best_ids),
        _matches("document", documents.astype(np.uint64) * _SPREAD, numbers, rows=documents),
    ]
    order = [(name, "ascending") for name in ("key", "kind", "item")]
    write_table(pa.concat_tables(tables).sort_by(order), job.file(MAP, item))


def _matches(
    kind: str,
    keys: Hashes,
    items: Offsets,
    words: Offsets | None = None,
    rows: Offsets | None = None,
    ids: object = None,
) -> pa.Table:
    """Return a table of schema _FOUND; columns that the kind does not have are -1 or ""."""
    missing = np.full(len(keys), -1, np.int64)
    words, rows = missing if words is None else words, missing if rows is None else rows
    ids = pa.array([""] * len(keys), pa.string()) if ids is None else ids
    return pa.table([keys, pa.array([kind] * len(keys), pa.string()), items, words, rows, ids], schema=_FOUND)


def drop_documents(job: CurationJob, part: int) -> None:
    """Drop the documents that contain an example of a benchmark whose action is to drop."""
    benchmarks = enumerate(job.recipe.curate.decontaminate)
    dropping = [number for number, benchmark in benchmarks if benchmark.action == "drop"]
    query = f"""SELECT DISTINCT "row", 'contaminated' AS outcome, NULL::VARCHAR AS kept
        FROM ({rows_of_part(job, MAP, part)})
        WHERE kind = 'document' AND list_contains({dropping}::BIGINT[], item)"""
    write_drops(job, query, "contaminated", part)


def reduce_found(job: CurationJob, part: int) -> None:
    """Merge the matches of all shards: each gram once, the best document per example, documents per benchmark."""
    rows = rows_of_part(job, MAP, part)
    query = f"""SELECT DISTINCT * FROM ({rows}) WHERE kind = 'gram'
        UNION ALL SELECT * FROM ({rows}) WHERE kind = 'best'
            QUALIFY row_number() OVER (PARTITION BY item ORDER BY words DESC, id, "row") = 1
        UNION ALL SELECT min(key), kind, item, count(*), -1, '' FROM ({rows})
            WHERE kind = 'document' GROUP BY kind, item"""
    write_by_key(job, query, FOUND, part)


# Verification: read the best document of every flagged example again
#
# The paper does not say how many of its flags are chance. A flag is *confirmed* if one document alone covers the
# example up to the threshold and shares a run of at least 13 words with it, or all its words if it is shorter. An
# example of fewer than 8 words is never confirmed: `inflation` is a question of MMLU.


class Overlap(NamedTuple):
    """Words that an example and a document share."""

    words: int
    """Own (non-template) words of the example in shared grams."""
    run: int
    """Most shared words in a row; 0 if fewer than a gram."""
    excerpt: str
    """Those words as written in the document."""


def overlap(example: str, own: Sequence[bool], document: str) -> Overlap:
    """Compare word by word, not by hashes; `own[i]`: gram i of the example is not template."""
    example_words = words(example)
    width = min(GRAM, len(example_words))
    places: dict[tuple[str, ...], list[int]] = {}
    for place in range(len(example_words) - width + 1):
        places.setdefault(tuple(example_words[place : place + width]), []).append(place)
    spans = [match.span() for match in WORD.finditer(document.translate(_LOWER))]
    document_words = words(document)
    covered: set[int] = set()
    longest, end = 0, 0
    before: dict[int, int] = {}
    for at, gram in enumerate(zip(*(document_words[k:] for k in range(width)), strict=False)):
        # before[place] is the length of the run that ends with the gram at `place`
        before = {place: before.get(place - 1, width - 1) + 1 for place in places.get(gram, ())}
        for place, length in before.items():
            if own[place]:
                covered.update(range(place, place + width))
            if length > longest:
                longest, end = length, at + width
    excerpt = document[spans[end - longest][0] : spans[end - 1][1]] if longest else ""
    return Overlap(len(covered), longest, excerpt[:_EXCERPT])


def verify_shard(job: CurationJob, item: int) -> None:
    """Compare examples with their best document, if that is in this shard and covers them up to the threshold."""
    shard, examples = job.shards[item], EvalExamples.read(job)
    best = _best_documents(job, examples)
    low, high = shard.rows
    enough = best.words >= examples.least(thresholds(job))
    chosen = np.flatnonzero((best.rows >= low) & (best.rows < high) & enough)
    texts: dict[int, str] = {}
    if len(chosen):
        rows = ", ".join(map(str, np.unique(best.rows[chosen])))
        query = f'SELECT "row", text FROM read_parquet({quoted(str(shard.text))}) WHERE "row" IN ({rows})'
        with job.session() as connection:
            texts = dict(connection.execute(query).fetchall())
    verified = []
    for example in chosen.tolist():
        grams = ~examples.template[examples.ends[example] : examples.ends[example + 1]]
        shared = overlap(examples.text[example].as_py(), grams.tolist(), texts[int(best.rows[example])])
        verified.append({"item": example, **shared._asdict()})
    write_table(pa.Table.from_pylist(verified, _VERIFIED), job.file(VERIFIED, item))


class _BestDocuments(NamedTuple):
    """The best document of each example: own words that it covers (0: no document), its row and id."""

    words: Offsets
    rows: Offsets
    ids: list[str]


def _best_documents(job: CurationJob, examples: EvalExamples) -> _BestDocuments:
    table = pq.read_table(job.files(FOUND), filters=[("kind", "=", "best")])
    count, item = len(examples.words), table["item"].to_numpy()
    covered, rows, ids = np.zeros(count, np.int64), np.full(count, -1, np.int64), [""] * count
    covered[item], rows[item] = table["words"].to_numpy(), table["row"].to_numpy()
    for example, name in zip(item.tolist(), table["id"].to_pylist(), strict=True):
        ids[example] = name
    return _BestDocuments(covered, rows, ids)


# Reports


class _Results(NamedTuple):
    """Values for the report tables, one per text of an example."""

    examples: EvalExamples
    corpus: Offsets
    """Words in grams that occur in the corpus."""
    best: _BestDocuments
    flagged: Any
    confirmed: Any
    run: Offsets
    excerpt: list[str]

    def any_text(self, flags: Any) -> Any:
        """Return for each example whether `flags`, bool[n], is true for any of its texts."""
        return np.logical_or.reduceat(flags, self.examples.whole)


def _results(job: CurationJob) -> _Results:
    examples, benchmarks = EvalExamples.read(job), job.recipe.curate.decontaminate
    seen = pq.read_table(job.files(FOUND), filters=[("kind", "=", "gram")])["key"].to_numpy()
    corpus, best = examples.covered(np.isin(examples.grams, seen)), _best_documents(job, examples)
    shares = [benchmarks[number].threshold for number in examples.benchmark.tolist()]
    pairs = zip(corpus.tolist(), examples.words.tolist(), shares, strict=True)
    flagged = np.array([count > 0 and hit >= share * count for hit, count, share in pairs], np.bool_)
    verified, run, excerpt = np.zeros(len(flagged), np.int64), np.zeros(len(flagged), np.int64), [""] * len(flagged)
    for row in pq.read_table(job.files(VERIFIED)).to_pylist():
        verified[row["item"]], run[row["item"]], excerpt[row["item"]] = row["words"], row["run"], row["excerpt"]
    enough = (verified >= examples.least(thresholds(job))) & (run >= np.minimum(RUN, examples.words))
    confirmed = flagged & enough & (examples.words >= GRAM)
    return _Results(examples, corpus, best, flagged, confirmed, run, excerpt)


def report_benchmarks(job: CurationJob, item: int) -> None:
    """Write one row per benchmark."""
    results = _results(job)
    examples = results.examples
    words = examples.words[examples.whole]
    query = f"""SELECT item, sum(words)::BIGINT FROM read_parquet({listed(job.files(FOUND))})
        WHERE kind = 'document' GROUP BY item"""
    with job.session() as connection:
        documents = dict(connection.execute(query).fetchall())
    rows = []
    for number, benchmark in enumerate(job.recipe.curate.decontaminate):
        members = examples.benchmark[examples.whole] == number
        flagged, confirmed = (
            int(results.any_text(mask)[members].sum()) for mask in (results.flagged, results.confirmed)
        )
        rows.append(
            {
                "benchmark": benchmark.name,
                "action": benchmark.action,
                "threshold": str(benchmark.threshold),
                "examples": int(members.sum()),
                "short": int((words[members] < GRAM).sum()),
                "template": int(((examples.own[examples.whole] == 0) & (words > 0))[members].sum()),
                "flagged": flagged,
                "confirmed": confirmed,
                "precision": confirmed / flagged if flagged else None,
                "documents": documents.get(number, 0),
                "dropped": documents.get(number, 0) if benchmark.action == "drop" else 0,
            }
        )
    write_table(pa.Table.from_pylist(rows, _REPORT), job.file(REPORT, item))


def report_ratios(job: CurationJob, item: int) -> None:
    """Write how many examples reach each tenth of the ratio, over the corpus and in one document."""
    results = _results(job)
    examples, rows = results.examples, []
    for number, benchmark in enumerate(job.recipe.curate.decontaminate):
        members = examples.benchmark[examples.whole] == number
        for tenth in range(1, 11):
            corpus = results.any_text((10 * results.corpus >= tenth * examples.words) & (examples.words > 0))
            document = results.any_text((10 * results.best.words >= tenth * examples.own) & (examples.own > 0))
            counts = {"corpus": int(corpus[members].sum()), "document": int(document[members].sum())}
            rows.append({"benchmark": benchmark.name, "ratio": tenth / 10, **counts, "examples": int(members.sum())})
    write_table(pa.Table.from_pylist(rows, _RATIOS), job.file(RATIOS, item))


def report_examples(job: CurationJob, item: int) -> None:
    """Write the examples that the corpus covers in part, by benchmark and falling ratio."""
    results, benchmarks = _results(job), job.recipe.curate.decontaminate
    examples, best = results.examples, results.best
    first = np.searchsorted(examples.benchmark[examples.whole], np.arange(len(benchmarks)))
    ratio, share = results.corpus / np.maximum(1, examples.words), best.words / np.maximum(1, examples.own)
    ranked = np.lexsort((examples.words, ratio, share, results.flagged, results.confirmed, examples.example))
    most = ranked[np.diff(examples.example[ranked], append=len(ranked)) != 0]
    chosen = most[results.corpus[most] > 0]
    order = chosen[np.lexsort((chosen, -ratio[chosen], examples.benchmark[chosen]))]
    rows = [
        {
            "benchmark": benchmarks[examples.benchmark[place]].name,
            "example": int(examples.example[place] - first[examples.benchmark[place]]),
            "words": int(examples.words[place]),
            "ratio": float(ratio[place]),
            "document": best.ids[place],
            "document_ratio": float(share[place]),
            "run": int(results.run[place]),
            "confirmed": bool(results.confirmed[place]),
            "excerpt": results.excerpt[place],
        }
        for place in order.tolist()
    ]
    write_table(pa.Table.from_pylist(rows, _EXAMPLES), job.file(EXAMPLES, item))
