"""From the outcomes of a study to its verdict, tables and figures: which analysis answers which kind of question.

The analyses are in `llama3/studies`; here they are given what the study's file says, and their pictures are drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from llama3.evaluate.scores import PREFIX, SAMPLES_FILE, SCORES_FILE, Score, gold_key, read_scores
from llama3.evaluate.suite import BPB
from llama3.model.files import CONFIG, read_config
from llama3.model.flops import embedding_rows, parameter_count
from llama3.recipe.base import Domain
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from llama3.recipe.units import Tokens, tokens
from llama3.studies.chinchilla import Chinchilla, fit_chinchilla
from llama3.studies.expand import ArmRun, ExpandedStudy, nearest, shape_changes, shape_for
from llama3.studies.forecast import RUNS, Backtest, EvaluatedPoint, Interval, TaskPoints, forecast_verdict
from llama3.studies.isoflop import IsoflopFit, NoLaw, Parabola, Trial, fit_ladder
from llama3.studies.mixture import Mixture, Proposal, fit_mixture, mix_trials, pareto, propose
from llama3.studies.results import RunResult, Samples, StudyVerdict
from llama3.studies.study import BASE
from llama3.studies.verdicts import ablation_verdict, annealing_verdict, ladder_verdict, mix_verdict, no_law
from storage.artifact import Artifact, Store
from tasks.report import plots
from tasks.runs.records import RunRecord
from tasks.study.page import Analysis, Figure, ViewTable
from tasks.study.plan import training_flops
from tasks.study.plots import (
    LEFT_OUT,
    PANELS,
    PARABOLAS,
    SPLIT,
    against_shares,
    isoflop,
    ladder_figures,
    left_out,
    split,
)

# From the runs of a study to what its analysis reads: scores, samples, tokens and operations of every arm.
#
# All of it is read from records and artifacts. The operations are those of the model as it was trained (its own
# embedding rows), not of the plan. What this gives up: an evaluation made by hand beside the run is not seen.


def outcomes(posed: ExpandedStudy, store: Store, answers: Mapping[str, RunRecord]) -> list[RunResult]:
    """Return what the finished runs of a study came to, in the order of its arms. Raises ValueError."""
    return [outcome(posed, store, arm, answers[arm.name]) for arm in posed.runs if arm.name in answers]


def outcome(posed: ExpandedStudy, store: Store, arm: ArmRun, record: RunRecord) -> RunResult:
    """Return what one run came to."""
    checkpoint, evaluation = last_artifacts(store, record, arm.recipe)
    spec, rows = read_config(checkpoint.part(f"model/{CONFIG}").parent)
    folder = evaluation.part(SCORES_FILE).parent
    scores = read_scores(folder)
    return RunResult(
        arm=arm.arm.name,
        repeat=arm.repeat,
        run=record.name,
        parameters=parameter_count(spec, rows),
        tokens=int(checkpoint.facts["end"]),
        flops=training_flops(posed, Schedule(arm.recipe).segments, spec, rows),
        scores=scores,
        samples=dict(_samples(evaluation.part(SAMPLES_FILE), scores)),
    )


def last_artifacts(store: Store, record: RunRecord, recipe: Recipe) -> tuple[Artifact, Artifact]:
    """Return checkpoint and evaluation of the run's last stage. Raises ValueError where one was deleted."""
    span, stage = Schedule(recipe).trained[-1], recipe.stages[-1].name
    return store.at(record.steps[span.name].artifact), store.at(record.steps[f"evaluate-{stage}"].artifact)


def _samples(path: Path, scores: Mapping[str, Score]) -> Iterator[tuple[str, Samples]]:
    """Yield the samples of each score that has some, in the order of their ids."""
    table = pq.read_table(path, columns=["key", "id", "numerator", "denominator", "group"])
    keys = np.array(table["key"].to_pylist())
    for key in sorted(set(keys.tolist()) & set(scores)):
        own = table.filter(keys == key).sort_by("id")
        groups = tuple(own["group"].to_pylist())
        yield (
            key,
            Samples(
                tuple(own["id"].to_pylist()),
                own["numerator"].to_numpy().astype(np.float64),
                own["denominator"].to_numpy().astype(np.float64),
                groups if len(set(groups)) > 1 and not key.startswith("eval/bpb") else (),
            ),
        )


def shared(posed: ExpandedStudy, store: Store, answers: Mapping[str, RunRecord]) -> list[tuple[str, str, str, int]]:
    """Return the artifacts behind the answers, as (step, artifact, run that made it, runs that stand on it).

    Those that several runs stand on were made once: this is the proof that arms share them.
    """
    uses: dict[tuple[str, str], set[str]] = {}
    for record in {record.name: record for record in answers.values()}.values():
        for step, made in record.steps.items():
            uses.setdefault((step, made.artifact), set()).add(record.name)
    return [(step, label, _maker(store, label), len(runs)) for (step, label), runs in uses.items()]


