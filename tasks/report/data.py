"""The data of a report, gathered from the run record, manifests, Parquet files (by DuckDB) and MLflow."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from herd.llama3.data.accounting import FINDINGS, KEPT, heavy_rules, scarce_domains
from herd.llama3.data.readers.files import NO_LOSS
from herd.llama3.evaluate.gate import Decision
from herd.llama3.evaluate.held_out import NGRAM_BPB
from herd.llama3.evaluate.scores import GENERATIONS_FILE, Score, read_scores
from herd.llama3.recipe.base import CONVERSATIONS, DOMAINS
from herd.llama3.recipe.data_schema import Source, few_held_out
from herd.llama3.recipe.load import to_yaml
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.train import metrics
from herd.llama3.train.averaging import Choice
from herd.llama3.train.journal import Series, read_series
from herd.storage.artifact import Artifact
from herd.storage.filesystem import is_local, local_path, split_glob
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.format import format_bytes
from herd.tasks.promotion.log import compared_run, last_promotion
from herd.tasks.report.compare import LOCAL_SERVER, Values, recipe_fields, side_by_side
from herd.tasks.runs.records import RunRecord, Runs
from herd.tasks.tracking.mlflow import MLflowTracker
from herd.tasks.tracking.mlflow_store import run_page, running_server

if TYPE_CHECKING:
    from herd.llama3.data.count import Count  # imports numba

Row = dict[str, Any]
COUNTS = ("read", "read_bytes", "kept", "kept_bytes", "held_out", "held_out_bytes")


@dataclass(frozen=True)
class DropRow:
    """One line of the table of documents: an outcome, and its (documents, bytes) by domain."""

    name: str
    meaning: str
    domains: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class FunnelStep:
    """Documents into one step and dropped by it, over all domains."""

    title: str
    documents: int
    dropped: int
    bytes: int
    dropped_bytes: int
    dropped_tokens: float | None
    """Estimated from bytes per token; None before there is a tokenizer."""


@dataclass(frozen=True)
class DataPage:
    run: str
    outcomes: list[DropRow]
    heavy: list[str]
    """Lines about rules that drop much."""
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
    metadata: dict[str, Any]
    fertility: dict[str, Any]
    domains: tuple[str, ...] = DOMAINS


@dataclass(frozen=True)
class StageRow:
    name: str
    start: int
    end: int
    steps: int
    seq_len: str
    batch: int
    first_loss: float
    last_loss: float
    bits_per_byte: float | None
    """Of held-out text at the stage's end."""
    tokens_per_s: float
    goodput: float | None
    seconds: float
    outcome: str

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class MixRow:
    stage: str
    domain: str
    planned: float
    realized: float
    tokens: int


@dataclass(frozen=True)
class ReportData:
    record: RunRecord
    recipe: Recipe
    recipe_yaml: str
    stages: list[StageRow]
    series: dict[str, Series]
    mix: list[MixRow]
    ledger: dict[str, dict[str, tuple[int, int]]]
    """Outcome -> domain -> (documents, bytes)."""
    page: DataPage | None
    """None until documents are curated."""
    evaluations: dict[str, dict[str, Score]]
    baseline: dict[str, float]
    """Bits per byte of the 5-gram, by the key of the score that it is beside; empty without one."""
    notes: list[str]
    """On scores and weights: averages kept, tasks left out, questions that were too long."""
    samples: list[dict[str, str]]
    """Texts of the final model: of, id, prompt, text, and `champion`, its text for the same prompt."""
    decision: Decision | None
    mlflow: dict[str, str]
    """Tags of the run's MLflow page."""
    links: list[tuple[str, str]] = field(default_factory=list)
    """Name and address of the run's pages on servers."""
    model: str = ""
    """Folder of the final model; empty before there is one."""
    other: str = ""
    """Run to compare with: it was rerun, or its model was the champion; empty: none."""
    differs: Values = field(default_factory=dict)
    """Recipe fields that differ from `other`: its value, and this run's."""
    domains: tuple[str, ...] = DOMAINS

    @property
    def bits_per_byte(self) -> float | None:
        """Overall bits per byte of the final model."""
        scores = self.evaluations.get(self.recipe.stages[-1].name, {})
        return scores["eval/bpb"].value if "eval/bpb" in scores else None


