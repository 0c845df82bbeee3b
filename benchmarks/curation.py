"""Rows about curation on real text beside the checkout: what its rules drop of one book in each of its translations,
and how many evaluation questions it finds that stand in a document without their answers.

The folder is HERD_SHARED, or `shared` beside the checkout: `corpora` holds documents as JSON lines, `eval` the sets.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import NotMeasured
from benchmarks.ours.setup import one_shard, write_attributes
from benchmarks.rows import Row, measured
from benchmarks.session import Session
from herd.llama3.data.annotate import document_statistics
from herd.llama3.data.decontam.decontaminate import Decontaminate
from herd.llama3.data.filters import broken_rules
from herd.llama3.data.text.normalize import normalize
from herd.llama3.data.text.words import split_words
from herd.llama3.data.work_items import run_serial
from herd.llama3.recipe.data_schema import Quality

SETS = {"gsm8k": ("gsm8k/test.jsonl", ["question", "answer"]), "mmlu": ("mmlu/test.jsonl", ["question", "choices"])}
"""Evaluation set -> its file below `eval`, and the fields that a recipe would name."""
PLANTED, LEAST_WORDS = 100, 8
"""Questions of each set, and the least words of one: fields with fewer are not looked for alone."""
AROUND = 1_500
"""Characters of other text before and behind a question."""


def dropped(*rules: str) -> Callable[[Session, str], Row]:
    """Return the measure of `rules`, beside our defaults: the bytes that the worst treated translation loses."""

    def measure(run: Session, name: str) -> Row:
        quality = Quality.model_validate({"rules": list(rules)})
        shares = {}
        for path in sorted(shared("corpora/multilingual").glob("progit-*.jsonl.gz")):
            texts = [normalize(document["text"]) for document in documents(path)]
            broken = broken_rules(document_statistics(pa.chunked_array([texts])), quality)
            sizes = [len(text.encode()) for text in texts]
            lost = sum(size for size, rule in zip(sizes, broken, strict=True) if rule)
            shares[path.name.removeprefix("progit-").partition(".")[0]] = 100 * lost / sum(sizes)
        note = ", ".join(f"{language} {share:.1f}" for language, share in shares.items())
        return measured(name, max(shares.values()), f"Pro Git; {note}", languages=shares)

    return measure


def drops_cost(run: Session, name: str) -> Row:
    """How much more CPU collect, annotate and curate take with the ledger of drops."""
    facts = run.cost("ours.drops", "jsonl").facts
    share = 100 * (facts["with"] / facts["without"] - 1)
    note = f"{facts['with']:.2f} CPU s with it, {facts['without']:.2f} without; {facts['bytes'] / 1000:,.0f} kB"
    return measured(name, share, note, **facts)


def questions_found(run: Session, name: str) -> Row:
    """Of questions that stand in other text without their answers, how many of the set with the fewest are found."""
    prose = "\n".join(document["text"] for document in documents(shared("corpora/general/books.jsonl.gz")))
    places = iter(range(0, len(prose), 2 * AROUND))
    shares = {}
    for title, (file, fields) in SETS.items():
        uri = shared(f"eval/{file}")
        rows = (json.loads(line) for line in uri.open(encoding="utf-8"))
        long = (row["question"] for row in rows if len(split_words(row["question"])) >= LEAST_WORDS)
        questions = list(islice(long, PLANTED))
        texts = [
            f"{prose[place : place + AROUND]}\n{question}\n{prose[place + AROUND : place + 2 * AROUND]}"
            for question, place in zip(questions, places, strict=False)
        ]
        folder = run.settings.folder / f"questions-{title}"
        folder.mkdir()
        shares[title] = 100 * _found(texts, {"name": title, "uri": str(uri), "fields": fields}, folder) / len(texts)
    note = ", ".join(f"{title} {share:.0f}" for title, share in shares.items())
    return measured(name, min(shares.values()), f"{PLANTED} questions of each; {note}", sets=shares)


def _found(texts: list[str], benchmark: dict[str, Any], folder: Path) -> int:
    documents = pa.table({"row": range(len(texts)), "id": [f"{n:05}" for n in range(len(texts))], "text": texts})
    source = folder / "text.parquet"
    pq.write_table(documents, source)
    job = one_shard(source, folder, {"decontaminate": [benchmark]}, Decontaminate())
    write_attributes(job, documents)
    Decontaminate().run(run_serial, job)
    return len(job.fates(0, "end"))


def documents(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of compressed JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def shared(name: str) -> Path:
    """Return a file or folder of the real text. Raises NotMeasured where it is not there."""
    path = Path(os.environ.get("HERD_SHARED", Path(__file__).parents[2] / "shared")) / name
    if not path.exists():
        raise NotMeasured(f"there is no {path}; set HERD_SHARED to a folder with corpora and eval")
    return path
