"""Account for every document: counts by domain, source and outcome, and tables for the report page.

The ledger counts documents, bytes and words shard by shard, and adds what reading skipped. It sums to everything read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from herd.llama3.data.mapreduce import CurationJob, aggregate, documents_of, hash_and_id, schema_of
from herd.llama3.data.readers.code import LEFT_OUT
from herd.llama3.data.work_items import Runner, read_table, write_table
from herd.llama3.data.write_shards import SPANS
from herd.llama3.data.write_shards import STEP as WRITTEN
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.data_schema import few_held_out
from herd.storage.files import file_names, open_file

if TYPE_CHECKING:
    from herd.llama3.data.filters import Broken

STEP = "ledger"
KEPT = ("kept", "held_out")
LARGEST = "minhash/largest"
"""Step with the largest groups of near duplicates, each a kept document and its copies: cluster (id of the kept one),
documents, rows of the kept document and of the least similar copy, and the Jaccard of the two."""
_ATTRIBUTES = (
    "row", "id", "domain", "source", "language", "url", "license", "date", "topic", "rank", "bytes", "words", "draw",
)  # fmt: skip
_NO_CLUSTERS = schema_of("cluster string, documents int64, kept_row int64, copy_row int64, jaccard float64")
SCHEMA = schema_of(
    "domain string, source string, step string, outcome string, documents int64, bytes int64, words int64"
)
"""`step` is `read` (skipped by the reader), the name of a stage, or `written`. Bytes and words: of the text after
extraction and before lines are removed; for skipped input, raw bytes and no words."""
FINDINGS = "report"
"""Folder of the report tables in a curated artifact: `lengths` (histogram by domain), `languages`, `samples`,
`clusters` (the largest groups of near duplicates, with examples) and the tables of the stages."""
SAMPLES = "samples"
LENGTHS = "lengths"
"""Step with documents by language, length (power of two of bytes) and outcome, and what was written of them."""
EXAMPLES = 8
"""Samples per domain and outcome."""
EXCERPT = 1200
"""Characters of a document in the report."""
HEAVY_BYTES, HEAVY_DOCUMENTS, LONGER, LEAST_DROPPED = 0.1, 0.5, 5, 5
CLUSTERS = 20
"""Groups of near duplicates in the report."""
_LEDGER = """SELECT domain, source, step, outcome, sum(documents)::BIGINT AS documents, sum(bytes)::BIGINT AS bytes,
        sum(words)::BIGINT AS words
    FROM rows GROUP BY ALL ORDER BY ALL"""
_LENGTHS = """SELECT domain, language, log2_bytes, outcome, sum(documents)::BIGINT AS documents,
        sum(bytes)::BIGINT AS bytes, sum(written)::BIGINT AS written, sum(lines)::BIGINT AS lines,
        sum(inside)::BIGINT AS inside, sum(redacted)::BIGINT AS redacted
    FROM rows GROUP BY ALL ORDER BY ALL"""
_SAMPLES = f"""FROM rows QUALIFY row_number() OVER (PARTITION BY domain, outcome ORDER BY draw, id, url) <= {EXAMPLES}
    ORDER BY domain, outcome, draw, id, url"""
EXPLAINED = {
    "kept": "Trained on.",
    "held_out": "Kept out of training for evaluation, chosen by a hash of the text.",
    "over_limit": "Exceeds the limit of its source.",
    "passed_over": "A file that is not data (name with . or _ at the beginning, README, checksum), or named by ignore.",
    **LEFT_OUT,
    "unknown_format": "A file with an unknown extension.",
    "not_a_file": "A pipe, a device or a broken link.",
    "truncated_file": "In a damaged file; the whole lines before the damage were read.",
    "no_page": "A record of a web archive that is not a page of text: an image, an error, a redirect.",
    "bad_csv": "A row with other columns than the first row, or with an unclosed quote.",
    "doubled_column": "In a file with two columns of the same name.",
    "too_deep": "Markup nested deeper, or with more attributes, than any real page.",
    "too_slow": "Markup that took longer than the time limit per document.",
    "bad_json": "A line that is not a JSON object.",
    "bad_utf8": "A line that is not UTF-8.",
    "no_text_field": "A record without the text field.",
    "not_text": "A record whose text is not a string.",
    "empty": "No text is left after extraction and normalization.",
    "line_too_long": "A line longer than the reader accepts.",
}
"""Outcome of reading and writing -> explanation; stages explain theirs."""
REMEDIES = {
    "held_out": "lower curate.validation_fraction",
    "blocked_host": "shorten curate.block",
    "wrong_language": "add to curate.languages",
    "old_version": "loosen curate.dedup",
    "near_duplicate": "loosen curate.dedup",
    "contaminated": "loosen curate.decontaminate",
    "topic_cap": "loosen curate.topics",
    "emptied": "loosen curate.lines",
}
"""Outcome that took most documents -> what to change; the rules of `curate.quality` have the other outcomes."""


def account_shard(job: CurationJob, index: int) -> None:
    """Count the documents of a piece by source and outcome and by length, and choose samples of every outcome."""
    written = job.read(WRITTEN, index)
    query = """SELECT attributes.*, fates.step, fates.outcome, fates.kept AS kept_id, written, lines, inside, redacted,
            spans
        FROM attributes JOIN (
            SELECT "row", step, outcome, kept, 0 AS written, 0 AS lines, 0 AS inside, 0 AS redacted, NULL AS spans
            FROM fates
            UNION ALL SELECT "row", 'written', outcome, NULL, bytes, lines, inside, redacted, spans FROM written)
            AS fates
        USING ("row")"""
    attributes = job.attributes(index, _ATTRIBUTES)
    documents = job.query(query, attributes=attributes, fates=job.fates(index, "end"), written=written)
    ledger = "SELECT *, 1 AS documents FROM documents"
    lengths = "SELECT *, floor(log2(greatest(bytes, 1)))::INTEGER AS log2_bytes, 1 AS documents FROM documents"
    job.write(LENGTHS, index, job.query(_LENGTHS.replace("rows", f"({lengths})"), documents=documents))
    # The smallest draws, so that a second run shows the same documents.
    chosen = job.query(_SAMPLES.replace("rows", "documents"), documents=documents)
    texts = documents_of(job, index, chosen["row"].to_numpy(), ("text",))
    query = f"""SELECT domain, step, outcome, source, language, url, license, date, id, kept_id, topic, rank, bytes,
            words, draw, left(text, {EXCERPT}) AS excerpt
        FROM chosen JOIN texts USING ("row") ORDER BY ALL"""
    job.write(SAMPLES, index, job.query(query, chosen=chosen, texts=texts))
    table = job.query(_LEDGER.replace("rows", f"({ledger})"), documents=documents)
    write_drops(job, index, documents.rename_columns({"kept_id": "kept"}))
    job.write(STEP, index, table.cast(SCHEMA))


def write_ledger(runner: Runner, job: CurationJob, skipped: str, path: Path) -> pa.Table:
    """Write the ledger of the job and of what reading skipped to `path`, and return it.

    Raises AssertionError if a document is missing from it or counted twice.
    """
    job.each_shard(runner, STEP, account_shard)
    counted = aggregate(runner, job, STEP, len(job.shards), _LEDGER)
    left_out = read_table(skipped)
    read = """SELECT domain, source, 'read' AS step, reason AS outcome, documents, bytes, 0 AS words FROM left_out
        UNION ALL SELECT domain, source, step, outcome, documents, bytes, words FROM counted"""
    ledger = job.query(_LEDGER.replace("rows", f"({read})"), counted=counted, left_out=left_out)
    ledger = ledger.cast(SCHEMA).combine_chunks()
    assert sum(row["documents"] for row in counted.to_pylist()) == sum(shard.documents for shard in job.shards)
    pq.write_table(ledger, path, compression="zstd")
    return ledger


def summarize_ledger(runner: Runner, job: CurationJob, ledger: pa.Table) -> dict[str, Any]:
    """Return the metadata of the artifact, mostly by domain: documents and bytes to train on, held out, read, cut."""
    ledger_rows = ledger.to_pylist()
    lengths = aggregate(runner, job, LENGTHS, len(job.shards), _LENGTHS).to_pylist()
    domains = list(job.recipe.sources)

    def documents(domain: str, outcome: str | None = None) -> int:
        rows = (row for row in ledger_rows if row["domain"] == domain and outcome in (None, row["outcome"]))
        return sum(row["documents"] for row in rows)

    def total(column: str, domain: str, outcome: str | None = None) -> int:
        rows = (row for row in lengths if row["domain"] == domain and outcome in (None, row["outcome"]))
        return sum(row[column] for row in rows)

    languages: Counter[str] = Counter()
    for row in lengths:
        if row["outcome"] == "kept":
            languages[row["language"]] += row["documents"]
    return {
        "documents": {domain: documents(domain, "kept") for domain in domains},
        "bytes": {domain: total("written", domain, "kept") for domain in domains},
        "held_out": {domain: documents(domain, "held_out") for domain in domains},
        "held_out_bytes": {domain: total("written", domain, "held_out") for domain in domains},
        "read": {domain: documents(domain) for domain in domains},
        "lines_removed": {domain: total("lines", domain) for domain in domains},
        "lines_inside": {domain: total("inside", domain) for domain in domains},
        "redacted": {domain: total("redacted", domain) for domain in domains},
        "languages": dict(sorted(languages.items())),
        "heavy_rules": heavy_rules(ledger_rows),
    }


def check_not_empty(metadata: dict[str, Any], ledger: pa.Table) -> None:
    """Raise ValueError if a domain has documents but none to train on; the message lists their outcomes."""
    for domain, kept in metadata["documents"].items():
        if metadata["read"][domain] and not kept:
            outcomes = [row for row in ledger.to_pylist() if row["domain"] == domain]
            reasons = ", ".join(f"{row['outcome']} {row['documents']:,}" for row in outcomes)
            decided = [row for row in outcomes if row["step"] != "read"] or outcomes
            most = str(max(decided, key=lambda row: row["documents"])["outcome"])
            usual = f"loosen curate.{'scores' if most.startswith('score_') else 'quality'}"
            remedy = REMEDIES.get(most, usual)
            raise ValueError(f"sources.{domain}: nothing is left to train on ({reasons}); {remedy}")


def heavy_rules(ledger: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line for each rule that drops much of a domain, or long documents, with the fields that change it.

    Much is HEAVY_BYTES of the bytes that were read or HEAVY_DOCUMENTS of the documents. Published bounds were found on
    web pages of a few kB: of documents LONGER times as long as the kept ones they say little.
    """
    from herd.llama3.data.filters import fields_of

    rows, lines = list(ledger), []
    for domain in dict.fromkeys(row["domain"] for row in rows):
        amounts: dict[str, list[int]] = {}
        for row in rows:
            if row["domain"] == domain and row["step"] != "read":
                outcome = row["outcome"] if row["step"] == "filter" else "kept" if row["outcome"] in KEPT else ""
                documents, size = amounts.get(outcome, (0, 0))
                amounts[outcome] = [documents + row["documents"], size + row["bytes"]]
        read, total = (sum(amount[place] for amount in amounts.values()) for place in (0, 1))
        kept = amounts.pop("kept", [0, 0])
        amounts.pop("", None)
        for outcome, (documents, size) in amounts.items():
            longer = size * kept[0] / max(documents * kept[1], 1) if outcome != "too_long" else 0
            if documents >= LEAST_DROPPED and (
                size > HEAVY_BYTES * total or documents > HEAVY_DOCUMENTS * read or longer > LONGER
            ):
                fields = ", ".join(f"curate.{field}" for field in fields_of(outcome))
                length = f", {longer:.0f} times as long as the kept ones" if longer > LONGER else ""
                lines.append(
                    f"{domain}: {outcome} drops {documents:,} of {read:,} documents and {size / max(total, 1):.0%} of "
                    f"the bytes{length}; read some of them, and change {fields} if they are good"
                )
    return lines


