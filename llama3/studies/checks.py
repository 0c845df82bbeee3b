"""What is refused before a study spends anything: arms that cannot be compared, too few of them, too high a cost.

Each message names the field, the value and what to do. What only weakens an answer is a flag in its verdict instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from llama3.recipe.load import RecipeError
from llama3.recipe.units import tokens
from llama3.studies.expand import ArmRun, ExpandedStudy, changed, check_mixes
from llama3.studies.results import once
from llama3.studies.study import ANNEAL

ALWAYS = ("name", "seed", "data_seed")
"""Fields that the study itself sets."""
LEAST_BUDGETS, LEAST_SIZES = 3, 3
"""A line through minima needs two, and a third to know how far off it is; a parabola needs three points."""


def check_study(posed: ExpandedStudy, runs: Sequence[ArmRun] | None = None) -> None:
    """Raise RecipeError, a line for each fault, unless the arms answer the question that the study asks."""
    chosen = posed.runs if runs is None else runs
    faults = [*_repeats(posed), *_same_names(posed), *_differ(posed), *_tokens(posed), *_ladder(posed)]
    faults += [*_mixes(posed), *_cost(posed, chosen)]
    if faults:
        raise RecipeError("\n".join(f"{posed.study.name}: {fault}" for fault in dict.fromkeys(faults)))


def allowed(posed: ExpandedStudy) -> tuple[str, ...]:
    """Return the fields of a recipe in which arms may differ from the control."""
    study = posed.study
    if study.compare:
        return (*study.compare.varies, *ALWAYS)
    if study.mix:
        return (f"mix.{study.mix.of}", *ALWAYS)
    return (f"stages.{ANNEAL}", *ALWAYS)


def _differ(posed: ExpandedStudy) -> Iterator[str]:
    """Yield what else differs between an arm and the control."""
    if posed.study.ladder:
        return
    control = next(run for run in posed.runs if run.arm.name == posed.control)
    others = posed.study.mix.others if posed.study.mix else {}
    fields = allowed(posed)
    for run in posed.runs:
        if run.repeat != control.repeat or run.arm.name in others:
            continue
        beyond = [key for key in changed(run.recipe, control.recipe) if not _within(key, fields)]
        if beyond:
            yield (
                f"{run.arm.name}: differs from {posed.control} in {', '.join(beyond)} too; the study varies "
                f"{', '.join(field for field in fields if field not in ALWAYS)}: name it under compare.varies, or "
                "give it to all arms with set"
            )


def _within(key: str, fields: Sequence[str]) -> bool:
    return any(key == field or key.startswith(f"{field}.") for field in fields)


def _tokens(posed: ExpandedStudy) -> Iterator[str]:
    """Yield arms that train on another number of tokens than the control: more training is no better recipe."""
    if posed.study.ladder:
        return
    control = next(run for run in posed.runs if run.arm.name == posed.control)
    for run in posed.runs:
        if run.tokens != control.tokens:
            yield (
                f"{run.arm.name}: trains on {run.tokens:,} tokens, {posed.control} on {control.tokens:,}; "
                "end their last stages at one position that is a multiple of both batches"
            )


def _repeats(posed: ExpandedStudy) -> Iterator[str]:
    """Yield repeats that are not independent: helpings of one seed share the checkpoint that they begin from."""
    study = posed.study
    if study.annealing and study.annealing.draws > 1 and len(study.seeds) > 1:
        yield (
            f"annealing.draws: {study.annealing.draws} helpings of {len(study.seeds)} seeds are not independent; "
            "take several of one of them"
        )


def _same_names(posed: ExpandedStudy) -> Iterator[str]:
    names = Counter(run.name for run in posed.runs)
    for name, count in names.items():
        if count > 1:
            yield f"{name.rpartition(' ')[0]}: {count} arms have this name; rename one"
    same = Counter((run.digest, run.repeat) for run in posed.runs)
    for run in posed.runs:
        if same[run.digest, run.repeat] > 1:
            twin = next(other for other in posed.runs if other.digest == run.digest)
            if twin.name != run.name:
                yield f"{run.arm.name}: is the same recipe as {twin.arm.name}; leave one of them out"


def _ladder(posed: ExpandedStudy) -> Iterator[str]:
    """Yield budgets that too few sizes are left for, and too few budgets for a law."""
    ladder = posed.study.ladder
    if ladder is None:
        return
    sizes = Counter(run.arm.budget for run in posed.runs if run.repeat == 1)
    if len(sizes) < LEAST_BUDGETS:
        yield f"ladder.budgets: {len(sizes)} budgets, a law needs {LEAST_BUDGETS}; add some a factor of two apart"
    low, high = ladder.tokens_per_parameter
    for budget in ladder.budgets:
        if sizes[budget] < LEAST_SIZES:
            yield (
                f"ladder.sizes: {sizes[budget]} sizes fit the budget {budget:.3g}, a parabola needs {LEAST_SIZES}; add "
                f"sizes, or widen ladder.tokens_per_parameter {low:g} to {high:g}"
            )


def _mixes(posed: ExpandedStudy) -> Iterator[str]:
    """Yield why no fit can be made over the mixes of a search; one that varies no shares needs none."""
    search = posed.study.mix
    if search is None or (search.design is None and not search.arms):
        return
    mixes = {run.arm.name: run.arm.shares for run in posed.runs if run.arm.name not in search.others}
    try:
        check_mixes([{str(domain): float(share) for domain, share in mix.items()} for mix in mixes.values()])
    except ValueError as fault:
        yield str(fault)


def _cost(posed: ExpandedStudy, runs: Sequence[ArmRun]) -> Iterator[str]:
    limit, total = posed.study.limits.flops, sum(work.flops for work in once(runs).values())
    if limit is not None and total > limit:
        yield (
            f"limits.flops: the runs take {total:.3g} operations on {tokens(sum(run.tokens for run in runs))} tokens, "
            f"more than {limit:.3g}; take fewer arms or repeats, shorten them, or raise it"
        )
