"""The page of a study as self-contained HTML, and its verdict as markdown for Prefect and MLflow.

The page shows verdict, figures, the tables of the analysis and a table of the variants. The runs are children of the
study's run in MLflow, which has their curves and all their scores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean, stdev

from herd.llama3.recipe.units import tokens
from herd.llama3.studies.results import HELPS, HURTS, Finding, StudyVerdict
from herd.tasks.format import format_duration
from herd.tasks.html import Figure, render
from herd.tasks.study.plots import FOREST, forest
from herd.tasks.study.records import StudyRecord

INDENT = "  "
SCORES = 6
"""Score columns of the table of variants."""
TONES = {HELPS: "good", HURTS: "bad"}
NUMBER = re.compile(r"[-+<~]?[\d.]|nan|inf|unknown")


@dataclass(frozen=True)
class FinishedRun:
    """One run of the study."""

    variant: str
    run: str
    tokens: int
    """Trained on, from the start."""
    flops: float
    """Training operations."""
    seconds: float
    """From the run's start to its end."""
    trained: float
    """Of these operations, those that are booked to this run."""
    device_hours: float
    """Of the same stages."""
    scores: dict[str, float]
    """By key, `eval/bpb/math`."""


@dataclass(frozen=True)
class ResultTable:
    """A table of text; its first column names the rows."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    tones: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """`good` or `bad` by row and column."""

    def text_columns(self) -> list[bool]:
        """Return which columns contain text and are aligned left: the first, and those with a cell of text."""
        cells = ([row[column] for row in self.rows if row[column]] for column in range(len(self.columns)))
        return [index == 0 or not all(NUMBER.match(cell) for cell in column) for index, column in enumerate(cells)]


@dataclass(frozen=True)
class Analysis:
    """The result of an analysis: verdict, tables and figures for the page."""

    verdict: StudyVerdict
    tables: list[ResultTable] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def study_page(
    record: StudyRecord, analysis: Analysis, runs: Sequence[FinishedRun], before: Mapping[str, str] | None = None
) -> str:
    """Return the page as HTML text without external resources.

    `before` has the present values, by path, of the fields that the verdict changes.
    """
    verdict = analysis.verdict
    findings = [("Findings", FOREST, forest(verdict.findings))] if verdict.findings else []
    return render(
        "study.html",
        {"when": lambda text: text[:16].replace("T", " ")},
        record=record,
        verdict=verdict,
        change=change_lines(verdict.change, before or {}),
        cost=_cost(record, runs),
        figures=[*findings, *analysis.figures],
        tables=[*_findings_tables(verdict.findings), *analysis.tables, _variants_table(runs)],
    )


def verdict_markdown(name: str, question: str, verdict: StudyVerdict, before: Mapping[str, str] | None = None) -> str:
    """Return the verdict as markdown: headline, weak points, proposed change and findings."""
    change = [f"{sign} {line}" for sign, line in change_lines(verdict.change, before or {})]
    proposed = ["```diff", *change, "```", "", f"`herd study apply {name}` writes the changed recipe."]
    lines = [
        *(f"# {name}", "", question, "", *(f"- **{line}**" for line in verdict.headline), ""),
        *(("What weakens this:", "", *(f"- {flag}" for flag in verdict.flags), "") if verdict.flags else ()),
        *(proposed if change else ["Proposed change: none, the recipe stays as it is."]),
    ]
    for table in _findings_tables(verdict.findings):
        lines += ["", table.note, "", markdown_table(table.columns, table.rows)]
    return "\n".join(lines)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as markdown."""
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (columns, *rows)]
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, f"|{'---|' * len(columns)}", *body])


def short(score: str) -> str:
    """Return the short name of a score: `eval/bpb/math` is `bpb math`."""
    return score.removeprefix("eval/").replace("/", " ")