def scarce_domains(metadata: dict[str, Any]) -> list[str]:
    """Return a line for each domain with documents to train on and too few held out to judge a model by."""
    domains = [domain for domain, kept in metadata["documents"].items() if kept]
    amounts = ((domain, metadata["held_out"][domain], metadata["held_out_bytes"][domain]) for domain in domains)
    return [line for amount in amounts if (line := few_held_out(*amount))]


def write_findings(runner: Runner, job: CurationJob, folder: Path) -> None:
    """Write the report tables of a finished job into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = aggregate(runner, job, LENGTHS, len(job.shards), _LENGTHS)
    lengths = """SELECT domain, log2_bytes, outcome = 'kept' AS kept, sum(documents)::BIGINT AS documents,
            sum(bytes)::BIGINT AS bytes
        FROM counts GROUP BY ALL ORDER BY ALL"""
    languages = """SELECT domain, language, sum(documents)::BIGINT AS documents, sum(bytes)::BIGINT AS bytes
        FROM counts WHERE outcome = 'kept' GROUP BY ALL ORDER BY domain, bytes DESC, language"""
    write_table(job.query(lengths, counts=counts), folder / "lengths.parquet")
    write_table(job.query(languages, counts=counts), folder / "languages.parquet")
    samples = aggregate(runner, job, SAMPLES, len(job.shards), _SAMPLES)
    write_table(samples, folder / "samples.parquet")
    write_table(_clusters(job), folder / "clusters.parquet")
    for stage in job.stages:
        for step, name in stage.tables.items():
            for number, file in enumerate(job.files(step)):
                assert number == 0, f"{step} left more than one file"
                write_table(read_table(file), folder / f"{name}.parquet")


def _clusters(job: CurationJob) -> pa.Table:
    """Return the largest groups of near duplicates, with the text of the kept document and the least similar copy."""
    clusters = _NO_CLUSTERS.empty_table()
    for file in job.files(LARGEST):
        clusters = read_table(file).cast(_NO_CLUSTERS)
    rows = np.concatenate([clusters[name].to_numpy() for name in ("kept_row", "copy_row")])
    documents: dict[int, dict[str, str]] = {}
    for index in np.unique(job.piece_of(rows)).tolist():
        table = documents_of(job, index, rows, ("domain", "url", "text"))
        excerpts = pc.utf8_slice_codeunits(table["text"], 0, EXCERPT).cast(pa.string())
        table = table.set_column(table.column_names.index("text"), "excerpt", excerpts)
        documents.update((row["row"], row) for row in table.to_pylist())
    for name in ("kept", "copy"):
        shown = [documents[row] for row in clusters[f"{name}_row"].to_pylist()]
        for column in ("domain", "url", "excerpt"):
            values = pa.array([document[column] for document in shown], pa.string())
            clusters = clusters.append_column(f"{name}_{column}", values)
    return clusters.drop_columns(["kept_row", "copy_row"])


# Why a document is not, or not whole, in the training data: `drops/<shard>.parquet` has a row for each one that a step
# dropped or changed, by id in each piece. DuckDB: `SELECT outcome, count(*) FROM 'drops/*.parquet' GROUP BY ALL`.

DROPS = "drops"
DROPPED = schema_of(
    "id string, url string, domain string, source string, language string, step string, outcome string, field string, "
    "value double, bound double, kept string, bytes int64, lines int64, redacted int64"
).append(pa.field("spans", SPANS))
"""`step` and `outcome` as in the ledger; `field`: the bound of `curate.quality` that the document broke, with its
`value`; `kept`: id of the document kept instead; `lines`, `redacted`: lines removed from a document that stays, and
replacements of personal data in it; `spans`: where they are in the text as it was read, the first MOST_SPANS of either
kind (see `write_shards.SPANS`)."""
LEAST = 8
"""Characters of an id that identify a document."""


def write_drops(job: CurationJob, index: int, documents: pa.Table) -> None:
    """Write the rows of a piece; `documents` has the columns of DROPPED but the broken bound, one row per document."""
    changed = pc.or_(pc.greater(documents["lines"], 0), pc.greater(documents["redacted"], 0))
    rows = documents.filter(pc.or_(pc.invert(pc.is_in(documents["outcome"], pa.array(KEPT))), changed))
    rows = rows.take(pc.sort_indices(rows, sort_keys=[("id", "ascending"), ("url", "ascending")]))
    dropped = rows.filter(pc.equal(rows["step"], "filter"))
    found = _broken(job, index, dropped) if len(dropped) else {}
    pairs = zip(rows["id"].to_pylist(), rows["step"].to_pylist(), strict=True)
    bounds = [found.get(name) if step == "filter" else None for name, step in pairs]
    for place, name in enumerate(("field", "value", "bound")):
        values = [None if bound is None else bound[place] for bound in bounds]
        rows = rows.append_column(name, pa.array(values, DROPPED.field(name).type))
    job.write(DROPS, index, rows.select(DROPPED.names).cast(DROPPED))


def _broken(job: CurationJob, index: int, dropped: pa.Table) -> dict[str, Broken | None]:
    """Return by id the broken bound of the documents that a rule dropped; None for rules without a bound."""
    from herd.llama3.data.filters import broken_bounds

    attributes = job.attributes(index)
    attributes = attributes.filter(pc.is_in(attributes["id"], dropped["id"].combine_chunks()))
    outcomes = dict(zip(dropped["id"].to_pylist(), dropped["outcome"].to_pylist(), strict=True))
    ids = attributes["id"].to_pylist()
    documents = attributes.append_column("outcome", pa.array([outcomes[id_] for id_ in ids], pa.string()))
    return dict(zip(ids, broken_bounds(job.recipe.curate, documents), strict=True))


def find_documents(folder: str, asked: str) -> Iterator[dict[str, Any]]:
    """Yield what is known of the documents that `asked` names, in the curated data at `folder` (a path or URI).

    `asked` is an id or its first LEAST digits, a URL, or a text. Rows have the columns of DROPPED; that of a document
    that stays as it is has no bound and no counts.
    """
    from herd.llama3.data.text.normalize import normalize  # imports numba

    text = normalize(asked).encode("utf-8", "replace")
    ids = {hash_and_id(text, domain.encode())[1] for domain in DOMAINS} | {asked.strip().lower()}
    seen = set[str]()
    for name in file_names(f"{folder}/{DROPS}"):
        for row in _matching(f"{folder}/{DROPS}/{name}", ids, asked, DROPPED.names):
            if row["outcome"] in KEPT:
                seen.add(row["id"])
            yield row
    columns = ["id", "url", "domain", "source", "language", "split"]
    for name in file_names(f"{folder}/documents"):
        for row in _matching(f"{folder}/documents/{name}", ids, asked, columns):
            if row["id"] not in seen:
                yield {
                    **dict.fromkeys(DROPPED.names),
                    **row,
                    "step": "written",
                    "outcome": "kept" if row["split"] == "train" else row["split"],
                }


def text_as_read(collected: str, id: str, domain: str) -> str:
    """Return the text of the document to which the `spans` of its row refer; "" if it is not there.

    `collected` is the path or URI of the collected artifact.
    """
    from herd.llama3.data.collect import TEXT  # imports numba

    for name in file_names(f"{collected}/{TEXT}"):
        if name.startswith(f"{domain}-"):
            for row in _matching(f"{collected}/{TEXT}/{name}", {id}, None, ["text"]):
                return str(row["text"])
    return ""


def _matching(uri: str, ids: set[str], asked: str | None, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows with one of the ids, an id that begins with `asked`, or its URL; row groups are left out by id."""
    with pq.ParquetFile(open_file(uri)) as file:
        place = file.schema_arrow.names.index("id")
        for number in range(file.num_row_groups):
            range_ = file.metadata.row_group(number).column(place).statistics
            if asked is None and range_ and not any(range_.min <= id <= range_.max for id in ids):
                continue
            table = file.read_row_group(number, columns=["id", "url"])
            wanted = pc.is_in(table["id"], pa.array(sorted(ids)))
            if asked is not None:
                wanted = pc.or_(wanted, pc.equal(table["url"], asked))
                if len(asked) >= LEAST:
                    wanted = pc.or_(wanted, pc.starts_with(table["id"], asked.strip().lower()))
            if pc.any(wanted).as_py():
                yield from file.read_row_group(number, columns=columns).filter(pc.fill_null(wanted, False)).to_pylist()