def collect_report_data(root: Root, name: str) -> ReportData:
    """Return the data of run `name`, finished or not. Raises ValueError if there is no such run."""
    runs, store = Runs(root), open_store(root)
    record, recipe = runs.find(name), runs.recipe(name)
    artifacts = {step: store.load(entry.artifact) for step, entry in record.steps.items()}
    trained = [(span, artifacts[span.name]) for span in recipe.schedule.trained if span.name in artifacts]
    series = read_series(artifact.path_of("metrics.parquet") for _, artifact in trained)
    prefix = "evaluate-"
    evaluations = {step.removeprefix(prefix): artifacts[step] for step in artifacts if step.startswith(prefix)}
    champion = evaluations.pop("champion", None)
    if champion is not None and champion.label not in {artifact.label for artifact in evaluations.values()}:
        evaluations["champion"] = champion
    final = evaluations.get(recipe.stages[-1].name)
    page = data_page(name, artifacts["curate"], artifacts.get("tokenizer")) if "curate" in artifacts else None
    outcomes = sorted(
        page.outcomes if page else [], key=lambda row: (row.name != "kept", row.name != "held_out", row.name)
    )
    promotion, tracker = last_promotion(root, record.judged_in or name), MLflowTracker(root, record.family)
    tags = (tracker.tags(record.mlflow_run) if record.mlflow_run else {}) or tracker.noted_tags(name)
    other, differs = compared_run(root, record), Values()
    if other:
        with suppress(ValueError):  # deleted, or of another version
            differs = side_by_side([recipe_fields(runs.recipe(other)), recipe_fields(recipe)])
    return ReportData(
        record=record,
        recipe=recipe,
        recipe_yaml=to_yaml(recipe),
        stages=[_stage_row(span, artifact, series, record.steps[span.name].outcome) for span, artifact in trained],
        series=series,
        mix=[row for span, artifact in trained for row in _mix(span.name, artifact, series)],
        ledger={row.name: row.domains for row in outcomes},
        page=page,
        evaluations={stage: read_scores(artifact.path) for stage, artifact in evaluations.items()},
        baseline={
            key.replace(NGRAM_BPB, "eval/bpb"): value
            for key, value in (final.metadata if final is not None else {}).items()
            if key.startswith(NGRAM_BPB)
        },
        notes=[
            *_conversation_notes(artifacts.get(CONVERSATIONS)),
            *_notes({span.name: artifact for span, artifact in trained}, evaluations, page.metadata if page else None),
        ],
        samples=_samples(final, evaluations.get("champion")),
        decision=promotion.decision if promotion else None,
        mlflow={key: value for key, value in sorted(tags.items()) if value and not key.startswith("mlflow.")},
        links=_links(root, record, tracker.run_id(record.mlflow_run), tags.get("prefect.url", "")),
        model=f"{trained[-1][1].uri.removeprefix('file://')}/model" if trained else "",
        other=other,
        differs=differs,
    )


def _links(root: Root, record: RunRecord, mlflow_run: str, prefect: str) -> list[tuple[str, str]]:
    """Return the run's pages in MLflow and Prefect. Without a server, MLflow's is the one that `herd up` will have."""
    links, server = [], running_server(root)
    if mlflow_run and record.mlflow_experiment:
        address = run_page(server or LOCAL_SERVER, record.mlflow_experiment, mlflow_run)
        links.append(("MLflow" if server else "MLflow, while herd up runs", address))
    if prefect.startswith(("http://", "https://")):
        links.append(("Prefect", prefect))
    return links


def _samples(final: Artifact | None, champion: Artifact | None) -> list[dict[str, str]]:
    """Return what the final model wrote, and, as `champion`, what the champion writes after the same prompt."""

    def written(evaluation: Artifact | None) -> list[dict[str, str]]:
        if evaluation is None:
            return []
        rows: list[dict[str, str]] = json.loads(evaluation.path_of(GENERATIONS_FILE).read_text())
        return rows

    before = {(row["of"], row["id"]): row["text"] for row in written(champion)}
    return [{**row, "champion": before.get((row["of"], row["id"]), "")} for row in written(final)]


def _stage_row(span: StageSpan, artifact: Artifact, series: dict[str, Series], outcome: str) -> StageRow:
    metadata = artifact.metadata

    def values(key: str) -> list[float]:
        return [value for position, value in series.get(key, []) if metadata["start"] < position <= metadata["end"]]

    speeds, goodput, held_out = sorted(values(metrics.TOKENS_PER_S)), values(metrics.GOODPUT), values(metrics.HELD_OUT)
    lengths = span.lengths
    return StageRow(
        name=span.name,
        start=metadata["start"],
        end=metadata["end"],
        steps=metadata["steps"],
        seq_len=str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]}..{lengths[-1]}",
        batch=span.segments[-1].batch,
        first_loss=metadata["first_loss"],
        last_loss=metadata["last_loss"],
        bits_per_byte=held_out[-1] if held_out else None,
        tokens_per_s=speeds[len(speeds) // 2] if speeds else 0.0,
        goodput=goodput[-1] if goodput else None,
        seconds=artifact.manifest.seconds,
        outcome=outcome,
    )


