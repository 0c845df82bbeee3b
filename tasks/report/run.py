"""The report of a run: self-contained HTML pages (the run, its data) and a markdown version.

It queries run record, manifests, metric Parquet and MLflow and leaves out what it does not find. The same run gives the
same content every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from herd.llama3.evaluate.gate import GateRow, number
from herd.llama3.evaluate.scores import BITS, GOLD, LANGUAGE, PREFIX, SCORES_FILE, Score, gold_key, read_scores
from herd.llama3.model.files import CONFIG, read_config
from herd.llama3.model.flops import trained_flops
from herd.llama3.recipe.units import tokens
from herd.llama3.studies.forecast import EvaluatedPoint, Forecast, ForecastFit, fit_forecast
from herd.llama3.train import metrics
from herd.llama3.train.journal import Series
from herd.storage.filesystem import write_atomic
from herd.storage.object_artifact import open_store
from herd.storage.processes import READERS, parallel_map
from herd.storage.root import Root
from herd.tasks.format import command, format_change, format_duration
from herd.tasks.html import COLORS, DIM, GROUPS, INK, Curve, Figure, chart, render
from herd.tasks.promotion.log import CHAMPION
from herd.tasks.report.data import DataPage, ReportData, collect_report_data
from herd.tasks.runs.records import PENDING_APPROVAL, RunRecord, Runs, example_change, is_merge, trained_stages
from herd.tasks.step import REUSED, Context
from herd.tasks.tracking import prefect_artifacts
from herd.tasks.tracking.mlflow_store import report_page, server_uri

# The forecast in a run's report: the score of a run of ten times the compute, from all runs under the root.
#
# Points are the evaluated checkpoints of all runs with equal task digests, at the training FLOPs of their schedule
# and shape (causal attention counted). Runs that started from other weights are left out: their compute is unknown.
# If there are enough smaller runs, the run's own score is forecast from them and shown beside the measured one.

FURTHER = 10.0
"""Compute of the forecast, in multiples of the largest run's."""
FIGURES = 6
"""Benchmarks that are drawn: those with the most questions."""
EVALUATE = "evaluate-"
BPB = f"{PREFIX}bpb"
SMOOTH = 9
"""Steps of the smoothed curve."""
SCORES, REASONS, STAGES = 9, 4, 3
"""Scores, reasons and evaluated stages on the first screen."""


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """One evaluated checkpoint."""

    run: str
    evaluation: str
    """Label of its artifact."""
    flops: float
    scores: dict[str, Score]

    def point(self, key: str) -> EvaluatedPoint:
        accuracy = self.scores[key]
        return EvaluatedPoint(self.run, self.flops, self.scores[gold_key(key)].value, accuracy.value, accuracy.n)


@dataclass(frozen=True)
class ForecastRow:
    """One forecast of a benchmark."""

    task: str
    of: str
    """The run that is forecast, and the runs that it is forecast from."""
    forecast: Forecast
    measured: float | None
    points: int
    runs: int


@dataclass(frozen=True)
class ForecastSection:
    """Forecasts in the report."""

    rows: list[ForecastRow]
    lacking: dict[str, str]
    """Benchmark -> why it has no forecast."""
    figures: list[Figure]


