"""The page of a study, as self-contained HTML and as markdown, from plain data.

It shows the verdict, figures, tables, shared artifacts, cost, and the command that repeats the study. With many runs
the table of runs is folded behind the means of the variants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean, stdev

from herd.llama3.recipe.units import tokens
from herd.llama3.studies.results import HELPS, HURTS, Finding, StudyVerdict
from herd.tasks.format import format_duration
from herd.tasks.html import render
from herd.tasks.study.plots import FOREST, forest

Line = tuple[str, str]
"""`-`, `+` or a blank, and the text."""
INDENT = "  "
SCORES = 6
"""Score columns of a table; the rest is in MLflow."""
RUNS = 12
"""With more runs, their table is folded."""
TONES = {HELPS: "good", HURTS: "bad"}
FIRST = "eval/bpb"
NUMBER = re.compile(r"[-+<~]?[\d.]|nan|inf|unknown")
Figure = tuple[str, str, str]
"""Title, explanation, SVG text."""


@dataclass(frozen=True)
class VariantRow:
    """One run of the study."""

    variant: str
    repeat: int
    run: str
    state: str
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
    reused: str
    """Its stages that are booked to another run, or existed before the study."""


@dataclass(frozen=True)
class ViewTable:
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
    tables: list[ViewTable] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


@dataclass(frozen=True)
class StudyView:
    """All data of the page."""

    name: str
    digest: str
    question: str
    state: str
    started: str
    """ISO 8601, as `ended`."""
    ended: str
    machine: str
    command: str
    verdict: StudyVerdict
    plan: Sequence[Sequence[str]]
    """Headers, then a row for each planned run."""
    variants: Sequence[VariantRow]
    tables: Sequence[ViewTable]
    """Of the analysis."""
    figures: Sequence[Figure]
    """Of the analysis; `study_figures` adds the forest plot of the findings."""
    cost: Sequence[tuple[str, str]]
    lineage: Sequence[tuple[str, str, str, int]]
    """Step, artifact, run that made it, number of runs that use it."""
    before: Mapping[str, str] = field(default_factory=dict)
    """Present values of the fields that the verdict changes, by path."""


def study_html(view: StudyView) -> str:
    """Return the page as HTML text without external resources."""
    return _render("study.html", view)


def study_markdown(view: StudyView, pictures: str = "") -> str:
    """Return the page as markdown, with the figures in the folder `pictures`; without figures if it is empty."""
    return _render("study.md", view, pictures)


def study_figures(view: StudyView) -> list[Figure]:
    """Return the figures in the page's order."""
    own = [("Findings", FOREST, forest(view.verdict.findings))] if view.verdict.findings else []
    return [*own, *view.figures]