def _mix(stage: str, artifact: Artifact, series: dict[str, Series]) -> list[MixRow]:
    """Return planned and realized shares of a stage: the trainer's running shares at its last step."""
    rows, start, end = [], artifact.metadata["start"], artifact.metadata["end"]
    for domain in (*DOMAINS, CONVERSATIONS):
        realized = dict(series.get(metrics.fraction(domain), [])).get(end)
        planned = dict(series.get(metrics.target_fraction(domain), [])).get(end, 0.0)
        if realized is not None:
            rows.append(MixRow(stage, domain, planned, realized, round(realized * (end - start))))
    return rows


def _conversation_notes(prepared: Artifact | None) -> list[str]:
    """Return lines about the data of stages of kind `sft`: conversations, then packing by sequence length."""
    if prepared is None:
        return []
    metadata = prepared.metadata
    notes = [
        f"conversations: {metadata['conversations']:,} with {metadata['turns']:,} answers, "
        f"{metadata['tokens']:,} tokens, {metadata['target_tokens']:,} of them targets; "
        f"{metadata['held_out']:,} held out, {metadata['dropped']['duplicate']:,} repeated"
    ]
    for seq_len, packed in metadata["packing"].items():
        notes.append(
            f"conversations: {packed['sequences']:,} sequences of {seq_len} tokens, {packed['padding']:,} of them "
            f"padding; {packed['cut']:,} conversations cut at the end, {packed['dropped']:,} dropped"
        )
    return notes


def _notes(
    trained: dict[str, Artifact], evaluations: dict[str, Artifact], curated: dict[str, Any] | None = None
) -> list[str]:
    averages = {
        stage: artifact.metadata["average"] for stage, artifact in trained.items() if "average" in artifact.metadata
    }
    notes = [f"{stage}: {Choice.model_validate(average)}" for stage, average in averages.items()]
    notes += scarce_domains(curated) if curated and evaluations else []
    for stage, artifact in evaluations.items():
        metadata = artifact.metadata
        notes += [f"{stage}: {task} was left out: {why}" for task, why in metadata.get("skipped", {}).items()]
        long = "longer than the window, so they were not asked and count as wrong"
        notes += [
            f"{stage}: {count} questions of {key} are {long}" for key, count in metadata.get("too_long", {}).items()
        ]
        notes += [f"{stage}: {score.scarce}" for score in read_scores(artifact.path).values() if score.scarce]
        vague = "were not judged: they count neither as right nor as wrong, and the gate decides nothing on them"
        notes += [f"{stage}: {count} questions of {key} {vague}" for key, count in metadata.get("unjudged", {}).items()]
    return notes


# The data page: where every document went.


def data_page(run: str, curated: Artifact, tokenizer: Artifact | None) -> DataPage:
    """Gather the data page of `run` from its artifacts."""
    ledger = pq.read_table(curated.path_of("ledger.parquet")).to_pylist()
    metadata = tokenizer.metadata if tokenizer else {}

    def table(name: str) -> list[Row]:
        path: Path = curated.path_of(FINDINGS) / f"{name}.parquet"
        return pq.read_table(path).to_pylist() if path.is_file() else []

    samples: dict[str, dict[str, list[Row]]] = {}
    for row in table("samples"):
        samples.setdefault(row["domain"], {}).setdefault(row["outcome"], []).append(row)
    return DataPage(
        run=run,
        outcomes=_outcomes(ledger),
        heavy=heavy_rules(ledger),
        funnel=_funnel(ledger, metadata.get("bytes_per_token", {})),
        sources=_sources(ledger),
        samples={
            domain: dict(sorted(samples[domain].items(), key=lambda item: (item[0] not in KEPT, item[0])))
            for domain in DOMAINS
            if domain in samples
        },
        lengths=table("lengths"),
        languages=table("languages"),
        clusters=table("clusters"),
        lines=table("lines"),
        contamination=table("contamination"),
        ratios={name: list(rows) for name, rows in groupby(table("ratios"), key=lambda row: str(row["benchmark"]))},
        contaminated=table("contaminated"),
        metadata=curated.metadata,
        fertility=metadata,
    )


