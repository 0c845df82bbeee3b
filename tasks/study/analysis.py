"""Run the analysis of each kind of study on its results, and build its tables and figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction

import numpy as np
import pyarrow.parquet as pq

from herd.llama3.evaluate.scores import PREFIX, SAMPLES_FILE, SCORES_FILE, gold_key, read_scores
from herd.llama3.evaluate.suite import BPB
from herd.llama3.model.files import CONFIG, read_config
from herd.llama3.model.flops import parameter_count, recipe_vocab_size
from herd.llama3.recipe import keys
from herd.llama3.recipe.base import DOMAINS, Domain
from herd.llama3.recipe.load import digest
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Tokens, tokens
from herd.llama3.studies.chinchilla import fit_chinchilla
from herd.llama3.studies.expand import ExpandedStudy, VariantRun, nearest_shape, scale_shape, shape_changes
from herd.llama3.studies.forecast import RUNS, Backtest, EvaluatedPoint, Interval, TaskPoints, forecast_verdict
from herd.llama3.studies.isoflop import IsoflopFit, NoLawError, Trial, fit_ladder
from herd.llama3.studies.mixture import Mixture, Proposal, fit_mixture, mix_trials, pareto, propose
from herd.llama3.studies.results import RunResult, Samples, StudyVerdict
from herd.llama3.studies.study import BASE, PROPOSED, Ladder, MixSearch
from herd.llama3.studies.verdicts import (
    ablation_verdict,
    annealing_verdict,
    ladder_verdict,
    mix_verdict,
    no_law_verdict,
    round_proposal,
)
from herd.storage.artifact import Artifact, Store
from herd.tasks.html import Figure
from herd.tasks.report import plots
from herd.tasks.runs.records import RunRecord
from herd.tasks.study.page import Analysis, ResultTable
from herd.tasks.study.plan import training_flops
from herd.tasks.study.plots import (
    PANELS,
    PARABOLAS,
    against_shares,
    isoflop,
    ladder_figures,
)

COLUMNS = (
    *("run", "forecast from", "operations", "beyond", "nats per byte", "measured nats", "nats inside"),
    *("accuracy", "measured accuracy", "accuracy inside"),
)
ACCURACY_INSIDE, NATS_INSIDE = 9, 6
"""Columns that show whether accuracy and nats lie inside their intervals."""


def analyze(expanded: ExpandedStudy, results: Sequence[RunResult], flags: Sequence[str] = ()) -> Analysis:
    """Return the analysis of a study's results `found`; `flags` are added to those of the verdict.

    Results that are too few or cannot be compared give a verdict that says so.
    """
    study, finished = expanded.study, {result.variant for result in results}
    try:
        if study.ladder:
            analysis = _ladder_analysis(expanded, study.ladder, results)
        elif study.mix:
            analysis = mix_analysis(expanded, results)
        elif study.annealing:
            sources = {name: name for name in study.annealing.new if name in finished}
            analysis = Analysis(annealing_verdict(results, expanded.control, sources))
        else:
            assert study.compare is not None
            changes = {
                name: overrides
                for name, overrides in study.compare.variants.items()
                if name in finished and name != study.compare.control
            }
            weights: dict[str, float] = {domain: float(share) for domain, share in expanded.base.first_mix.items()}
            analysis = Analysis(ablation_verdict(results, expanded.control, changes, study.compare.score, weights))
    except ValueError as error:
        analysis = Analysis(StudyVerdict(headline=[f"no verdict: {' '.join(str(error).split())}"]))
    verdict = analysis.verdict.model_copy(update={"flags": [*flags, *analysis.verdict.flags]})
    return Analysis(verdict, analysis.tables, analysis.figures)


# Results from records and artifacts


def outcomes(expanded: ExpandedStudy, store: Store, answers: Mapping[str, RunRecord]) -> list[RunResult]:
    """Return the results of a study's finished runs, in the order of its variants. Raises ValueError."""
    return [
        outcome(expanded, store, variant, answers[variant.name]) for variant in expanded.runs if variant.name in answers
    ]