def picture_name(title: str) -> str:
    """Return the file name of a figure: `loss-by-budget.svg`."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") + ".svg"


def short(score: str) -> str:
    """Return the short name of a score: `eval/bpb/math` is `bpb math`."""
    return score.removeprefix("eval/").replace("/", " ")


def change_lines(change: Sequence[str], before: Mapping[str, str]) -> list[Line]:
    """Return overrides (`mix.base.math=30%`) as a diff of YAML; `before` has the known former values by path."""
    lines: list[Line] = []
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


def _render(name: str, view: StudyView, pictures: str = "") -> str:
    page = name.endswith(".html")
    filters: dict[str, Callable[[str], str]] = {
        "cell": lambda text: text.replace("|", "\\|").replace("\n", " "),  # of a markdown table
        "picture": picture_name,
        "when": lambda text: text[:16].replace("T", " "),
    }
    facts = [
        ("state", view.state),
        ("variants", str(len({row.variant for row in view.variants}))),
        ("runs", str(len(view.variants))),
        ("training operations", f"{sum(row.trained for row in view.variants):.3g}"),
        ("device-hours", f"{sum(row.device_hours for row in view.variants):.3g}"),
    ]
    if view.started and view.ended:
        ends = [datetime.fromisoformat(text) for text in (view.started, view.ended)]
        facts.append(("took", format_duration((ends[1] - ends[0]).total_seconds())))
    variants = _variant_tables(view.variants)
    return render(
        name,
        filters,
        view=view,
        facts=facts,
        change=change_lines(view.verdict.change, view.before),
        tables=[*_finding_tables(view.verdict.findings), *view.tables, *variants],
        runs=_run_table(view.variants),
        folded=bool(variants) and len(view.variants) > RUNS,
        shared=_lineage_table(view, shared=True),
        single=_lineage_table(view, shared=False),
        plan=ViewTable("Plan", "", view.plan[0], view.plan[1:]) if view.plan else None,
        figures=study_figures(view) if page or pictures else [],
        pictures=pictures,
    )


def _finding_tables(findings: Sequence[Finding]) -> list[ViewTable]:
    """Return the findings as a table of variants by scores."""
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
        "Gain over the control with its 95 % interval; above 0 the variant is better on every score. Colored: "
        "significant after correction for all variants and scores."
    )
    return [ViewTable("Findings", note, columns, rows, tones)]


def _score_keys(variants: Sequence[VariantRow]) -> list[str]:
    """Return the scores that have a column: bits per byte first, without likelihoods of gold answers."""
    keys = {key for row in variants for key in row.scores if "gold_nll" not in key}
    return sorted(keys, key=lambda key: (not key.startswith(FIRST), key.count("/"), key))[:SCORES]


def _run_table(variants: Sequence[VariantRow]) -> ViewTable:
    keys = _score_keys(variants)
    columns = ["variant", "repeat", "run", "state", "tokens", "FLOPs", "time", "device-hours"]
    rows = [
        [
            *(row.variant, str(row.repeat), row.run, row.state, tokens(row.tokens), f"{row.flops:.3g}"),
            *(format_duration(row.seconds), f"{row.device_hours:.3g}"),
            *(f"{row.scores[key]:.4g}" if key in row.scores else "" for key in keys),
            row.reused,
        ]
        for row in variants
    ]
    note = (
        "Scores of the final model of each run, and FLOPs of its whole training. Device-hours are those of the stages "
        "that it trained; reused stages existed before it."
    )
    return ViewTable("Runs", note, [*columns, *map(short, keys), "reused"], rows)


def _variant_tables(variants: Sequence[VariantRow]) -> list[ViewTable]:
    """Return the means of the variants if some have several runs."""
    groups: dict[str, list[VariantRow]] = {}
    for row in variants:
        groups.setdefault(row.variant, []).append(row)
    if all(len(group) == 1 for group in groups.values()):
        return []
    keys, rows = _score_keys(variants), []
    for variant, group in groups.items():
        hours = sum(row.device_hours for row in group)
        cells = [variant, str(len(group)), tokens(group[0].tokens), f"{hours:.3g}"]
        for key in keys:
            values = [row.scores[key] for row in group if key in row.scores]
            deviation = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
            cells.append(f"{fmean(values):.4g}{deviation}" if values else "")
        rows.append(cells)
    columns = ["variant", "runs", "tokens each", "device-hours", *map(short, keys)]
    return [ViewTable("Variants", "Mean over the runs of a variant, and their standard deviation.", columns, rows)]


def _lineage_table(view: StudyView, shared: bool) -> ViewTable:
    """Return the artifacts that several runs use, or those of a single run."""
    several = [row for row in view.lineage if row[3] > 1]
    if shared:
        saved = sum(uses - 1 for *_, uses in several)
        note = f"{len(several)} artifacts are used by several runs, which saved {saved} executions of steps."
    else:
        note = f"{len(view.lineage) - len(several)} artifacts are used by a single run."
    chosen = sorted((row for row in view.lineage if (row[3] > 1) == shared), key=lambda row: -row[3])
    rows = [[step, label, maker or "deleted since", str(uses)] for step, label, maker, uses in chosen]
    return ViewTable("Shared" if shared else "Not shared", note, ["step", "artifact", "created by", "runs"], rows)
