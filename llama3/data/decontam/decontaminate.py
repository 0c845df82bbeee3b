"""Decontamination: find evaluation examples in documents, drop the documents that contain them, report overlap.

The measure of arXiv 2407.21783, section 5.1.4: a word of an example is contaminated if it is in an 8-gram that occurs
in the training text; the ratio of an example is its share of contaminated words. Over the whole corpus, common phrases
of a thousand documents add up, so a document is dropped only if it covers an example up to the threshold *alone*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from herd.llama3.data.decontam.ngrams import GRAM, STEP, EvalExamples, ngram_index, thresholds, write_benchmarks
from herd.llama3.data.kernels.arrow import Offsets, text_buffers
from herd.llama3.data.kernels.ngrams import empty_matches, scan
from herd.llama3.data.mapreduce import (
    DROP_SCHEMA,
    CurationJob,
    CurationStage,
    add_fates,
    aggregate,
    documents_of,
    schema_of,
)
from herd.llama3.data.text.words import BARE_WORD
from herd.llama3.data.work_items import Runner, read_table, run_step, write_table
from herd.llama3.recipe.data_schema import Curate

MATCHED, FLAGGED, VERIFIED = "contaminated/matched", "contaminated/flagged", "contaminated/verified"
REPORT, RATIOS, EXAMPLES = "contaminated/report", "contaminated/ratios", "contaminated/examples"
RUN = 13
"""Words in a row that example and document must share to confirm a flag."""
_EXCERPT = 300
_LOWER = {upper: upper + 32 for upper in range(0x41, 0x5B)}
_MATCHED = schema_of("key uint64, kind string, item int64, words int64, row int64, id string")
"""Rows by kind. `gram`: the gram with hash `key` occurs. `best`: the document that covers most own words
(`BARE_WORD`) of example `item`. `document`: number of documents that contain an example of benchmark `item`."""
_MERGE = """SELECT DISTINCT * FROM rows WHERE kind = 'gram'
    UNION ALL SELECT * FROM rows WHERE kind = 'best'
        QUALIFY row_number() OVER (PARTITION BY item ORDER BY words DESC, id, "row") = 1
    UNION ALL SELECT 0::UBIGINT, kind, item, sum(words)::BIGINT, -1, '' FROM rows WHERE kind = 'document'
        GROUP BY kind, item"""
_VERIFIED = schema_of("item int64, words int64, run int64, excerpt string")
_REPORT = schema_of(
    "benchmark string, action string, threshold string, examples int64, short int64, template int64, flagged "
    "int64, confirmed int64, precision float64, documents int64, dropped int64"
)
"""`short`: examples of fewer than 8 words in total; `template`: examples with no own words; `flagged`: examples with a
corpus ratio at or above the threshold, as a whole or in a field; `precision`: confirmed / flagged, null without flags;
`documents`: those that contain an example; `dropped`: the same, or 0 if the action is to report."""
_RATIOS = schema_of("benchmark string, ratio float64, corpus int64, document int64, examples int64")
"""Examples whose ratio over the corpus, or in one document, is at least `ratio`."""
_EXAMPLES = schema_of(
    "benchmark string, example int64, words int64, ratio float64, document string, document_ratio float64, run "
    "int64, confirmed bool, excerpt string"
)
"""`example`: its index in the benchmark; `document`: id of the document that covers most of it, `document_ratio`: the
share. For an example of several fields, the row is that of the field, or of the whole, that documents cover most. `run`
and `excerpt`: longest run of shared words, if it was verified."""


class Decontaminate(CurationStage):
    """Drop the documents that contain an evaluation example, and write three tables of the report.

    Tables: `contaminated/report` (one row per benchmark), `contaminated/ratios` (examples by ratio)
    and `contaminated/examples` (those that the corpus covers in part). Raises ValueError if a benchmark cannot be read.
    """

    name, title, section = "contaminated", "evaluation sets", ("decontaminate",)
    reasons: ClassVar = {"contaminated": "Contains an example of an evaluation set."}
    tables: ClassVar = {REPORT: "contamination", RATIOS: "ratios", EXAMPLES: "contaminated"}

    def enabled(self, curate: Curate) -> bool:
        return bool(curate.decontaminate)

    def files(self, curate: Curate) -> list[str]:
        return [benchmark.uri for benchmark in curate.benchmarks]

    def passes(self, runner: Runner, job: CurationJob) -> None:
        run_step(runner, job, STEP, write_benchmarks, [0])
        job.each_shard(runner, "contaminated/fates", scan_shard)
        matched = aggregate(runner, job, MATCHED, len(job.shards), _MERGE)
        examples = EvalExamples.read(job)
        best = _best_documents(matched, examples)
        chosen = np.flatnonzero(best.words >= examples.least(thresholds(job)))
        write_table(pa.table({"item": chosen, "row": best.rows[chosen]}), job.file(FLAGGED, 0))
        shards = np.unique(job.piece_of(best.rows[chosen]) // job.shard_pieces).tolist()
        job.each_shard(runner, VERIFIED, verify_shard, shards)
        verified = [row for file in job.files(VERIFIED) for row in read_table(file).to_pylist()]
        write_reports(job, matched, verified)


def scan_shard(job: CurationJob, index: int) -> None:
    """Scan the documents of a piece that no earlier step has dropped for all examples, and drop those that contain one.

    The output is bounded by the grams, the examples and the documents that contain one, not by how often a gram occurs.
    """
    benchmarks = job.recipe.curate.benchmarks
    examples = ngram_index(job)
    matches, stamp = empty_matches(examples), 0
    alive = job.survivors(index, "contaminated", ("row",))["row"].to_numpy()
    row_batches, id_batches = [np.zeros(0, np.int64)], [pa.array([], pa.string())]
    contains_batches = [np.zeros((0, len(benchmarks)), np.uint8)]
    for batch in job.texts(index, ["row", "id", "text"]):
        rows = batch["row"].to_numpy()
        use = np.isin(rows, alive).astype(np.uint8)
        contains = np.zeros((len(rows), len(benchmarks)), np.uint8)
        stamp = scan(*text_buffers(batch["text"]), rows.copy(), use, examples, matches, stamp, contains)
        row_batches.append(rows)
        id_batches.append(batch["id"])
        contains_batches.append(contains)
    rows, contains = np.concatenate(row_batches), np.concatenate(contains_batches)
    slots, where, _ = examples.table
    used = slots != 0
    seen = slots[used][matches.seen[where[used]] == 1]
    items = np.flatnonzero(matches.best)
    best_rows = matches.best_row[items]
    best_ids = pa.concat_arrays(id_batches).take(pa.array(np.searchsorted(rows, best_rows)))
    tables = [
        _matches("gram", len(seen), key=seen),
        _matches("best", len(items), item=items, words=matches.best[items], row=best_rows, id=best_ids),
        _matches("document", len(benchmarks), item=np.arange(len(benchmarks)), words=contains.sum(axis=0)),
    ]
    job.write(MATCHED, index, pa.concat_tables(tables))
    dropping = np.array([benchmark.action == "drop" for benchmark in benchmarks], bool)
    dropped = rows[contains[:, dropping].any(axis=1)]
    columns = [dropped, pa.array(["contaminated"] * len(dropped), pa.string()), pa.nulls(len(dropped), pa.string())]
    add_fates("contaminated", job, index, pa.table(columns, schema=DROP_SCHEMA))


def _matches(kind: str, count: int, **columns: Any) -> pa.Table:
    """Return a table of schema _MATCHED; columns that the kind does not have are 0, -1 or ""."""
    missing = np.full(count, -1, np.int64)
    given = {"key": np.zeros(count, np.uint64), "item": missing, "words": missing, "row": missing, **columns}
    ids = given.pop("id", pa.array([""] * count, pa.string()))
    arrays = [given["key"], pa.array([kind] * count, pa.string()), given["item"], given["words"], given["row"], ids]
    return pa.table([pa.array(array) for array in arrays], names=_MATCHED.names).cast(_MATCHED)


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
    example_words = BARE_WORD.findall(example.translate(_LOWER))
    width = min(GRAM, len(example_words))
    positions: dict[tuple[str, ...], list[int]] = {}
    for position in range(len(example_words) - width + 1):
        positions.setdefault(tuple(example_words[position : position + width]), []).append(position)
    matches = list(BARE_WORD.finditer(document.translate(_LOWER)))
    document_words = [match[0] for match in matches]
    covered: set[int] = set()
    longest, end = 0, 0
    before: dict[int, int] = {}
    for at, gram in enumerate(zip(*(document_words[k:] for k in range(width)), strict=False)):
        # before[position] is the length of the run that ends with the gram at `position`
        before = {position: before.get(position - 1, width - 1) + 1 for position in positions.get(gram, ())}
        for position, length in before.items():
            if own[position]:
                covered.update(range(position, position + width))
            if length > longest:
                longest, end = length, at + width
    excerpt = document[matches[end - longest].start() : matches[end - 1].end()] if longest else ""
    return Overlap(len(covered), longest, excerpt[:_EXCERPT])


def verify_shard(job: CurationJob, index: int) -> None:
    """Compare examples with their best document, for those in this piece that cover them up to the threshold."""
    examples, flagged = EvalExamples.read(job), read_table(job.file(FLAGGED, 0))
    here = flagged.filter(pa.array(job.piece_of(flagged["row"]) == index)).to_pylist()
    documents = documents_of(job, index, np.array([flag["row"] for flag in here], np.int64), ("text",)).to_pylist()
    texts = {document["row"]: document["text"] for document in documents}
    verified = []
    for flag in here:
        example = flag["item"]
        grams = ~examples.template[examples.ends[example] : examples.ends[example + 1]]
        shared = overlap(examples.text[example].as_py(), grams.tolist(), texts[flag["row"]])
        verified.append({"item": example, **shared._asdict()})
    job.write(VERIFIED, index, pa.Table.from_pylist(verified, _VERIFIED))


class _BestDocuments(NamedTuple):
    """The best document of each example: own words that it covers (0: no document), its row and id."""

    words: Offsets
    rows: Offsets
    ids: list[str]


def _best_documents(matched: pa.Table, examples: EvalExamples) -> _BestDocuments:
    table = matched.filter(pc.field("kind") == "best")
    count, item = len(examples.words), table["item"].to_numpy()
    covered, rows, ids = np.zeros(count, np.int64), np.full(count, -1, np.int64), [""] * count
    covered[item], rows[item] = table["words"].to_numpy(), table["row"].to_numpy()
    for example, name in zip(item.tolist(), table["id"].to_pylist(), strict=True):
        ids[example] = name
    return _BestDocuments(covered, rows, ids)


def write_reports(job: CurationJob, matched: pa.Table, verifications: list[dict[str, Any]]) -> None:
    """Write the three tables of the report."""
    examples, benchmarks = EvalExamples.read(job), job.recipe.curate.benchmarks
    best, whole = _best_documents(matched, examples), examples.whole
    seen = matched.filter(pc.field("kind") == "gram")["key"].to_numpy()
    corpus = examples.covered(np.isin(examples.grams, seen))  # words in grams that occur in the corpus
    shares = [benchmarks[number].threshold for number in examples.benchmark.tolist()]
    pairs = zip(corpus.tolist(), examples.words.tolist(), shares, strict=True)
    flagged = np.array([count > 0 and hit >= share * count for hit, count, share in pairs], np.bool_)
    verified, run, excerpt = np.zeros(len(flagged), np.int64), np.zeros(len(flagged), np.int64), [""] * len(flagged)
    for row in verifications:
        verified[row["item"]], run[row["item"]], excerpt[row["item"]] = row["words"], row["run"], row["excerpt"]
    enough = (verified >= examples.least(thresholds(job))) & (run >= np.minimum(RUN, examples.words))
    confirmed = flagged & enough & (examples.words >= GRAM)

    # Of each example, the text that documents cover most, by benchmark and falling ratio
    ratio, share = corpus / np.maximum(1, examples.words), best.words / np.maximum(1, examples.own)
    ranked = np.lexsort((examples.words, ratio, share, flagged, confirmed, examples.example))
    most = ranked[np.diff(examples.example[ranked], append=len(ranked)) != 0]
    chosen = most[corpus[most] > 0]
    order = chosen[np.lexsort((chosen, -ratio[chosen], examples.benchmark[chosen]))]
    number = examples.benchmark[order]
    columns = {
        "benchmark": [benchmarks[index].name for index in number.tolist()],
        "example": examples.example[order] - np.searchsorted(examples.benchmark[whole], number),
        "words": examples.words[order],
        "ratio": ratio[order],
        "document": [best.ids[text] for text in order.tolist()],
        "document_ratio": share[order],
        "run": run[order],
        "confirmed": confirmed[order],
        "excerpt": [excerpt[text] for text in order.tolist()],
    }
    write_table(pa.table(columns, schema=_EXAMPLES), job.file(EXAMPLES, 0))

    def count_examples(flags: Any, members: Any) -> int:
        """Return how many of the examples `members` have a text for which `flags` is true."""
        return int(np.logical_or.reduceat(flags, whole)[members].sum())

    counted = matched.filter(pc.field("kind") == "document")
    documents = dict(zip(counted["item"].to_pylist(), counted["words"].to_pylist(), strict=True))
    words, reports, ratios = examples.words[whole], [], []
    for index, benchmark in enumerate(benchmarks):
        members = examples.benchmark[whole] == index
        total = int(members.sum())
        for tenth in range(1, 11):
            in_corpus = count_examples((10 * corpus >= tenth * examples.words) & (examples.words > 0), members)
            in_one = count_examples((10 * best.words >= tenth * examples.own) & (examples.own > 0), members)
            ratios.append((benchmark.name, tenth / 10, in_corpus, in_one, total))
        short = int((words[members] < GRAM).sum())
        only_template = int(((examples.own[whole] == 0) & (words > 0))[members].sum())
        flags, true_flags = count_examples(flagged, members), count_examples(confirmed, members)
        precision = true_flags / flags if flags else None
        hits = documents.get(index, 0)
        dropped = hits if benchmark.action == "drop" else 0
        counts = (total, short, only_template, flags, true_flags, precision, hits, dropped)
        reports.append((benchmark.name, benchmark.action, str(benchmark.threshold), *counts))
    write_table(pa.table(list(zip(*ratios, strict=True)), schema=_RATIOS), job.file(RATIOS, 0))
    write_table(pa.table(list(zip(*reports, strict=True)), schema=_REPORT), job.file(REPORT, 0))
