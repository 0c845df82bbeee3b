"""Finds evaluation examples in the documents, drops the documents that hold them, and reports how much there is.

The measure of arXiv 2407.21783, section 5.1.4: a word of an example is contaminated if it lies in an 8-gram that occurs
at least once in the training text; an example's ratio is the share of its contaminated words. That ratio is over the
whole corpus, and common phrases of a thousand documents add up in it; so a document is dropped only if it covers an
example to the threshold *alone*, and `contamination.py` reads the texts again to say how many flags are true.

Each document is compared where it lies, so what a shard writes is bounded by the examples (which grams it holds, the
best document of each) and by the documents to drop, never by how often a popular gram occurs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llama3.data.decontam.ngrams import GRAM, STEP, EvalExamples, thresholds, wanted_in, write_benchmarks
from llama3.data.kernels.arrow import Hashes, Offsets, text_buffers
from llama3.data.kernels.ngrams import NgramIndex, NgramMatches, nothing_found, scan
from llama3.data.mapreduce import (
    CurationJob,
    Runner,
    Shard,
    listed,
    quoted,
    rows_of_part,
    run,
    write_by_key,
    write_drops,
    write_table,
)
from llama3.data.text.words import WORD, words

# How much of each evaluation set the corpus holds, and how much of that is true: tables to choose thresholds by.
#
# The paper flags an example by 8-grams out of the whole corpus (arXiv 2407.21783, section 5.1.4), which says
# nothing about how many flags are chance. Here the best single document of every example is read again and compared
# word by word, not by hashes: a flag is *confirmed* when that document alone covers the example to the threshold
# and shares a run of at least 13 words with it (the whole example if it is shorter; one of fewer than 8 words is
# never confirmed: `inflation` is a question of MMLU). Precision is the share of flags that are confirmed.

MAP, FOUND, VERIFIED = "contaminated/map", "contaminated/found", "contaminated/verified"
REPORT, RATIOS, EXAMPLES = "contaminated/report", "contaminated/ratios", "contaminated/examples"
RUN = 13
"""Words in a row that example and document must share."""
_EXCERPT = 300
_LOWER = {upper: upper + 32 for upper in range(0x41, 0x5B)}
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
"""`short`: examples of fewer than 8 words in all fields; `template`: those with no words of their own; `flagged`: those
with a corpus ratio at or above the threshold in a field or in all; `precision`: confirmed / flagged, null without
flags; `documents`: those that contain an example; `dropped`: as many, or 0 if the action is to report."""
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
"""`example`: its place in the benchmark, from 0; `document`: id of the one that covers most of it, `document_ratio` the
share. Of an example of several fields, the line is that of the field or of the whole that the documents hold most
of. `run` and `excerpt`: longest run of words that both share, where it was read again."""


class Overlap(NamedTuple):
    """What an example and a document share."""

    words: int
    """Own words of the example in shared grams."""
    run: int
    """Most words in a row; 0 if fewer than a gram."""
    excerpt: str
    """Those words as the document has them."""


def overlap(example: str, own: Sequence[bool], document: str) -> Overlap:
    """Compare word by word; `own` says for each gram of the example whether it counts (is not template)."""
    wanted = words(example)
    width = min(GRAM, len(wanted))
    places: dict[tuple[str, ...], list[int]] = {}
    for place in range(len(wanted) - width + 1):
        places.setdefault(tuple(wanted[place : place + width]), []).append(place)
    spans = [match.span() for match in WORD.finditer(document.translate(_LOWER))]
    found = words(document)
    covered: set[int] = set()
    longest, end = 0, 0
    before: dict[int, int] = {}
    for at, gram in enumerate(zip(*(found[k:] for k in range(width)), strict=False)):
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
    """Read again the documents of a shard that are the best of an example and cover it to the threshold."""
    shard, examples = job.shards[item], EvalExamples.read(job)
    best = _best_threshold(job, examples)
    low, high = shard.rows
    enough = best.words >= examples.least(thresholds(job))
    chosen = np.flatnonzero((best.rows >= low) & (best.rows < high) & enough)
    rows: list[dict[str, Any]] = []
    with job.session() as connection:
        texts = _texts(connection, str(shard.text), best.rows[chosen])
        for example in chosen.tolist():
            grams = ~examples.template[examples.ends[example] : examples.ends[example + 1]]
            found = overlap(examples.text[example].as_py(), grams.tolist(), texts[int(best.rows[example])])
            rows.append({"item": example, **found._asdict()})
    write_table(pa.Table.from_pylist(rows, _VERIFIED), job.file(VERIFIED, item))


def _texts(connection: Any, file: str, rows: Offsets) -> dict[int, str]:
    if not len(rows):
        return {}
    chosen = ", ".join(map(str, np.unique(rows)))
    query = f'SELECT "row", text FROM read_parquet({quoted(file)}) WHERE "row" IN ({chosen})'
    return dict(connection.execute(query).fetchall())


class _Best(NamedTuple):
    """The best document of each example: own words that it covers (0: none), its row and id."""

    words: Offsets
    rows: Offsets
    ids: list[str]


def _best_threshold(job: CurationJob, examples: EvalExamples) -> _Best:
    table = pq.read_table(job.files(FOUND), filters=[("kind", "=", "best")])
    count, item = len(examples.words), table["item"].to_numpy()
    covered, rows, ids = np.zeros(count, np.int64), np.full(count, -1, np.int64), [""] * count
    covered[item], rows[item] = table["words"].to_numpy(), table["row"].to_numpy()
    for place, name in zip(item.tolist(), table["id"].to_pylist(), strict=True):
        ids[place] = name
    return _Best(covered, rows, ids)


class _Facts(NamedTuple):
    """Everything that the tables say of each text of an example."""

    examples: EvalExamples
    corpus: Offsets
    """Words in grams that occur in the corpus."""
    best: _Best
    flagged: Any
    confirmed: Any
    run: Offsets
    excerpt: list[str]


def _facts(job: CurationJob) -> _Facts:
    examples, benchmarks = EvalExamples.read(job), job.recipe.curate.decontaminate
    seen = pq.read_table(job.files(FOUND), filters=[("kind", "=", "gram")])["key"].to_numpy()
    corpus, best = examples.covered(np.isin(examples.grams, seen)), _best_threshold(job, examples)
    shares = [benchmarks[number].threshold for number in examples.benchmark.tolist()]
    pairs = zip(corpus.tolist(), examples.words.tolist(), shares, strict=True)
    flagged = np.array([count > 0 and hit >= share * count for hit, count, share in pairs], np.bool_)
    verified, run, excerpt = np.zeros(len(flagged), np.int64), np.zeros(len(flagged), np.int64), [""] * len(flagged)
    for row in pq.read_table(job.files(VERIFIED)).to_pylist():
        verified[row["item"]], run[row["item"]], excerpt[row["item"]] = row["words"], row["run"], row["excerpt"]
    enough = (verified >= examples.least(thresholds(job))) & (run >= np.minimum(RUN, examples.words))
    confirmed = flagged & enough & (examples.words >= GRAM)
    return _Facts(examples, corpus, best, flagged, confirmed, run, excerpt)


def _any(facts: _Facts, texts: Any) -> Any:
    """Return of each example whether `texts`, bool[n], is true of any of its texts."""
    return np.logical_or.reduceat(texts, facts.examples.whole)


def report_benchmarks(job: CurationJob, item: int) -> None:
    """Write one line for each benchmark."""
    facts = _facts(job)
    examples = facts.examples
    words = examples.words[examples.whole]
    with job.session() as connection:
        query = f"""SELECT item, sum(words)::BIGINT FROM read_parquet({listed(job.files(FOUND))})
            WHERE kind = 'document' GROUP BY item"""
        documents = dict(connection.execute(query).fetchall())
    rows = []
    for number, benchmark in enumerate(job.recipe.curate.decontaminate):
        here = examples.benchmark[examples.whole] == number
        flagged, confirmed = (int(_any(facts, mask)[here].sum()) for mask in (facts.flagged, facts.confirmed))
        rows.append(
            {
                "benchmark": benchmark.name,
                "action": benchmark.action,
                "threshold": str(benchmark.threshold),
                "examples": int(here.sum()),
                "short": int((words[here] < GRAM).sum()),
                "template": int(((examples.own[examples.whole] == 0) & (words > 0))[here].sum()),
                "flagged": flagged,
                "confirmed": confirmed,
                "precision": confirmed / flagged if flagged else None,
                "documents": documents.get(number, 0),
                "dropped": documents.get(number, 0) if benchmark.action == "drop" else 0,
            }
        )
    write_table(pa.Table.from_pylist(rows, _REPORT), job.file(REPORT, item))


def report_ratios(job: CurationJob, item: int) -> None:
    """Write how many examples reach each tenth, over the corpus and in one document."""
    facts = _facts(job)
    examples, rows = facts.examples, []
    for number, benchmark in enumerate(job.recipe.curate.decontaminate):
        here = examples.benchmark[examples.whole] == number
        for tenth in range(1, 11):
            corpus = _any(facts, (10 * facts.corpus >= tenth * examples.words) & (examples.words > 0))
            document = _any(facts, (10 * facts.best.words >= tenth * examples.own) & (examples.own > 0))
            counts = {"corpus": int(corpus[here].sum()), "document": int(document[here].sum())}
            rows.append({"benchmark": benchmark.name, "ratio": tenth / 10, **counts, "examples": int(here.sum())})
    write_table(pa.Table.from_pylist(rows, _RATIOS), job.file(RATIOS, item))


def report_examples(job: CurationJob, item: int) -> None:
    """Write the examples that the corpus holds some of: by benchmark, those with the largest ratio first."""
    facts, benchmarks = _facts(job), job.recipe.curate.decontaminate
    examples, best = facts.examples, facts.best
    first = np.searchsorted(examples.benchmark[examples.whole], np.arange(len(benchmarks)))
    ratio, share = facts.corpus / np.maximum(1, examples.words), best.words / np.maximum(1, examples.own)
    ranked = np.lexsort((examples.words, ratio, share, facts.flagged, facts.confirmed, examples.example))
    most = ranked[np.diff(examples.example[ranked], append=len(ranked)) != 0]
    chosen = most[facts.corpus[most] > 0]
    order = chosen[np.lexsort((chosen, -ratio[chosen], examples.benchmark[chosen]))]
    rows = [
        {
            "benchmark": benchmarks[examples.benchmark[place]].name,
            "example": int(examples.example[place] - first[examples.benchmark[place]]),
            "words": int(examples.words[place]),
            "ratio": float(ratio[place]),
            "document": best.ids[place],
            "document_ratio": float(share[place]),
            "run": int(facts.run[place]),
            "confirmed": bool(facts.confirmed[place]),
            "excerpt": facts.excerpt[place],
        }
        for place in order.tolist()
    ]
    write_table(pa.Table.from_pylist(rows, _EXAMPLES), job.file(EXAMPLES, item))


_BATCH = 2048
"""Documents whose text is in memory at a time."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that it maps numbers to distinct keys all over the range of hashes."""
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
"""Three kinds of findings: `gram` (its hash is the key) occurs; `best` document of example `item` covers so many of its
own words; `document` contains an example of benchmark `item`."""