def forecast_section(root: Root, run: str) -> ForecastSection | None:
    """Return the forecasts for the benchmarks that `run` was evaluated on; None if there are too few runs for any.

    Raises ValueError if there is no such run.
    """
    steps, checkpoints = Runs(root).find(run).steps, evaluated_checkpoints(root)
    labels = {step.artifact for name, step in steps.items() if name.startswith(EVALUATE)}
    own = [checkpoint for checkpoint in checkpoints if checkpoint.evaluation in labels]
    if not own:
        return None
    last = max(own, key=lambda checkpoint: checkpoint.flops)  # an earlier run may have made it
    rows: list[ForecastRow] = []
    lacking: dict[str, str] = {}
    fits: dict[str, ForecastFit] = {}

    def fitted(points: list[EvaluatedCheckpoint], key: str) -> ForecastFit:
        return fit_forecast([checkpoint.point(key) for checkpoint in points], last.scores[key].chance or 0.0)

    def add(fitted: ForecastFit, key: str, of: str, flops: float, measured: float | None) -> None:
        runs = len({point.run for point in fitted.points})
        task = key.removeprefix(PREFIX)
        rows.append(ForecastRow(task, of, fitted.predict(flops), measured, len(fitted.points), runs))

    for key in sorted(key for key in last.scores if gold_key(key) in last.scores):
        digests = {name: last.scores[name].requests for name in (key, gold_key(key))}
        same = [
            checkpoint
            for checkpoint in checkpoints
            if all(name in checkpoint.scores and checkpoint.scores[name].requests == digests[name] for name in digests)
        ]
        try:
            fits[key] = fitted(same, key)
        except ValueError as error:
            lacking[key] = str(error).removeprefix("forecast: ")
            continue
        add(fits[key], key, f"a run of {FURTHER:g} x the compute", FURTHER * fits[key].largest, None)
        smaller = [point for point in same if point.run != last.run and point.flops < last.flops]
        with suppress(ValueError):  # too few smaller runs
            add(fitted(smaller, key), key, f"{last.run}, from smaller runs", last.flops, last.scores[key].value)
    if not rows:
        return None
    drawn = sorted(fits, key=lambda key: (-last.scores[key].n, key))[:FIGURES]
    return ForecastSection(rows, lacking, [_figure(fits[key], key) for key in drawn])


def evaluated_checkpoints(root: Root) -> list[EvaluatedCheckpoint]:
    """Return the evaluated checkpoints of all runs under `root`, each once, those of the oldest runs first."""
    runs, store = Runs(root), open_store(root)

    def of_run(record: RunRecord) -> list[EvaluatedCheckpoint]:
        try:
            recipe = runs.recipe(record.name)
        except ValueError:  # written by another version
            return []
        checkpoints: list[EvaluatedCheckpoint] = []
        for step, entry in record.steps.items() if recipe.init_from is None else ():
            stage = record.steps.get(step.removeprefix(EVALUATE))
            if not step.startswith(EVALUATE) or stage is None:
                continue
            with suppress(ValueError):  # deleted by retention
                checkpoint, evaluation = store.load(stage.artifact), store.load(entry.artifact)
                if is_merge(checkpoint):  # its scores cost more than the operations of one model
                    continue
                config, vocab_size = read_config(checkpoint.path_of(f"model/{CONFIG}").parent)
                flops = trained_flops(recipe, config, vocab_size, checkpoint.metadata["end"])
                scores = read_scores(evaluation.path_of(SCORES_FILE).parent)
                checkpoints.append(EvaluatedCheckpoint(record.name, evaluation.label, flops, scores))
        return checkpoints

    once: dict[str, EvaluatedCheckpoint] = {}
    for checkpoints in parallel_map(of_run, runs.all(), READERS):
        for checkpoint in checkpoints:
            once.setdefault(checkpoint.evaluation, checkpoint)
    return list(once.values())


def _figure(fitted: ForecastFit, key: str) -> Figure:
    from herd.tasks.report import plots  # imports matplotlib

    name = key.removeprefix(PREFIX)
    note = (
        f"Left: nats per byte of the gold answer ({GOLD}/{name}) against training operations; the line is fitted to "
        "the last checkpoint of each run (filled). Right: accuracy against those nats. Bands and bars are 95 % "
        f"intervals; the square is a run of {FURTHER:g} x the compute of the largest."
    )
    return f"Forecast: {name}", note, plots.forecast_plot(fitted, fitted.predict(FURTHER * fitted.largest))