def outcome(expanded: ExpandedStudy, store: Store, variant: VariantRun, record: RunRecord) -> RunResult:
    """Return the result of one run. Operations are those of the trained model, with its own vocab_size."""
    checkpoint, evaluation = last_artifacts(store, record, variant.recipe)
    config, vocab_size = read_config(checkpoint.path_of(f"model/{CONFIG}").parent)
    scores = read_scores(evaluation.path_of(SCORES_FILE).parent)
    table = pq.read_table(
        evaluation.path_of(SAMPLES_FILE), columns=["key", "id", "numerator", "denominator", "group", "cluster"]
    )
    sample_keys = np.array(table["key"].to_pylist())
    samples = {}
    for key in sorted(set(sample_keys.tolist()) & set(scores)):
        own = table.filter(sample_keys == key).sort_by("id")
        groups = tuple(own["group"].to_pylist())
        samples[key] = Samples(
            tuple(own["id"].to_pylist()),
            own["numerator"].to_numpy().astype(np.float64),
            own["denominator"].to_numpy().astype(np.float64),
            groups if len(set(groups)) > 1 and not key.startswith("eval/bpb") else (),
            tuple(name or "" for name in own["cluster"].to_pylist()),
        )
    return RunResult(
        variant=variant.variant.name,
        repeat=variant.repeat,
        run=record.name,
        parameters=parameter_count(config, vocab_size),
        tokens=int(checkpoint.metadata["end"]),
        flops=training_flops(expanded, variant.recipe.schedule.segments, config, vocab_size),
        scores=scores,
        samples=samples,
    )


def last_artifacts(store: Store, record: RunRecord, recipe: Recipe) -> tuple[Artifact, Artifact]:
    """Return checkpoint and evaluation of the run's last stage. Raises ValueError if either was deleted."""
    span, stage = recipe.schedule.trained[-1], recipe.stages[-1].name
    return store.load(record.steps[span.name].artifact), store.load(record.steps[f"evaluate-{stage}"].artifact)


def leaks(store: Store, answers: Mapping[str, RunRecord], recipe: Recipe) -> list[str]:
    """Return a line for each source with a name, as the judged ones have, that holds examples of an evaluation set."""
    from herd.llama3.data.readers.sources import source_names

    # The ledger calls a source by its address.
    named = {
        (domain, known): source.name
        for domain, sources in recipe.sources.items()
        for source, known in zip(sources, source_names(sources), strict=True)
        if source.name
    }
    labels = {record.steps["curate"].artifact for record in answers.values() if "curate" in record.steps}
    dropped, read = Counter[str](), Counter[str]()
    for label in labels:
        with suppress(OSError, ValueError):  # it was deleted since
            ledger = pq.read_table(store.load(label).path_of("ledger.parquet")).to_pylist()
            for row in ledger:
                source = named.get((row["domain"], row["source"]), "")
                read[source] += row["documents"]
                dropped[source] += row["documents"] * (row["outcome"] == "contaminated")
    return [
        f"{source}: {dropped[source]:,} of {read[source]:,} documents held an example of an evaluation set and were "
        "dropped; ask where it comes from before you use it"
        for source in named.values()
        if dropped[source]
    ]


TOKEN_PARAMETERS = (keys.collected, keys.annotated, keys.curated, keys.tokenizer, keys.tokens)
"""Each returns what decides a step up to the token shards."""


def other_data(answers: Mapping[str, RunRecord], variants: Sequence[VariantRun]) -> list[str]:
    """Return a line for each variant whose token shards differ from the first variant's although its recipe does not.

    Then the sources changed between the runs, and the variants differ in more than the study varies.
    """
    first: dict[str, tuple[str, str]] = {}
    lines = []
    for variant in variants:
        record = answers.get(variant.name)
        if record is None or "tokenize" not in record.steps:
            continue
        label, data = record.steps["tokenize"].artifact, digest([of(variant.recipe) for of in TOKEN_PARAMETERS])
        name, other = first.setdefault(data, (variant.name, label))
        if other != label:
            lines.append(
                f"{variant.name}: was trained on {label}, {name} on {other}, from equal recipes: the sources changed "
                f"between them; run it again with herd rerun {record.name} --from collect"
            )
    return lines