def _maker(store: Store, label: str) -> str:
    try:
        return store.at(label).manifest.made_by
    except ValueError:  # deleted by retention
        return ""


def other_data(store: Store, answers: Mapping[str, RunRecord], arms: Sequence[ArmRun]) -> list[str]:
    """Return a line for each arm that trained on other token shards than the first, though its recipe asks the same.

    Then the sources changed between the runs, and the arms differ in more than the study says.
    """
    first: dict[str, tuple[str, str]] = {}
    lines = []
    for arm in arms:
        record = answers.get(arm.name)
        if record is None or "tokenise" not in record.steps:
            continue
        label, asked = record.steps["tokenise"].artifact, _data_asked(arm.recipe)
        name, other = first.setdefault(asked, (arm.name, label))
        if other != label:
            lines.append(
                f"{arm.name}: was trained on {label}, {name} on {other}, from equal recipes: the sources changed "
                f"between them; run it again with herd rerun {record.name} --from collect"
            )
    return lines


def _data_asked(recipe: Recipe) -> str:
    fields = recipe.model_dump_json(include={"sources", "curate", "tokenizer", "tokens", "data_seed"})
    return f"{fields} {recipe.model_dump_json(include={'mix'}) if recipe.tokenizer.train is None else ''}"


# The analysis of a mix search, with its tables and pictures.
#
# Arms that change something else than shares (caps of topics, say) are compared with the base mix and left out of
# the fit; where no arm changes shares, that comparison is the verdict. What this gives up: weights that are not
# those of the evaluation; the page says which were used.


def mix_analysis(posed: ExpandedStudy, found: Sequence[RunResult]) -> Analysis:
    """Return what a mix search came to. Raises ValueError for too few mixes, or a missing control."""
    search, ran = posed.study.mix, {one.arm for one in found}
    assert search is not None
    if BASE not in ran:
        raise ValueError(f"mix: the control arm {BASE} has no finished run; run it too")
    shares = {run.arm.name: _plain(run.arm.shares) for run in posed.runs if run.arm.name in ran - set(search.others)}
    weights = _plain(search.weights) or shares[BASE]
    if list(shares) == [BASE]:
        changes = {name: lines for name, lines in search.others.items() if name in ran}
        return Analysis(ablation_verdict(found, BASE, changes, BPB, weights))
    made = fit_mixture(mix_trials(found, shares), weights)
    row = np.array([shares[BASE].get(domain, 0.0) for domain in made.domains])
    bounds: dict[str, tuple[float, float]] = {
        domain: (float(low), float(high)) for domain, (low, high) in search.bounds.items()
    }
    best = propose(made, row, bounds)
    others = [name for name in dict.fromkeys(run.arm.name for run in posed.runs) if name in ran - {BASE}]
    verdict = mix_verdict(made, best, found, BASE, others, search.of)
    return Analysis(verdict, [_arms(made), _proposed(made, best)], _figures(made, best))


def _plain(shares: Mapping[Domain, Fraction]) -> dict[str, float]:
    return {domain: float(share) for domain, share in shares.items()}


def _arms(made: Mixture) -> ViewTable:
    """Return the arms with their shares and losses, the fewest weighted bits first."""
    front = pareto(made)
    order = np.argsort(made.totals)
    rows = [
        [made.arms[i], *(f"{share:.1%}" for share in made.shares[i]), *(f"{loss:.4f}" for loss in made.losses[i]),
         f"{made.totals[i]:.4f}", f"{made.predicted[i]:.4f}", "yes" if made.arms[i] in front else ""]
        for i in order
    ]  # fmt: skip
    columns = ["arm", *made.domains, *(f"bpb {domain}" for domain in made.domains), "weighted", "predicted", "Pareto"]
    note = (
        "Bits per byte, means over repeats. Predicted: by the fit through all other arms. Pareto: no arm beats it on "
        "every domain."
    )
    return ViewTable("Mixes", note, columns, rows)


def _proposed(made: Mixture, best: Proposal) -> ViewTable:
    rows = [
        [domain, f"{weight:.1%}", f"{one.value:.1%}", f"{one.low:.1%} to {one.high:.1%}", f"{slope:+.4f}"]
        for (domain, one), weight, slope in zip(best.shares.items(), made.weights, made.coefficients, strict=True)
    ]
    note = (
        "The best blend of the arms; its spread is what noise leaves open. Slope: weighted bits per byte for each "
        "e-fold of the domain's share; below 0 more of it helps."
    )
    return ViewTable("Best blend", note, ["domain", "weight", "share", "95 %", "slope"], rows)


