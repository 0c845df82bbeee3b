"""Refuse a study before it costs anything: variants that cannot be compared, too few variants, too high a cost.

Weak points that only reduce the confidence in an answer become flags of the verdict instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from herd.llama3.recipe.load import RecipeError
from herd.llama3.recipe.units import tokens
from herd.llama3.studies.expand import ExpandedStudy, VariantRun, changed_fields, check_mixes
from herd.llama3.studies.results import distinct_stages
from herd.llama3.studies.study import ANNEAL

LEAST_BUDGETS, LEAST_SIZES = 3, 3
"""A line needs two minima, and a third to estimate its error; a parabola needs three points."""


def check_study(expanded: ExpandedStudy, runs: Sequence[VariantRun] | None = None) -> None:
    """Raise RecipeError with one line per fault unless the variants can answer the question of the study."""
    planned = expanded.runs if runs is None else runs
    faults = [*_check_names(expanded), *_check_against_control(expanded), *_check_ladder(expanded)]
    study, search = expanded.study, expanded.study.mix
    if study.annealing and study.annealing.draws > 1 and len(study.seeds) > 1:  # draws of one seed share a checkpoint
        faults.append(
            f"annealing.draws: {study.annealing.draws} draws of {len(study.seeds)} seeds are not independent; "
            "use one seed with several draws"
        )
    if search and (search.design or search.variants):  # only these variants enter the fit over shares
        mixes = {run.variant.name: run.variant.shares for run in expanded.runs if run.variant.name not in search.others}
        try:
            check_mixes([{str(domain): float(share) for domain, share in mix.items()} for mix in mixes.values()])
        except ValueError as error:
            faults.append(str(error))
    limit, total = study.limits.flops, sum(work.flops for work in distinct_stages(planned).values())
    if limit is not None and total > limit:
        faults.append(
            f"limits.flops: the runs take {total:.3g} operations on {tokens(sum(run.tokens for run in planned))} "
            f"tokens, more than {limit:.3g}; reduce the variants, the repeats or their length, or raise the limit"
        )
    if faults:
        raise RecipeError("\n".join(f"{study.name}: {fault}" for fault in dict.fromkeys(faults)))


def varied_fields(expanded: ExpandedStudy) -> tuple[str, ...]:
    """Return the recipe fields that the study varies."""
    study = expanded.study
    if study.compare:
        return tuple(study.compare.varies)
    if study.mix:
        return (f"mix.{study.mix.of}",)
    return (f"stages.{ANNEAL}",)


def _check_names(expanded: ExpandedStudy) -> Iterator[str]:
    """Yield duplicate names of variants, and variants with equal recipes."""
    for name, count in Counter(run.name for run in expanded.runs).items():
        if count > 1:
            yield f"{name.rpartition(' ')[0]}: {count} variants have this name; rename one"
    recipes = Counter((run.digest, run.repeat) for run in expanded.runs)
    for run in expanded.runs:
        if recipes[run.digest, run.repeat] > 1:
            twin = next(other for other in expanded.runs if other.digest == run.digest)
            if twin.name != run.name:
                yield f"{run.variant.name}: is the same recipe as {twin.variant.name}; leave one of them out"


def _check_against_control(expanded: ExpandedStudy) -> Iterator[str]:
    """Yield other differences from the control than the study allows, and other numbers of tokens."""
    if expanded.study.ladder:
        return
    control = next(run for run in expanded.runs if run.variant.name == expanded.control)
    free_variants = expanded.study.mix.others if expanded.study.mix else {}
    varied = varied_fields(expanded)
    allowed = (*varied, *expanded.own_fields(expanded.base.seed))
    for run in expanded.runs:
        if run.repeat == control.repeat and run.variant.name not in free_variants:
            extra = [
                key
                for key in changed_fields(run.recipe, control.recipe)
                if not any(key == field or key.startswith(f"{field}.") for field in allowed)
            ]
            if extra:
                yield (
                    f"{run.variant.name}: also differs from {expanded.control} in {', '.join(extra)}; the study varies "
                    f"{', '.join(varied)}: name it under compare.varies, or "
                    "give it to all variants with set"
                )
    for run in expanded.runs:
        if run.tokens != control.tokens:  # a variant with more training would seem to be a better recipe
            yield (
                f"{run.variant.name}: trains on {run.tokens:,} tokens, {expanded.control} on {control.tokens:,}; "
                "end their last stages at one position that is a multiple of both batches"
            )


def _check_ladder(expanded: ExpandedStudy) -> Iterator[str]:
    """Yield budgets with too few sizes, and too few budgets for a law."""
    ladder = expanded.study.ladder
    if ladder is None:
        return
    sizes = Counter(run.variant.budget for run in expanded.runs if run.repeat == 1)
    if len(sizes) < LEAST_BUDGETS:
        yield f"ladder.budgets: {len(sizes)} budgets, a law needs {LEAST_BUDGETS}; add some a factor of two apart"
    low, high = ladder.tokens_per_parameter
    for budget in ladder.budgets:
        if sizes[budget] < LEAST_SIZES:
            yield (
                f"ladder.sizes: {sizes[budget]} sizes fit the budget {budget:.3g}, a parabola needs {LEAST_SIZES}; add "
                f"sizes, or widen ladder.tokens_per_parameter {low:g} to {high:g}"
            )