# Mix search


def mix_analysis(expanded: ExpandedStudy, results: Sequence[RunResult]) -> Analysis:
    """Return the analysis of a mix search. Raises ValueError for too few mixes, or a missing control.

    Variants that change other things than shares are compared with the base mix, and not part of the fit.
    """
    search, finished = expanded.study.mix, {result.variant for result in results}
    assert search is not None
    shares, weights = _mixes(expanded, search, finished)
    if list(shares) == [BASE]:
        changes = {name: overrides for name, overrides in search.others.items() if name in finished}
        return Analysis(ablation_verdict(results, BASE, changes, BPB, weights))
    mixture, best = _proposal(search, results, shares, weights)
    variants = [name for name in dict.fromkeys(run.variant.name for run in expanded.runs) if name in finished - {BASE}]
    verdict = mix_verdict(mixture, best, results, BASE, variants, search.of)
    return Analysis(verdict, _mix_tables(mixture, best), _mix_figures(mixture))


def proposed_mix(expanded: ExpandedStudy, results: Sequence[RunResult]) -> dict[Domain, Fraction] | None:
    """Return the mix that a mix search predicts to be better than the base mix; None if there is none."""
    search = expanded.study.mix
    if search is None:
        return None
    try:
        shares, weights = _mixes(expanded, search, {result.variant for result in results})
        _, best = _proposal(search, results, shares, weights)
    except ValueError:  # too few mixes, as the verdict says
        return None
    shares_of = round_proposal(best)
    return {domain: shares_of[domain] for domain in DOMAINS if domain in shares_of} if best.significant else None