def _figures(made: Mixture, best: Proposal) -> list[Figure]:
    shares = {
        arm: dict(zip(made.domains, row.tolist(), strict=True)) for arm, row in zip(made.arms, made.shares, strict=True)
    }
    losses = {
        arm: dict(zip(made.domains, row.tolist(), strict=True)) for arm, row in zip(made.arms, made.losses, strict=True)
    }
    pairs = [(float(a), float(b)) for a, b in zip(made.predicted, made.totals, strict=True)]
    return [
        ("Shares", SPLIT, split(shares[BASE], best.shares)),
        ("Bits per byte by share", PANELS, against_shares(shares, losses, BASE)),
        ("Arms that the fit has not seen", LEFT_OUT, left_out({"all domains, weighted": pairs})),
    ]


# The back-test of a forecast as a table: what smaller runs said of larger ones, and what those then scored.
#
# What this gives up: how each fit looked; the figure of the forecast shows the one through all runs.

COLUMNS = (
    *("run", "forecast from", "operations", "beyond", "nats per byte", "measured nats", "nats inside"),
    *("accuracy", "measured accuracy", "accuracy inside"),
)
INSIDE, TONE = 9, 6
"""Columns that say whether accuracy and nats lie inside."""


def backtest_table(name: str, test: Backtest) -> ViewTable:
    """Return the back-test of the benchmark `name`, a row for each run and each fit that it was left out of."""
    rows = [
        [
            *(row.run, f"{row.runs} runs", f"{row.forecast.flops:.3g}", f"{row.forecast.beyond:.3g} x"),
            *(_interval(row.forecast.nats), f"{row.nats:.4f}", _yes(row.nats_inside)),
            *(_interval(row.expected), f"{row.accuracy:.4f}", _yes(row.inside)),
        ]
        for row in test.rows
    ]
    outside = {(place, INSIDE): "bad" for place, row in enumerate(test.rows) if not row.inside}
    outside |= {(place, TONE): "bad" for place, row in enumerate(test.rows) if not row.nats_inside}
    note = (
        f"Each run forecast from those of less compute. Inside their 95 % intervals: {test.inside:.0%} of accuracies, "
        f"{test.nats_inside:.0%} of nats; the luck of the questions is in the interval of the accuracy. "
        f"No further ones left out: {test.stopped}."
    )
    return ViewTable(f"Back-test: {name}", note, COLUMNS, rows, outside)


def _interval(found: Interval) -> str:
    return f"{found.value:.4f} ({found.low:.4f} to {found.high:.4f})"


def _yes(inside: bool) -> str:
    return "yes" if inside else "no"


def analyse(posed: ExpandedStudy, found: Sequence[RunResult], flags: Sequence[str] = ()) -> Analysis:
    """Return what the runs of a study say; `flags` weaken it whatever they say.

    Runs that are too few or cannot be compared are a verdict too: none, and why.
    """
    try:
        made = _analysed(posed, found)
    except ValueError as error:
        made = Analysis(StudyVerdict(headline=[f"no verdict: {' '.join(str(error).split())}"]))
    verdict = made.verdict.model_copy(update={"flags": [*flags, *made.verdict.flags]})
    return Analysis(verdict, made.tables, made.figures)


def _analysed(posed: ExpandedStudy, found: Sequence[RunResult]) -> Analysis:
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


def _ladder(posed: ExpandedStudy, found: Sequence[RunResult]) -> Analysis:
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


def _trial(one: RunResult, score: str) -> Trial:
    return Trial(one.parameters, one.tokens, one.flops, one.scores[score].value, one.run)


def _alternative(trials: Sequence[Trial]) -> Chinchilla | None:
    """Return the fit of L(N, D), or None where the runs are too few or too alike for it."""
    try:
        return fit_chinchilla(trials)
    except ValueError:
        return None


def _optima(made: IsoflopFit) -> ViewTable:
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


def _sized(posed: ExpandedStudy, made: IsoflopFit, flops: float) -> list[str]:
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
    found: Sequence[RunResult], made: IsoflopFit, tasks: Sequence[str], flops: float
) -> tuple[StudyVerdict, list[ViewTable], list[Figure]]:
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


def _points(found: Sequence[RunResult], key: str, straight: Collection[str] | None) -> TaskPoints | None:
    asked = [one for one in found if key in one.scores and gold_key(key) in one.scores]
    if not asked:
        return None
    points = [
        EvaluatedPoint(one.run, one.flops, one.scores[gold_key(key)].value, one.scores[key].value, one.scores[key].n)
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
        yield f"Forecast: {name}", note, plots.forecast(made, made.at(flops))