def write_report(context: Context) -> Path:
    """Write the report into the run's folder, and show it in MLflow and Prefect; return the HTML page."""
    from herd.tasks.models.card import describe_model  # imports matplotlib

    page, mlflow = make_report(context.root, context.record.name), context.tracker
    for path in (page, page.with_suffix(".md"), page.with_name("data.html")):
        if path.exists():
            mlflow.log_file(context.record.mlflow_run, path)
    describe_model(context.root, context.record, mlflow)
    text, server = page.with_suffix(".md").read_text(), server_uri()
    if server and mlflow.experiment:
        url = report_page(server, mlflow.experiment, mlflow.run_id(context.record.mlflow_run))
        text = f"[The page with curves, in MLflow]({url})\n\n{text}"
    prefect_artifacts.markdown("report", text, context.record.name)
    prefect_artifacts.flush()
    return page


def make_report(root: Root, run: str) -> Path:
    """Write `report.html` and `report.md` of `run`; return the HTML page. Raises ValueError if there is no such run."""
    data, forecast, runs = collect_report_data(root, run), forecast_section(root, run), Runs(root)
    page = runs.folder(run) / "report.html"
    for file in (page, page.with_suffix(".md")):
        write_atomic(file, render_report(file.name, root, data, forecast))
    if data.page is not None:
        write_atomic(page.with_name("data.html"), render_data(data.page))
    for file in (page, page.with_suffix(".md"), page.with_name("data.html")):
        if file.exists():
            runs.publish(run, file.name)
    return page


def render_report(name: str, root: Root, data: ReportData, forecast: ForecastSection | None) -> str:
    """Return the report as the template `name` shows it, `report.html` or `report.md`."""
    spans = [(stage.start, stage.end, stage.name) for stage in data.stages]
    html = name.endswith(".html")
    return render(
        name,
        FILTERS,
        data=data,
        summary=summarize(root, data),
        scores=_score_table(data),
        curves=training_charts(data.series, spans) if html and spans else [],
        figures=_figures(data) if html else [],
        forecast=forecast,
    )


def training_charts(series: Mapping[str, Series], stages: Sequence[tuple[float, float, str]]) -> list[Figure]:
    """Return the curves of training over tokens; `stages` are (start, end, name)."""
    losses, held_out = series.get(metrics.LOSS, []), series.get(metrics.HELD_OUT, [])

    def drawn(key: str, label: str, color: str, **style: Any) -> Curve:
        return Curve(label, series.get(key, []), color, **style)

    by_domain = [
        Curve(domain, _smooth(series.get(metrics.domain_loss(domain), [])), color) for domain, color in GROUPS.items()
    ]
    scored = [drawn(metrics.held_out(domain), domain, color, dots=True) for domain, color in COLORS.items()]
    smooth = [Curve("each step", losses, DIM, thin=True), Curve(f"mean of {SMOOTH} steps", _smooth(losses), INK)]
    shape = [
        drawn(metrics.BATCH_TOKENS, "batch", COLORS["math"], steps=True),
        drawn(metrics.SEQ_LEN, "sequence", COLORS["code"], steps=True),
    ]
    rate, speed = drawn(metrics.LEARNING_RATE, "learning rate", INK), drawn(metrics.TOKENS_PER_S, "tokens/s", INK)
    figures = [
        ("Loss", "Loss of the training text, all stages as one curve. It should fall.", "nats per token", smooth, {}),
        (
            "Held-out text",
            "Bits per byte of a few documents kept out of training; all: weighted by the first stage's mix. If this "
            "rises while the loss falls, the model learns the text by heart.",
            "bits per byte",
            [*scored, Curve("all", held_out, INK, dots=True)] if held_out else [],
            {},
        ),
        ("Loss by domain", "The same, for the tokens of each domain.", "nats per token", by_domain, {}),
        ("Learning rate", "As it was trained.", "learning rate", [rate], {"zero": True}),
        ("Batch and sequence", "Tokens of a step, and tokens seen at once.", "tokens", shape, {"log2": True}),
        ("Throughput", "Tokens per second of each step; dips are saving, scoring or waiting.", "tokens/s", [speed],
         {"zero": True}),
    ]  # fmt: skip
    return [
        (title, note, chart(unit, curves, stages, **style))
        for title, note, unit, curves, style in figures
        if any(curve.points for curve in curves)
    ]