def decontaminate(runner: Runner, job: CurationJob) -> None:
    """Run all sub-steps; leaves drops in `contaminated/drop` and tables for people in three steps of one file each.

    Tables: `contaminated/report` (one line a benchmark), `contaminated/ratios` (examples by ratio, to choose thresholds
    by) and `contaminated/examples` (those that the corpus holds some of). Without benchmarks it does nothing. Raises
    ValueError if a benchmark cannot be read.
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
    """Look for all examples in the documents of a shard that no earlier step has dropped."""
    shard, benchmarks = job.shards[item], job.recipe.curate.decontaminate
    wanted = wanted_in(job)
    found, stamp, alive = nothing_found(wanted), 0, _alive(job, shard)
    documents, sets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for batch in pq.ParquetFile(shard.text).iter_batches(_BATCH, columns=["row", "text"]):
        rows = batch["row"].to_numpy()
        use = np.isin(rows, alive).astype(np.uint8)
        contains = np.zeros((len(rows), len(benchmarks)), np.uint8)
        stamp = scan(*text_buffers(batch["text"]), rows.copy(), use, wanted, found, stamp, contains)
        document, number = np.nonzero(contains)
        documents.append(rows[document])
        sets.append(number)
    tables = [_grams(wanted, found), _best(found, shard), _documents(np.concatenate(documents), np.concatenate(sets))]
    order = [(name, "ascending") for name in ("key", "kind", "item")]
    write_table(pa.concat_tables(tables).sort_by(order), job.file(MAP, item))


def _alive(job: CurationJob, shard: Shard) -> Offsets:
    with job.session() as connection:
        query = job.survivors(shard, "contaminated", '"row"')
        rows: Offsets = connection.sql(query).to_arrow_table()["row"].to_numpy()
    return rows


def _grams(wanted: NgramIndex, found: NgramMatches) -> pa.Table:
    """Return a row for each gram that the shard holds."""
    slots, where, _ = wanted.table
    used = slots != 0
    keys = slots[used][found.seen[where[used]] == 1]
    return _rows("gram", keys, np.zeros(len(keys), np.int64))


def _best(found: NgramMatches, shard: Shard) -> pa.Table:
    """Return the best document of each example that any document covers some of."""
    examples = np.flatnonzero(found.best)
    known = pq.read_table(shard.text, columns=["row", "id"])
    places = np.searchsorted(known["row"].to_numpy(), found.best_row[examples])
    ids = known["id"].take(pa.array(places))
    return _rows(
        "best", _keys(examples), examples, found.best[examples].astype(np.int64), found.best_row[examples], ids
    )


def _documents(rows: Offsets, benchmarks: Offsets) -> pa.Table:
    return _rows("document", _keys(rows), benchmarks, rows=rows)


def _keys(numbers: Offsets) -> Hashes:
    keys: Hashes = numbers.astype(np.uint64) * _SPREAD
    return keys


def _rows(
    kind: str,
    keys: Hashes,
    items: Offsets,
    words: Offsets | None = None,
    rows: Offsets | None = None,
    ids: object = None,
) -> pa.Table:
    none = np.full(len(keys), -1, np.int64)
    words, rows = none if words is None else words, none if rows is None else rows
    ids = pa.array([""] * len(keys), pa.string()) if ids is None else ids
    return pa.table([keys, pa.array([kind] * len(keys), pa.string()), items, words, rows, ids], schema=_FOUND)


def drop_documents(job: CurationJob, part: int) -> None:
    """Drop the documents that contain an example of a benchmark whose action is to drop."""
    benchmarks = enumerate(job.recipe.curate.decontaminate)
    dropping = [number for number, benchmark in benchmarks if benchmark.action == "drop"]
    with job.session() as connection:
        query = f"""SELECT DISTINCT "row", 'contaminated' AS outcome, NULL::VARCHAR AS kept
            FROM ({rows_of_part(job, MAP, part)})
            WHERE kind = 'document' AND list_contains({dropping}::BIGINT[], item)"""
        write_drops(connection, query, job, "contaminated", part)


def reduce_found(job: CurationJob, part: int) -> None:
    """Join the findings of all shards: each gram once, the best document of each example, documents by benchmark."""
    rows = rows_of_part(job, MAP, part)
    query = f"""SELECT DISTINCT * FROM ({rows}) WHERE kind = 'gram'
        UNION ALL SELECT * FROM ({rows}) WHERE kind = 'best'
            QUALIFY row_number() OVER (PARTITION BY item ORDER BY words DESC, id, "row") = 1
        UNION ALL SELECT min(key), kind, item, count(*), -1, '' FROM ({rows})
            WHERE kind = 'document' GROUP BY kind, item"""
    with job.session() as connection:
        write_by_key(connection, query, job, FOUND, part)
