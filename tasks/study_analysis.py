"""From the outcomes of a study to its verdict, tables and figures: which analysis answers which kind of question.

The analyses are in `llama3/scaling`; here they are given what the study's file says, and their pictures are drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from llama3.evaluate.gold import PREFIX, gold_key
from llama3.model.flops import embedding_rows
from llama3.recipe.units import Tokens, tokens
from llama3.scaling.ablation import ablation_verdict
from llama3.scaling.annealing import annealing_verdict
from llama3.scaling.backtest import TaskPoints, forecast_verdict
from llama3.scaling.chinchilla import Chinchilla, fit_chinchilla
from llama3.scaling.forecast import RUNS, Interval, Point
from llama3.scaling.isoflop import Ladder, NoLaw, Parabola, Trial, fit_ladder
from llama3.scaling.ladder_verdict import ladder_verdict, no_law
from llama3.scaling.outcome import Outcome
from llama3.scaling.posed import Posed
from llama3.scaling.shape import nearest, shape_changes, shape_for
from llama3.scaling.verdict import Verdict
from tasks import forecast_plot
from tasks.study_backtest import backtest_table
from tasks.study_mix import mix_analysis
from tasks.study_page import Analysis, Figure, ViewTable
from tasks.study_plots import PARABOLAS, isoflop, ladder_figures


def analyse(posed: Posed, found: Sequence[Outcome], flags: Sequence[str] = ()) -> Analysis:
    """Return what the runs of a study say; `flags` weaken it whatever they say.

    Runs that are too few or cannot be compared are a verdict too: none, and why.
    """
    try:
        made = _analysed(posed, found)
    except ValueError as error:
        made = Analysis(Verdict(headline=[f"no verdict: {' '.join(str(error).split())}"]))
    verdict = made.verdict.model_copy(update={"flags": [*flags, *made.verdict.flags]})
    return Analysis(verdict, made.tables, made.figures)


def _analysed(posed: Posed, found: Sequence[Outcome]) -> Analysis:
    study, ran = posed.study, {one.arm for one in found}
    match study.kind:
        case "ladder":
            return _ladder(posed, found)
        case "mix":
            return mix_analysis(posed, found)
        case "annealing":
            assert study.annealing is not None
            sources = {name: name for name in study.annealing.new if name in ran}
            return Analysis(annealing_verdict(found, posed.control, sources))
        case "compare":
            assert study.compare is not None
            others = ran - {study.compare.control}
            arms = {name: lines for name, lines in study.compare.arms.items() if name in others}
            weights: dict[str, float] = {domain: float(share) for domain, share in posed.base.first_mix.items()}
            return Analysis(ablation_verdict(found, posed.control, arms, study.compare.score, weights))
        case _:
            raise ValueError(f"{study.name}: no analysis for studies of kind {study.kind}")


def _ladder(posed: Posed, found: Sequence[Outcome]) -> Analysis:
    asked = posed.study.ladder
    assert asked is not None
    if unscored := [one.run for one in found if asked.score not in one.scores]:
        raise ValueError(f"ladder.score: {unscored[0]} has no {asked.score!r}; it has {', '.join(found[0].scores)}")
    trials = [_trial(one, asked.score) for one in found]
    try:
        made = fit_ladder(trials, asked.budgets)
    except NoLaw as reason:
        picture = [("Loss by budget", PARABOLAS, isoflop(reason.parabolas))] if reason.parabolas else []
        return Analysis(no_law(reason), [], picture)
    other = _alternative(trials)
    verdict = ladder_verdict(made, asked.to, other)
    change = _sized(posed, made, asked.to) if asked.to else []
    tables = [_optima(made)]
    figures = ladder_figures(made, asked.to)
    if asked.forecast and asked.to:
        told, more, drawn = _forecast(found, made, asked.forecast, asked.to)
        tables += more
        verdict = verdict.model_copy(
            update={"headline": [*verdict.headline, *told.headline], "flags": [*verdict.flags, *told.flags]}
        )
        figures += drawn
    return Analysis(verdict.model_copy(update={"change": change}), tables, figures)


def _trial(one: Outcome, score: str) -> Trial:
    return Trial(one.parameters, one.tokens, one.flops, one.scores[score].value, one.run)


def _alternative(trials: Sequence[Trial]) -> Chinchilla | None:
    """Return the fit of L(N, D), or None where the runs are too few or too alike for it."""
    try:
        return fit_chinchilla(trials)
    except ValueError:
        return None


def _optima(made: Ladder) -> ViewTable:
    rows = [
        [f"{one.budget:.3g}", str(len(one.trials)), *_range(one.tokens), f"{one.loss:.4f}", _enters(one)]
        for one in made.parabolas
        if one.tokens.value == one.tokens.value
    ]  # fmt: skip
    note = "Where the parabola of each budget is lowest; a minimum at the edge of its grid does not enter the law."
    return ViewTable("Budgets", note, ["budget", "runs", "best tokens", "95 %", "loss", "enters the law"], rows)


def _range(found: Interval) -> tuple[str, str]:
    return tokens(found.value), f"{tokens(found.low)} to {tokens(found.high)}" if found.low == found.low else ""


def _enters(one: Parabola) -> str:
    return "yes" if one.used else f"no: {f'the best has the {one.edge}' if one.edge else 'no clear minimum'}"


def _sized(posed: Posed, made: Ladder, flops: float) -> list[str]:
    """Return the changes that make the base recipe a run of `flops` operations, spent as the law says."""
    assert posed.study.ladder is not None
    best, rows = made.law.at(flops), embedding_rows(posed.base)
    like = nearest(best.parameters.value, posed.study.ladder.sizes.values(), rows)
    stage = posed.base.stages[-1]
    batch = stage.batch or next(one.batch for one in reversed(posed.base.stages) if one.batch)
    end = Tokens(max(1, round(best.tokens.value / batch)) * batch)
    fall = [f"lr.{posed.base.lr.rule}.over={end}"] if posed.base.lr.wsd is None else []
    ends = [f"stages.{stage.name}.until={end}", *([f"stages.{stage.name}.for=null"] if stage.length else [])]
    shape = shape_for(best.parameters.value, like, rows)
    return [*shape_changes(shape, posed.base.model), *ends, *fall]


def _forecast(
    found: Sequence[Outcome], made: Ladder, tasks: Sequence[str], flops: float
) -> tuple[Verdict, list[ViewTable], list[Figure]]:
    """Return the forecast of each task's accuracy at `flops`, its back-test, and its picture.

    The line goes through the best run of each budget, as published, where the budgets are enough to test that.
    """
    best = [min(one.trials, key=lambda trial: trial.loss).name for one in made.parabolas if one.used]
    straight = best if len(best) > RUNS else None
    points = {name: task for name in tasks if (task := _points(found, f"{PREFIX}{name}", straight)) is not None}
    lacking = [
        f"{name}: the runs were not asked it; name a task of evaluate.suite" for name in tasks if name not in points
    ]
    told = forecast_verdict(points, flops)
    told = told.model_copy(update={"flags": [*told.flags, *lacking]})
    return told, list(_tested(points)), list(_drawn(points, flops))


def _tested(points: Mapping[str, TaskPoints]) -> Iterator[ViewTable]:
    for name, task in points.items():
        with suppress(ValueError):  # too few runs for one; the verdict says so
            yield backtest_table(name, task.backtest())


def _points(found: Sequence[Outcome], key: str, straight: Collection[str] | None) -> TaskPoints | None:
    asked = [one for one in found if key in one.scores and gold_key(key) in one.scores]
    if not asked:
        return None
    points = [
        Point(one.run, one.flops, one.scores[gold_key(key)].value, one.scores[key].value, one.scores[key].n)
        for one in asked
    ]
    return TaskPoints(points, asked[0].scores[key].chance or 0.0, straight)


def _drawn(points: Mapping[str, TaskPoints], flops: float) -> Iterator[Figure]:
    for name, task in points.items():
        try:
            made = task.fit()
        except ValueError:
            continue
        note = "Nats per byte of the gold answer against training operations, and accuracy against those nats."
        yield f"Forecast: {name}", note, forecast_plot.forecast(made, made.at(flops))