def change_lines(change: Sequence[str], before: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return overrides (`mix.base.math=30%`) as a diff of YAML, lines of a sign (`-`, `+` or a blank) and a text.

    `before` has the known former values by path.
    """
    lines: list[tuple[str, str]] = []
    above: list[str] = []
    for override in change:
        path, _, value = override.partition("=")
        *parents, last = path.split(".")
        differs = next((n for n, pair in enumerate(zip(above, parents, strict=False)) if pair[0] != pair[1]), None)
        kept = min(len(above), len(parents)) if differs is None else differs
        lines += [(" ", f"{INDENT * depth}{parents[depth]}:") for depth in range(kept, len(parents))]
        indent = INDENT * len(parents)
        if path in before:
            lines.append(("-", f"{indent}{last}: {before[path]}"))
        lines.append(("+", f"{indent}{last}: {value}"))
        above = parents
    return lines


def _cost(record: StudyRecord, runs: Sequence[FinishedRun]) -> list[tuple[str, str, str]]:
    """Return name, value and explanation of what the study took."""
    variants = len({run.variant for run in runs})
    cost = [
        ("runs", str(len(runs)), f"of {variants} variants"),
        ("training operations", f"{sum(run.trained for run in runs):.3g}", "shared stages counted once"),
        ("device-hours", f"{sum(run.device_hours for run in runs):.3g}", "of training"),
        ("time of the runs", format_duration(sum(run.seconds for run in runs)), "from start to end, added up"),
    ]
    if record.started and record.ended:
        ends = [datetime.fromisoformat(time) for time in (record.started, record.ended)]
        cost.append(("took", format_duration((ends[1] - ends[0]).total_seconds()), record.state))
    if record.variant_seconds and (overhead := record.seconds - record.variant_seconds) > 0:
        share = f"{overhead / record.variant_seconds:.1%} of the time of its variants"
        cost.append(("overhead", format_duration(overhead), share))
    return cost


def _findings_tables(findings: Sequence[Finding]) -> list[ResultTable]:
    """Return the findings as a table of variants by scores, if there are any."""
    if not findings:
        return []
    variants = list(dict.fromkeys(finding.variant for finding in findings))
    scores = list(dict.fromkeys((finding.score, finding.unit) for finding in findings))
    by_key = {(finding.variant, finding.score): finding for finding in findings}
    rows: list[list[str]] = []
    tones: dict[tuple[int, int], str] = {}
    for index, variant in enumerate(variants):
        cells = []
        for column, (score, _) in enumerate(scores):
            finding = by_key.get((variant, score))
            cells.append(f"{finding.gain:+.4f} ({finding.low:+.4f} to {finding.high:+.4f})" if finding else "")
            if finding and finding.says in TONES:
                tones[index, column + 2] = TONES[finding.says]
        rows.append([variant, str(max(finding.repeats for finding in findings if finding.variant == variant)), *cells])
    columns = ["variant", "repeats", *(f"{short(score).removeprefix('bpb ')}, {unit}" for score, unit in scores)]
    note = (
        "Gain over the control with its 95 % interval; above 0 the variant is better on every score. Colored on the "
        "page: significant after correction for all variants and scores."
    )
    return [ResultTable("Findings in numbers", note, columns, rows, tones)]


def _variants_table(runs: Sequence[FinishedRun]) -> ResultTable:
    """Return the scores of the variants: bits per byte first, without likelihoods of gold answers."""
    keys = {key for run in runs for key in run.scores if "gold_nll" not in key}
    shown = sorted(keys, key=lambda key: (not key.startswith("eval/bpb"), key.count("/"), key))[:SCORES]
    variants: dict[str, list[FinishedRun]] = {}
    for run in runs:
        variants.setdefault(run.variant, []).append(run)
    rows = []
    for variant, repeats in variants.items():
        scores = []
        for key in shown:
            values = [run.scores[key] for run in repeats if key in run.scores]
            deviation = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
            scores.append(f"{fmean(values):.4g}{deviation}" if values else "")
        hours = sum(run.device_hours for run in repeats)
        size = [tokens(repeats[0].tokens), f"{repeats[0].flops:.3g}", f"{hours:.3g}"]
        rows.append([variant, *size, *scores, ", ".join(run.run for run in repeats)])
    note = (
        "Scores of the final models: the mean over a variant's runs, and their standard deviation. Tokens and FLOPs: "
        "the whole training of a run. Device-hours: the stages that the variant's runs trained. The runs, with their "
        "curves, are children of the study's run in MLflow."
    )
    return ResultTable(
        "Variants", note, ["variant", "tokens", "FLOPs", "device-hours", *map(short, shown), "runs"], rows
    )
