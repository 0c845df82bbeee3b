"""The page of a study: verdict first, then pictures, tables, what was shared, what it cost and how to repeat it.

One self-contained HTML file, and the same as markdown, from plain data: no server, no run folder and no recipe is read
here. With few runs every run has a row; with many, arms are averaged and the runs fold away. What this gives up:
sorting and filtering; who wants those opens the study in MLflow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean, stdev

from jinja2 import Environment, PackageLoader, StrictUndefined

from llama3.recipe.units import tokens
from llama3.studies.results import HELPS, HURTS, Finding, StudyVerdict
from tasks.format import clock
from tasks.study.plots import FOREST, forest

# A proposed change of a recipe as lines of YAML, to be read like the output of `diff`.
#
# What this gives up: comments and the order of the file that will be changed; `herd study apply` keeps those.

Line = tuple[str, str]
"""`-`, `+` or a blank, and the text."""
INDENT = "  "


def change_lines(change: Sequence[str], before: Mapping[str, str]) -> list[Line]:
    """Return overrides (`mix.base.math=30%`) as lines; `before` has former values by path, where they are known."""
    lines: list[Line] = []
    above: list[str] = []
    for override in change:
        path, _, value = override.partition("=")
        *parents, last = path.split(".")
        same = next((n for n, pair in enumerate(zip(above, parents, strict=False)) if pair[0] != pair[1]), None)
        kept = min(len(above), len(parents)) if same is None else same
        lines += [(" ", f"{INDENT * depth}{parents[depth]}:") for depth in range(kept, len(parents))]
        indent = INDENT * len(parents)
        if path in before:
            lines.append(("-", f"{indent}{last}: {before[path]}"))
        lines.append(("+", f"{indent}{last}: {value}"))
        above = parents
    return lines


SCORES = 6
"""Score columns of a table; the rest is in MLflow."""
RUNS = 12
"""More runs than these fold away behind their arms' means."""
TONES = {HELPS: "good", HURTS: "bad"}
FIRST = "eval/bpb"
NUMBER = re.compile(r"[-+<~]?[\d.]|nan|inf|unknown")
Figure = tuple[str, str, str]
"""Title, explanation, SVG text."""


@dataclass(frozen=True)
class ArmRow:
    """One run of the study."""

    arm: str
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
    """Of these operations, those of stages that no run before it had made."""
    device_hours: float
    """Of the same stages."""
    scores: dict[str, float]
    """By key, `eval/bpb/math`."""
    reused: str
    """Which of its stages were there before it."""


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
        """Return which columns hold words, which are set to the left: the first, and those with a cell of words."""
        cells = ([row[column] for row in self.rows if row[column]] for column in range(len(self.columns)))
        return [place == 0 or not all(NUMBER.match(cell) for cell in column) for place, column in enumerate(cells)]


@dataclass(frozen=True)
class Analysis:
    """What the analysis of a study hands to its page."""

    verdict: StudyVerdict
    tables: list[ViewTable] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


@dataclass(frozen=True)
class StudyView:
    """All that the page shows."""

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
    arms: Sequence[ArmRow]
    tables: Sequence[ViewTable]
    """Of the analysis."""
    figures: Sequence[Figure]
    """Of the analysis; the forest plot of the findings is drawn here."""
    cost: Sequence[tuple[str, str]]
    lineage: Sequence[tuple[str, str, str, int]]
    """Step, artifact, run that made it, runs that stand on it."""
    before: Mapping[str, str] = field(default_factory=dict)
    """What the fields that the verdict changes are now, by path."""


def study_html(view: StudyView) -> str:
    """Return the page as HTML text that fetches nothing."""
    return _render("study.html", view)


def study_markdown(view: StudyView, pictures: str = "") -> str:
    """Return the page as markdown; its pictures are those in the folder `pictures`, left out where none is named."""
    return _render("study.md", view, pictures)


def study_figures(view: StudyView) -> list[Figure]:
    """Return the pictures in the page's order."""
    own = [("Findings", FOREST, forest(view.verdict.findings))] if view.verdict.findings else []
    return [*own, *view.figures]


def picture_name(title: str) -> str:
    """Return the name of a picture's file: `loss-by-budget.svg`."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") + ".svg"


def _render(name: str, view: StudyView, pictures: str = "") -> str:
    page = name.endswith(".html")
    environment = Environment(
        loader=PackageLoader("tasks"),
        undefined=StrictUndefined,
        autoescape=page,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": _cell, "picture": picture_name}
    environment.filters["when"] = lambda text: text[:16].replace("T", " ")
    runs, arms = _runs(view.arms), _arms(view.arms)
    return environment.get_template(name).render(
        view=view,
        facts=list(_facts(view)),
        change=change_lines(view.verdict.change, view.before),
        tables=[*_findings(view.verdict.findings), *view.tables, *arms],
        runs=runs,
        folded=bool(arms) and len(view.arms) > RUNS,
        shared=_lineage(view, shared=True),
        single=_lineage(view, shared=False),
        plan=ViewTable("Plan", "", view.plan[0], view.plan[1:]) if view.plan else None,
        figures=study_figures(view) if page or pictures else [],
        pictures=pictures,
    )


def _cell(text: str) -> str:
    """Return text that does not end a cell of a markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def _facts(view: StudyView) -> Iterator[tuple[str, str]]:
    yield "state", view.state
    yield "arms", str(len({row.arm for row in view.arms}))
    yield "runs", str(len(view.arms))
    yield "training operations", f"{sum(row.trained for row in view.arms):.3g}"
    yield "device-hours", f"{sum(row.device_hours for row in view.arms):.3g}"
    if view.started and view.ended:
        ends = [datetime.fromisoformat(text) for text in (view.started, view.ended)]
        yield "took", clock((ends[1] - ends[0]).total_seconds())