def _mixes(
    expanded: ExpandedStudy, search: MixSearch, finished: Collection[str]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return the shares of the variants that are fitted, and the weights of the domains. Raises ValueError."""
    if BASE not in finished:
        raise ValueError(f"mix: the control variant {BASE} has no finished run; run it too")
    shares: dict[str, dict[str, float]] = {
        run.variant.name: {domain: float(share) for domain, share in run.variant.shares.items()}
        for run in expanded.runs
        if run.variant.name in set(finished) - {*search.others, PROPOSED}
    }
    weights: dict[str, float] = {domain: float(share) for domain, share in search.weights.items()}
    return shares, weights or shares[BASE]


def _proposal(
    search: MixSearch,
    results: Sequence[RunResult],
    shares: Mapping[str, Mapping[str, float]],
    weights: Mapping[str, float],
) -> tuple[Mixture, Proposal]:
    """Return the fit and the best blend. Raises ValueError."""
    mixture = fit_mixture(mix_trials(results, shares), weights)
    base = np.array([shares[BASE].get(domain, 0.0) for domain in mixture.domains])
    bounds: dict[str, tuple[float, float]] = {
        domain: (float(low), float(high)) for domain, (low, high) in search.bounds.items()
    }
    return mixture, propose(mixture, base, bounds)


def _mix_tables(mixture: Mixture, best: Proposal) -> list[ResultTable]:
    """Return the variants with their shares and losses, lowest weighted bits first, and the best blend."""
    front = pareto(mixture)
    mixes = []
    for i in np.argsort(mixture.totals):
        shares = [f"{share:.1%}" for share in mixture.shares[i]]
        losses = [f"{loss:.4f}" for loss in mixture.losses[i]]
        totals = [f"{mixture.totals[i]:.4f}", f"{mixture.best.predicted[i]:.4f}"]
        mixes.append([mixture.variants[i], *shares, *losses, *totals, "yes" if mixture.variants[i] in front else ""])
    domains = mixture.domains
    columns = ["variant", *domains, *(f"bpb {domain}" for domain in domains), "weighted", "predicted", "Pareto"]
    note = (
        "Bits per byte, means over repeats. Predicted: by the fit through all other variants. Pareto: no variant beats "
        "it on every domain."
    )
    blend = [
        [domain, f"{weight:.1%}", f"{share.value:.1%}", f"{share.low:.1%} to {share.high:.1%}", f"{slope:+.4f}"]
        for (domain, share), weight, slope in zip(
            best.shares.items(),
            mixture.weights,
            mixture.slopes(mixture.shares[mixture.variants.index(BASE)]),
            strict=True,
        )
    ]
    blend_note = (
        "The best blend of the variants, with the interval due to noise. Slope: weighted bits per byte for an e-fold "
        "of the domain's share from the base mix, the others shrunk in proportion; below 0 more of it helps."
    )
    return [
        ResultTable("Mixes", note, columns, mixes),
        ResultTable("Best blend", blend_note, ["domain", "weight", "share", "95 %", "slope"], blend),
    ]


def _mix_figures(mixture: Mixture) -> list[Figure]:
    shares, losses = (
        {
            variant: dict(zip(mixture.domains, row.tolist(), strict=True))
            for variant, row in zip(mixture.variants, table, strict=True)
        }
        for table in (mixture.shares, mixture.losses)
    )
    return [("Bits per byte by share", PANELS, against_shares(shares, losses, BASE))]


# Ladder


def _ladder_analysis(expanded: ExpandedStudy, ladder: Ladder, results: Sequence[RunResult]) -> Analysis:
    if unscored := [result.run for result in results if ladder.score not in result.scores]:
        raise ValueError(f"ladder.score: {unscored[0]} has no {ladder.score!r}; it has {', '.join(results[0].scores)}")
    trials = [
        Trial(result.parameters, result.tokens, result.flops, result.scores[ladder.score].value, result.run)
        for result in results
    ]
    try:
        fitted = fit_ladder(trials, ladder.budgets)
    except NoLawError as reason:
        figure = [("Loss by budget", PARABOLAS, isoflop(reason.parabolas))] if reason.parabolas else []
        return Analysis(no_law_verdict(reason), [], figure)
    alternative = None
    with suppress(ValueError):  # too few or too similar runs for L(N, D)
        alternative = fit_chinchilla(trials)
    verdict = ladder_verdict(fitted, ladder.to, alternative)
    tables, figures = [_budget_table(fitted)], ladder_figures(fitted, ladder.to)
    if ladder.to and ladder.forecast:
        forecast = _forecast(results, fitted, ladder.forecast, ladder.to)
        tables += forecast.tables
        figures += forecast.figures
        verdict = verdict.model_copy(
            update={
                "headline": [*verdict.headline, *forecast.verdict.headline],
                "flags": [*verdict.flags, *forecast.verdict.flags],
            }
        )
    change = _recipe_changes(expanded, ladder, fitted, ladder.to) if ladder.to else []
    return Analysis(verdict.model_copy(update={"change": change}), tables, figures)


def _budget_table(fitted: IsoflopFit) -> ResultTable:
    rows = []
    for parabola in fitted.parabolas:
        best = parabola.tokens
        if math.isnan(best.value):
            continue
        interval = "" if math.isnan(best.low) else f"{tokens(best.low)} to {tokens(best.high)}"
        reason = f"the best has the {parabola.edge}" if parabola.edge else "no clear minimum"
        enters = "yes" if parabola.used else f"no: {reason}"
        runs = str(len(parabola.trials))
        rows.append([f"{parabola.budget:.3g}", runs, tokens(best.value), interval, f"{parabola.loss:.4f}", enters])
    note = "The minimum of each budget's parabola; a minimum at the edge of its grid does not enter the law."
    return ResultTable("Budgets", note, ["budget", "runs", "best tokens", "95 %", "loss", "enters the law"], rows)


def _recipe_changes(expanded: ExpandedStudy, ladder: Ladder, fitted: IsoflopFit, flops: float) -> list[str]:
    """Return the changes that make the base recipe a run of `flops` operations, allocated by the law."""
    best, vocab_size = fitted.law.optimum(flops), recipe_vocab_size(expanded.base)
    like = nearest_shape(best.parameters.value, ladder.sizes.values(), vocab_size)
    stage = expanded.base.stages[-1]
    batch = stage.batch or next(earlier.batch for earlier in reversed(expanded.base.stages) if earlier.batch)
    end = Tokens(max(1, round(best.tokens.value / batch)) * batch)
    changes = shape_changes(scale_shape(best.parameters.value, like, vocab_size), expanded.base.model)
    changes.append(f"stages.{stage.name}.until={end}")
    if stage.length:
        changes.append(f"stages.{stage.name}.for=null")
    return changes + expanded.base.lr.decay.overrides_for(end)


def _forecast(results: Sequence[RunResult], fitted: IsoflopFit, names: Sequence[str], flops: float) -> Analysis:
    """Return the forecast of each task's accuracy at `flops`, its back-test, and its figure.

    The line goes through the best run of each budget, as published, if the budgets are enough to test that.
    """
    best = [min(budget.trials, key=lambda trial: trial.loss).name for budget in fitted.parabolas if budget.used]
    straight = best if len(best) > RUNS else None
    tasks = {name: task for name in names if (task := _task_points(results, f"{PREFIX}{name}", straight))}
    verdict = forecast_verdict(tasks, flops)
    missing = [
        f"{name}: the runs were not evaluated on it; name a task of evaluate.suite"
        for name in names
        if name not in tasks
    ]
    verdict = verdict.model_copy(update={"flags": [*verdict.flags, *missing]})
    tables, figures = [], []
    note = "Nats per byte of the gold answer against training operations, and accuracy against those nats."
    for name, task in tasks.items():
        with suppress(ValueError):  # the verdict says why
            tables.append(backtest_table(name, task.backtest()))
        with suppress(ValueError):
            fit = task.fit()
            figures.append((f"Forecast: {name}", note, plots.forecast_plot(fit, fit.predict(flops))))
    return Analysis(verdict, tables, figures)


def _task_points(results: Sequence[RunResult], key: str, straight: Collection[str] | None) -> TaskPoints | None:
    """Return the points of the runs that were evaluated on a task; None if there are none."""
    gold, chance = gold_key(key), 0.0
    points: list[EvaluatedPoint] = []
    for result in results:
        if key in result.scores and gold in result.scores:
            score = result.scores[key]
            if not points:
                chance = score.chance or 0.0
            points.append(EvaluatedPoint(result.run, result.flops, result.scores[gold].value, score.value, score.n))
    return TaskPoints(points, chance, straight) if points else None


def backtest_table(name: str, test: Backtest) -> ResultTable:
    """Return the back-test of the benchmark `name`, a row for each run and each fit without it."""

    def interval(value: Interval) -> str:
        return f"{value.value:.4f} ({value.low:.4f} to {value.high:.4f})"

    rows, outside = [], {}
    for index, row in enumerate(test.rows):
        forecast = row.forecast
        rows.append(
            [
                *(row.run, f"{row.runs} runs", f"{forecast.flops:.3g}", f"{forecast.beyond:.3g} x"),
                *(interval(forecast.nll), f"{row.nll:.4f}", "yes" if row.nll_in_interval else "no"),
                *(interval(row.expected), f"{row.accuracy:.4f}", "yes" if row.in_interval else "no"),
            ]
        )
        if not row.in_interval:
            outside[index, ACCURACY_INSIDE] = "bad"
        if not row.nll_in_interval:
            outside[index, NATS_INSIDE] = "bad"
    note = (
        f"Each run forecast from those of less compute. Inside their 95 % intervals: {test.in_interval:.0%} of "
        f"accuracies, {test.nll_in_interval:.0%} of nats; the interval of the accuracy includes the sampling noise of "
        f"the questions. No further levels left out: {test.stopped}."
    )
    return ResultTable(f"Back-test: {name}", note, COLUMNS, rows, outside)