def _smooth(points: Series) -> Series:
    smooth = []
    for index, (position, _) in enumerate(points):
        near = points[max(0, index - SMOOTH // 2) : index + SMOOTH // 2 + 1]
        smooth.append((position, sum(value for _, value in near) / len(near)))
    return smooth


def _figures(data: ReportData) -> list[Figure]:
    """Return the figures of shares and scores that the run has data for."""
    if not data.stages:
        return []
    from herd.tasks.report import plots  # imports matplotlib

    figures = [("Mix", "Planned share of each domain (outline) and realized share (filled).", plots.mix(data))]
    if data.evaluations:
        figures.append(("Bits per byte", "On held-out documents; bars are 95 % intervals.", plots.bits_per_byte(data)))
        if svg := plots.needle_heatmap(data.evaluations[next(reversed(data.evaluations))]):
            figures.append((plots.TITLE, plots.NOTE, svg))
    return figures


# The first screen: is it better, where, what did it cost, what now.


@dataclass(frozen=True)
class ScoreRow:
    """One score of the models of a run beside the champion's."""

    name: str
    unit: str
    """Empty for bits per byte."""
    stages: list[Score | None]
    """After each stage; the last is the final model's."""
    champion: float | None
    change: str
    """From the champion's score, or else from that of the stage before."""
    verdict: str
    tone: str
    """`good`, `bad`, or empty."""
    baseline: str
    """How it compares with a 5-gram or with guessing, if the verdict is about the champion."""

    @property
    def score(self) -> Score:
        """That of the final model."""
        assert self.stages[-1] is not None
        return self.stages[-1]


@dataclass(frozen=True)
class Summary:
    """The answers of the report's first screen."""

    tone: str
    """`good`, `bad` or `open`."""
    headline: str
    reasons: list[str]
    origin: str
    """Which run it is a rerun of, and what was reused."""
    stages: list[str]
    """Those of the columns of `scores`."""
    against: str
    """What their column of changes compares with; empty: nothing."""
    scores: list[ScoreRow]
    tiles: list[tuple[str, str, str]]
    """Name, value, and what it counts."""
    next: list[tuple[str, str]]
    """A command, and what it does."""


def summarize(root: Root, data: ReportData) -> Summary:
    """Return the answers of the first screen, as far as the run has got."""
    record, decision = data.record, data.decision
    stages = [stage for stage in data.evaluations if stage != CHAMPION][-STAGES:]
    scores = _score_rows(data, stages)
    better, worse = (sum(row.verdict == word for row in scores) for word in ("better", "worse"))
    compared = [row for row in scores if row.champion is not None]
    tone, reasons = "open", decision.refusals if decision else []
    if record.verdict == PENDING_APPROVAL:
        headline, reasons = "It passed the gate and waits for the approval of a person.", _below_counting(data)
    elif decision is not None and decision.accepted:
        tone, headline = "good", f"Promoted: the first model of {record.family}, so there was none to compare with."
        if compared:
            headline = f"Promoted: better than the champion on {better}, worse on {worse} of {len(compared)} scores."
        if reasons := _below_counting(data):
            tone = "open"
    elif decision is not None:
        tone, headline = "bad", "Not promoted: it stays a candidate."
    elif record.error:
        tone, headline, reasons = "bad", f"It {record.state}.", [record.error.splitlines()[0]]
    elif record.state == "running":
        headline = "It is still running; there is no verdict yet."
    else:
        headline = f"Not judged: it stopped after {record.until or 'its last step'}."
    if record.judged_in:
        headline = f"Unchanged since {record.judged_in}, which was judged. {headline}"
    against = CHAMPION if compared else stages[-2] if len(stages) > 1 else ""
    tiles, then = _tiles(data), _next(root, data)
    return Summary(tone, headline, reasons[:REASONS], _origin(record), stages, against, scores, tiles, then)


def _below_counting(data: ReportData) -> list[str]:
    """Return a sentence if counting bytes predicts the held-out text better than the final model."""
    score, counted = data.bits_per_byte, data.baseline.get(BPB)
    if score is None or counted is None or score <= counted:
        return []
    return [
        f"It is worse than a 5-gram, which only counts how often a byte follows four others: {number(score)} against "
        f"{number(counted)} bits per byte."
    ]


def _origin(record: RunRecord) -> str:
    made = [name for name, step in record.steps.items() if step.outcome != REUSED]
    texts, reused = [], len(record.steps) - len(made)
    if record.rerun_of:
        begin = record.redo_from or (made[0] if made else "")
        texts.append(f"rerun of {record.rerun_of}" + (f" from {begin}" if begin else ""))
    if reused:
        texts.append(f"{reused} of {len(record.steps)} steps reused")
    return ", ".join(texts)


def _score_rows(data: ReportData, stages: Sequence[str]) -> list[ScoreRow]:
    """Return the scores of the final model that tell most: bits per byte by domain, then whole benchmarks."""
    scores = data.evaluations[stages[-1]] if stages else {}
    judged = {row.metric: row for row in data.decision.rows} if data.decision else {}
    keys = sorted(filter(lambda key: _tells_most(scores[key]), scores), key=lambda key: (not key.startswith(BPB), key))
    keys, others = keys[:SCORES], dict[str, float]()
    for key in keys:
        if key in data.evaluations.get(CHAMPION, {}):
            others[key] = data.evaluations[CHAMPION][key].value
        elif key in judged and (value := judged[key].champion) is not None:
            others[key] = value
    earlier = {} if others or len(stages) < 2 else data.evaluations[stages[-2]]
    befores = others or {key: score.value for key, score in earlier.items()}
    rows = []
    for key in keys:
        score, gate = scores[key], judged.get(key)
        verdict, tone, baseline = "", "", ""
        if key in data.baseline:
            won = score.value < data.baseline[key]
            verdict = f"{'better' if won else 'no better'} than a 5-gram: {number(data.baseline[key])}"
            tone = "good" if won else "bad"
        elif score.chance is not None:
            verdict = f"{'above' if score.low > score.chance else 'no better than'} guessing: {score.chance:.3g}"
        if gate and gate.low is not None and gate.high is not None:
            verdict, tone, baseline = "no clear difference", "", verdict
            if gate.low > 0 or gate.high < 0:
                won = (gate.high < 0) == (score.better == "lower")
                verdict, tone = ("better", "good") if won else ("worse", "bad")
        name = "bits per byte" if key == BPB else key.removeprefix(PREFIX).replace("bpb/", "· ")
        unit = "" if score.unit == BITS else score.unit
        change = format_change(score.value, befores[key], score.better == "higher") if key in befores else ""
        after = [data.evaluations[stage].get(key) for stage in stages]
        rows.append(ScoreRow(name, unit, after, others.get(key), change, verdict, tone, baseline))
    return rows


def _tells_most(score: Score) -> bool:
    """Return whether a score is shown first: bits per byte, the mean of the tasks, or a whole benchmark."""
    levels = score.key.removeprefix(PREFIX).split("/")
    return levels[0] in ("bpb", "core") or (len(levels) == 1 and score.chance is not None)


def _score_table(data: ReportData) -> list[tuple[str, list[Score | None]]]:
    """Return all scores but those of single languages: the key, and the value after each stage and of the champion."""
    keys = dict.fromkeys(key for scores in data.evaluations.values() for key in scores if LANGUAGE not in key)
    return [(key, [scores.get(key) for scores in data.evaluations.values()]) for key in keys]


def _tiles(data: ReportData) -> list[tuple[str, str, str]]:
    record = data.record
    tiles = []
    if data.stages:
        last = data.stages[-1]
        tiles.append(("loss", f"{last.last_loss:.3f}", f"mean at the end of {last.name}"))
        bits = last.bits_per_byte if data.bits_per_byte is None else data.bits_per_byte
        if bits is not None:
            tiles.append(("bits per byte", number(bits), "of held-out text"))
        end, own = last.end, sum(stage.tokens for stage in data.stages if stage.outcome != REUSED)
        note = f"of which {tokens(own)} in this run" if own else "none of them in this run"
        tiles.append(("tokens", tokens(end), "trained on" if own == end else note))
    if record.ended:
        ends = [datetime.fromisoformat(text) for text in (record.started, record.ended)]
        tiles.append(("time", format_duration((ends[1] - ends[0]).total_seconds()), "from start to end"))
    if hours := record.cost.get("gpu_hours"):
        tiles.append(("device time", format_duration(3600 * hours), "of this run's training, summed over the devices"))
    if record.peak_memory_gib:
        tiles.append(("memory", f"{record.peak_memory_gib:.3g} GiB", "most that its processes had"))
    if record.attempts > 1:
        tiles.append(("attempts", str(record.attempts), "interrupted and resumed"))
    return tiles


def _next(root: Root, data: ReportData) -> list[tuple[str, str]]:
    record, name = data.record, data.record.name
    steps = []

    def line(*words: str) -> str:
        return command(root, *words, page=True)

    if record.state != "finished":
        steps.append((line("status", name), "what it does now, and how its attempts ended"))
    if record.verdict == PENDING_APPROVAL:
        steps.append((line("approve", name), "promote it; herd reject rejects it"))
    if data.stages:
        steps.append((line("generate", name, "--prompt", "Once upon a time"), "let it write"))
        if data.decision and data.decision.accepted:
            steps.append((line("export", name, f"{name}-hf", "--format", "hf"), "files for other programs"))
        last = trained_stages(data.recipe, record)[-1]
        again = line("rerun", name, "--from", last.name, "--set", example_change(last.stage))
        steps.append((again, "change a field and redo only what follows from it"))
    if data.other:
        steps.append((line("compare", data.other, name), f"what differs from {data.other}"))
    return steps


def render_data(page: DataPage) -> str:
    """Return the data page as HTML."""
    from herd.llama3.data.curate import explain  # imports numba
    from herd.tasks.report import plots  # imports matplotlib

    note = "Documents by size, powers of two: filled those that are kept, in outline all that were read."
    figures = [("Lengths", "lengths", note, plots.length_histogram(page))] if page.lengths else []
    return render("data.html", {**FILTERS, "explain": explain}, page=page, figures=figures)


def _number(value: Any, digits: int = 4) -> str:
    return "" if value is None or value != value else number(value, digits)


def _interval(ends: GateRow | Score, digits: int = 4) -> str:
    low, high = _number(ends.low, digits), _number(ends.high, digits)
    return f"{low} .. {high}" if low and high else ""


FILTERS: dict[str, Callable[..., Any]] = {
    "tokens": tokens,
    "num": _number,
    "unbroken": lambda text: escape(text).replace("5-gram", Markup('<span class="unbroken">5-gram</span>')),
    "asked": lambda score: f"asked {score.requests[:8]}, version {score.version}, {score.shots} shots",
    "interval": _interval,
    "count": lambda value: f"{value:,}",
    "megabytes": lambda size: f"{size / 1e6:,.2f}" if size < 1e8 else f"{size / 1e6:,.0f}",
    "round_tokens": lambda count: "" if count is None else tokens(int(float(f"{count:.2g}"))),
    "seconds": lambda value: f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min",
    "when": lambda text: datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S UTC") if text else "",
}
"""Filters of the templates."""