def _findings(findings: Sequence[Finding]) -> list[ViewTable]:
    """Return the findings as a table of arms by scores."""
    if not findings:
        return []
    arms = list(dict.fromkeys(one.arm for one in findings))
    scores = list(dict.fromkeys((one.score, one.unit) for one in findings))
    found = {(one.arm, one.score): one for one in findings}
    rows: list[list[str]] = []
    tones: dict[tuple[int, int], str] = {}
    for place, arm in enumerate(arms):
        own = [found.get((arm, score)) for score, _ in scores]
        rows.append([arm, str(max(one.repeats for one in own if one)), *(_gain(one) for one in own)])
        tones |= {(place, column + 2): TONES[one.says] for column, one in enumerate(own) if one and one.says in TONES}
    columns = ["arm", "repeats", *(f"{short(score).removeprefix('bpb ')}, {unit}" for score, unit in scores)]
    note = (
        "Gain over the control with its 95 % interval: above 0 is better, whichever way a score goes. In colour what "
        "differs by more than chance, after correction for all arms and scores."
    )
    return [ViewTable("Findings", note, columns, rows, tones)]


def _gain(one: Finding | None) -> str:
    return "" if one is None else f"{one.gain:+.4f} ({one.low:+.4f} to {one.high:+.4f})"


def short(score: str) -> str:
    """Return how people call a score: `eval/bpb/math` is `bpb math`."""
    return score.removeprefix("eval/").replace("/", " ")


def _shown(arms: Sequence[ArmRow]) -> list[str]:
    """Return the scores that have a column: bits per byte first, likelihoods of gold answers never."""
    keys = {key for row in arms for key in row.scores if "gold_nll" not in key}
    return sorted(keys, key=lambda key: (not key.startswith(FIRST), key.count("/"), key))[:SCORES]


def _runs(arms: Sequence[ArmRow]) -> ViewTable:
    keys = _shown(arms)
    columns = ["arm", "repeat", "run", "state", "tokens", "FLOPs", "time", "device-hours"]
    rows = [
        [
            *(row.arm, str(row.repeat), row.run, row.state, tokens(row.tokens), f"{row.flops:.3g}"),
            *(clock(row.seconds), f"{row.device_hours:.3g}"),
            *(_number(row.scores.get(key)) for key in keys),
            row.reused,
        ]
        for row in arms
    ]
    note = (
        "Scores of the model at the end of each run, and FLOPs of its whole training. Device-hours are those of the "
        "stages that it made; reused are stages that were there before it."
    )
    return ViewTable("Runs", note, [*columns, *map(short, keys), "reused"], rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _arms(arms: Sequence[ArmRow]) -> list[ViewTable]:
    """Return the means of the arms where some have several runs."""
    groups: dict[str, list[ArmRow]] = {}
    for row in arms:
        groups.setdefault(row.arm, []).append(row)
    if all(len(group) == 1 for group in groups.values()):
        return []
    keys = _shown(arms)
    rows = [
        [arm, str(len(group)), tokens(group[0].tokens), f"{sum(row.device_hours for row in group):.3g}"]
        + [_mean([row.scores[key] for row in group if key in row.scores]) for key in keys]
        for arm, group in groups.items()
    ]
    columns = ["arm", "runs", "tokens each", "device-hours", *map(short, keys)]
    return [ViewTable("Arms", "Mean over the runs of an arm, and their standard deviation.", columns, rows)]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{fmean(values):.4g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


def _lineage(view: StudyView, shared: bool) -> ViewTable:
    """Return what several runs stand on, or what one alone does."""
    several = [row for row in view.lineage if row[3] > 1]
    once = len(view.lineage) - len(several)
    saved = sum(uses - 1 for *_, uses in several)
    note = f"{len(several)} artifacts were made once and serve several runs, which spared {saved} makings of them."
    if not shared:
        note = f"{once} artifacts serve one run alone."
    chosen = sorted((row for row in view.lineage if (row[3] > 1) == shared), key=lambda row: -row[3])
    rows = [[step, label, maker or "deleted since", str(uses)] for step, label, maker, uses in chosen]
    return ViewTable("Shared" if shared else "Not shared", note, ["step", "artifact", "made by", "runs"], rows)