def _step_titles() -> dict[str, str]:
    """Return the steps of the ledger in order, with their titles."""
    from herd.llama3.data.curate import CURATION  # imports numba

    return {"read": "not read", **{stage.name: stage.title for stage in CURATION}, "written": "lines removed"}


def _outcomes(ledger: list[Row]) -> list[DropRow]:
    """Return the outcomes in the order of the steps, kept documents first."""
    from herd.llama3.data.curate import explain  # imports numba

    order, steps = {"kept": -2, "held_out": -1}, list(_step_titles())
    ledger = sorted(ledger, key=lambda line: (order.get(line["outcome"], steps.index(line["step"])), line["outcome"]))
    outcomes = []
    for (outcome, _), lines in groupby(ledger, key=lambda line: (line["outcome"], line["step"])):
        domains: dict[str, tuple[int, int]] = {}
        for line in lines:
            documents, size = domains.get(line["domain"], (0, 0))
            domains[line["domain"]] = (documents + line["documents"], size + line["bytes"])
        outcomes.append(DropRow(outcome, explain(outcome), domains))
    return outcomes


def _funnel(ledger: list[Row], bytes_per_token: dict[str, float]) -> list[FunnelStep]:
    documents, size = sum(line["documents"] for line in ledger), sum(line["bytes"] for line in ledger)
    steps = []
    for step, title in _step_titles().items():
        gone = [line for line in ledger if line["step"] == step and line["outcome"] not in KEPT]
        dropped, dropped_bytes = sum(line["documents"] for line in gone), sum(line["bytes"] for line in gone)
        if dropped:
            tokens = [line["bytes"] / bytes_per_token[line["domain"]] for line in gone if bytes_per_token]
            about = sum(tokens) if tokens else None
            steps.append(FunnelStep(title, documents, dropped, size, dropped_bytes, about))
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


def _root_of(source: Source) -> str:
    """Return the address above the files of `source`, with its `/`."""
    if not is_local(source.uri):
        return split_glob(f"{source.uri.rstrip('/')}/", lambda _: False)[0]
    path = os.path.abspath(local_path(source.uri))
    if os.path.lexists(path):
        return f"{path if os.path.isdir(path) else os.path.dirname(path)}/"
    return split_glob(path, os.path.isdir)[0]


def print_count(count: Count, console: Console) -> None:
    """Print what each step of curation asks of a store, and what that costs at the prices of S3."""
    table = Table(box=None, pad_edge=False)
    for head in ("", "tasks", "files", "GET, HEAD", "PUT, LIST", "read", "written", "USD"):
        table.add_column(head, justify="right" if head else "left")
    for name, step in [*count.steps.items(), ("in all", count.total)]:
        numbers = (f"{value:,.0f}" for value in (step.tasks, step.files, step.reads, step.writes))
        sizes = (format_bytes(int(value)) for value in (step.read_bytes, step.written_bytes))
        table.add_row(name, *numbers, *sizes, f"{step.usd:,.2f}")
    console.print(table)
    documents, shards, partitions = count.amounts
    console.print(
        f"[dim]{documents:,.0f} documents, {shards:,} shards, {partitions:,} partitions, from a sample; MinHash with "
        "the most rounds. Prices of S3 in us-east-1, without machines and storage.[/]"
    )


