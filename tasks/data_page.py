"""The data page of a report: where every document went, what was found, and documents to look at.

A query over the curated and tokens artifacts, like the rest of the report; tables that a run lacks are left out.
Token counts of documents that were never tokenised are estimates from the domain's bytes per token, and say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from llama3.data.findings import FINDINGS
from llama3.data.ledger import KEPT
from llama3.data.outcomes import explain
from llama3.recipe.section import DOMAINS
from storage.artifact import Artifact

Row = dict[str, Any]
STEPS = ("read", "filter", "url", "exact", "near", "contaminated", "topic", "written")
TITLES = {
    "read": "not read",
    "filter": "rules",
    "url": "older versions",
    "exact": "exact copies",
    "near": "near copies",
    "contaminated": "evaluation sets",
    "topic": "topic caps",
    "written": "lines removed",
}


COUNTS = ("read", "read_bytes", "kept", "kept_bytes", "held_out", "held_out_bytes")


@dataclass(frozen=True)
class Outcome:
    """One line of the table of documents: an outcome, and (documents, bytes) of it by domain."""

    name: str
    step: str
    meaning: str
    domains: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class FunnelStep:
    """What one step took in and gave on, over all domains."""

    title: str
    documents: int
    dropped: int
    bytes: int
    dropped_bytes: int
    dropped_tokens: float | None
    """About; None where no tokenizer is known yet."""


@dataclass(frozen=True)
class DataPage:
    run: str
    outcomes: list[Outcome]
    funnel: list[FunnelStep]
    sources: list[Row]
    lengths: list[Row]
    languages: list[Row]
    clusters: list[Row]
    lines: list[Row]
    contamination: list[Row]
    ratios: dict[str, list[Row]]
    """Evaluation set -> examples with at least each ratio."""
    contaminated: list[Row]
    samples: dict[str, dict[str, list[Row]]]
    """Domain -> outcome -> documents."""
    facts: dict[str, Any]
    fertility: dict[str, Any]
    domains: tuple[str, ...] = DOMAINS


def data_page(run: str, curated: Artifact, tokenizer: Artifact | None) -> DataPage:
    """Gather the data page of `run` from its artifacts."""
    ledger = pq.read_table(curated.path / "ledger.parquet").to_pylist()
    facts = tokenizer.facts if tokenizer else {}
    return DataPage(
        run=run,
        outcomes=_outcomes(ledger),
        funnel=_funnel(ledger, facts.get("bytes_per_token", {})),
        sources=_sources(ledger),
        samples=_samples(_table(curated, "samples")),
        lengths=_table(curated, "lengths"),
        languages=_table(curated, "languages"),
        clusters=_table(curated, "clusters"),
        lines=_table(curated, "lines"),
        contamination=_table(curated, "contamination"),
        ratios={
            name: list(rows) for name, rows in groupby(_table(curated, "ratios"), key=lambda row: str(row["benchmark"]))
        },
        contaminated=_table(curated, "contaminated"),
        facts=curated.facts,
        fertility=facts,
    )


def _table(curated: Artifact, name: str) -> list[Row]:
    path: Path = curated.path / FINDINGS / f"{name}.parquet"
    rows: list[Row] = pq.read_table(path).to_pylist() if path.is_file() else []
    return rows


def _outcomes(ledger: list[Row]) -> list[Outcome]:
    """Return the outcomes in the order of the steps; what is kept comes first."""
    order = {"kept": -2, "held_out": -1}
    ledger = sorted(ledger, key=lambda line: (order.get(line["outcome"], STEPS.index(line["step"])), line["outcome"]))
    found = []
    for (outcome, step), lines in groupby(ledger, key=lambda line: (line["outcome"], line["step"])):
        domains: dict[str, tuple[int, int]] = {}
        for line in lines:
            documents, size = domains.get(line["domain"], (0, 0))
            domains[line["domain"]] = (documents + line["documents"], size + line["bytes"])
        found.append(Outcome(outcome, step, explain(outcome), domains))
    return found


def _funnel(ledger: list[Row], bytes_per_token: dict[str, float]) -> list[FunnelStep]:
    documents, size = sum(line["documents"] for line in ledger), sum(line["bytes"] for line in ledger)
    steps = []
    for step in STEPS:
        gone = [line for line in ledger if line["step"] == step and line["outcome"] not in KEPT]
        dropped, dropped_bytes = sum(line["documents"] for line in gone), sum(line["bytes"] for line in gone)
        if dropped:
            tokens = [line["bytes"] / bytes_per_token[line["domain"]] for line in gone if bytes_per_token]
            about = sum(tokens) if tokens else None
            steps.append(FunnelStep(TITLES[step], documents, dropped, size, dropped_bytes, about))
        documents, size = documents - dropped, size - dropped_bytes
    return steps


def _sources(ledger: list[Row]) -> list[Row]:
    """Return read, kept and held-out documents and bytes by source; kept means the same as in the outcomes."""
    sources: dict[tuple[str, str], Row] = {}
    for line in ledger:
        key = (line["domain"], line["source"])
        row = sources.setdefault(key, {"domain": key[0], "source": key[1], **dict.fromkeys(COUNTS, 0)})
        for name in ("read", *({line["outcome"]} & set(KEPT))):
            row[name] += line["documents"]
            row[f"{name}_bytes"] += line["bytes"]
    return sorted(sources.values(), key=lambda row: (DOMAINS.index(row["domain"]), -row["read_bytes"], row["source"]))


def _samples(rows: list[Row]) -> dict[str, dict[str, list[Row]]]:
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault(row["domain"], {}).setdefault(row["outcome"], []).append(row)
    return {
        domain: dict(sorted(found[domain].items(), key=lambda item: (item[0] not in KEPT, item[0])))
        for domain in DOMAINS
        if domain in found
    }