def print_sample(folder: Path, recipe: Recipe, console: Console, examples: int, rule: str = "") -> None:
    """Print the outcomes of curation, by domain, for the sample that `curate_sample` left in `folder`.

    Each outcome has the beginning of `examples` documents; `rule` names the only one to show, in full excerpts.
    Raises ValueError if it drops nothing.
    """
    from herd.llama3.data.curate import explain  # imports numba

    ledger = pq.read_table(folder / "curated" / "ledger.parquet").to_pylist()
    samples = pq.read_table(folder / "curated" / FINDINGS / "samples.parquet").to_pylist()
    dropping = sorted({row["outcome"] for row in ledger if row["outcome"] not in KEPT})
    if rule and rule not in dropping:
        others = f"those that do are {', '.join(dropping)}" if dropping else "no rule does"
        raise ValueError(f"--rule {rule}: drops nothing of the sample; {others}")
    for domain in recipe.sources:
        rows = [row for row in ledger if row["domain"] == domain and rule in ("", row["outcome"])]
        total, size = (
            sum(row[column] for row in ledger if row["domain"] == domain) for column in ("documents", "bytes")
        )
        if not rows:
            continue
        documents, read = Counter[str](), Counter[str]()  # a row of the ledger is of one source and language
        for row in rows:
            documents[row["outcome"]] += row["documents"]
            read[row["outcome"]] += row["bytes"]
        order = sorted(documents, key=lambda outcome: (outcome not in KEPT, -documents[outcome], outcome))
        roots = sorted(map(_root_of, recipe.sources[domain]), key=len, reverse=True)
        console.print(f"[bold]{domain}[/]  {total:,} documents, {format_bytes(size)}")
        table = Table(box=None, pad_edge=False, show_header=False)
        for outcome in order:
            count, share = documents[outcome], f"{documents[outcome] / total:.1%}"
            table.add_row(f"{count:,}", share, format_bytes(read[outcome]), outcome, f"[dim]{explain(outcome)}[/]")
        for column in table.columns[:3]:
            column.justify = "right"
        console.print(table)
        few = few_held_out(domain, documents["held_out"], read["held_out"])
        if few and recipe.curate.validation_fraction and not rule:
            console.print(f"  [yellow]{few}[/]")
        for line in heavy_rules(row for row in ledger if row["domain"] == domain) if not rule else []:
            console.print(f"  [yellow]{line}[/]")
        lost = sum(row["bytes"] for row in rows if row["step"] == "read" and row["outcome"] not in NO_LOSS)
        if lost > recipe.curate.max_lost * size:
            more = f"more than curate.max_lost {recipe.curate.max_lost}; a run refuses that"
            console.print(f"  [yellow]{domain}: {lost / size:.1%} of the bytes cannot be read, {more}[/]")
        for outcome in (outcome for outcome in order if outcome not in KEPT):
            shown = [row for row in samples if (row["domain"], row["outcome"]) == (domain, outcome)][:examples]
            for row in shown:
                url = next((row["url"][len(root) :] for root in roots if row["url"].startswith(root)), row["url"])
                console.print(f"  [yellow]{outcome}[/] [cyan]{escape(url)}[/]", soft_wrap=True, highlight=False)
                text = f"{row['excerpt']}\n" if rule else f"    {' '.join(row['excerpt'].split())}"
                console.print(escape(text), no_wrap=not rule, overflow="ellipsis", highlight=False)
        console.print()


SHOWN_SPANS, AROUND, LONGEST_SPAN = 10, 40, 120
"""Spans that `why_lines` shows, and the characters around one and of one."""


def why_lines(found: Row, text: str = "") -> list[str]:
    """Return what became of a document, a row of `find_documents`, as lines of a console.

    `text` is that of the document as it was read, to show what was removed from it.
    """
    from herd.llama3.data.curate import explain  # imports numba

    where = ", ".join(filter(None, (found["domain"], found["source"], found["language"], found["url"])))
    lines = [f"[bold]{found['id']}[/]  {escape(where)}"]
    if found["outcome"] in KEPT:
        split = {"kept": "trained on", "held_out": "kept for evaluation"}[found["outcome"]]
        changes = [
            f"{found[name]:,} {what}{'s' * (found[name] != 1)} {change}"
            for name, what, change in (("lines", "line", "removed"), ("redacted", "piece", "of personal data replaced"))
            if found[name]
        ]
        lines.append(f"  {split}{'; ' if changes else ''}{'; '.join(changes)}")
    else:
        lines.append(f"  [red]{found['outcome']}[/]  {escape(explain(found['outcome']))}")
    if found["field"]:
        sign = "<" if found["field"].startswith("min") else ">"
        lines.append(f"  curate.quality.{found['field']}: {found['value']:.6g} {sign} {found['bound']:.6g}")
    if found["kept"] and found["kept"] != found["id"]:
        lines.append(f"  kept instead: {found['kept']}")
    spans = found["spans"] or []
    lines += [_span_line(text, **span) for span in spans[:SHOWN_SPANS]]
    more = [f"{len(spans) - SHOWN_SPANS:,} more places in drops/*.parquet"] if len(spans) > SHOWN_SPANS else []
    gone = ["the collected text is not there any more"] if spans and not text else []
    return [*lines, *(f"  [dim]{line}[/]" for line in more + gone)]


def _span_line(text: str, start: int, stop: int, rule: str) -> str:
    """Return a span of a text with what is around it, on one line."""
    cut = text[start:stop]
    if len(cut) > LONGEST_SPAN:
        cut = f"{cut[: LONGEST_SPAN // 2]} … {cut[-LONGEST_SPAN // 2 :]}"
    pieces = (text[max(0, start - AROUND) : start], cut, text[stop : stop + AROUND])
    before, cut, after = (escape(piece.replace("\n", "⏎")) for piece in pieces)
    return f"  {rule} {start:,} to {stop:,}:  {before}[red]{cut}[/]{after}"
