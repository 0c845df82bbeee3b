"""The arms of each kind of study: what it changes in its base recipe.

An arm is a name and overrides, as `--set` takes them, so what an arm does can be read, and done by hand. All that two
arms must not differ in (documents, tokenizer, seeds) is set for all of them in `posed.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from llama3.recipe.load import RecipeError, resolved
from llama3.recipe.schema import Recipe
from llama3.recipe.section import DOMAINS, Domain
from llama3.recipe.units import Share
from llama3.scaling.arm import ANNEAL, BASE, DEFAULT, TOKENIZER, Arm, Shares, override
from llama3.scaling.designs import designed
from llama3.scaling.ladder import ladder_arms
from llama3.scaling.study import Annealing, MixSearch, Study


def arms_of(study: Study, base: Recipe) -> list[Arm]:
    """Return the arms of a study of `base`, the control first. Raises ValueError naming what is wrong with them."""
    if study.ladder:
        return ladder_arms(study.ladder, base)
    if study.mix:
        return _mix_arms(study.mix, base)
    if study.annealing:
        return _annealing_arms(study.annealing, base)
    assert study.compare is not None
    control = study.compare.control
    arms = [Arm(name, tuple(overrides)) for name, overrides in study.compare.arms.items()]
    return sorted(arms, key=lambda arm: arm.name != control)


def control_of(study: Study) -> str:
    """Return the name of the arm that the others are compared with; nothing for a ladder."""
    if study.compare:
        return study.compare.control
    return {"mix": BASE, "annealing": DEFAULT}.get(study.kind, "")


def _mix_arms(search: MixSearch, base: Recipe) -> list[Arm]:
    """Return an arm for each mix. The tokenizer is trained by the base mix in all of them, so that it is one."""
    if search.of not in base.mix:
        raise RecipeError(f"mix.of: {search.of!r} is no mix of the recipe; it has {', '.join(base.mix)}")
    shares = {domain: Fraction(base.mix[search.of].get(domain, 0)) for domain in DOMAINS}
    mixes: dict[str, Shares] = {
        BASE: shares,
        **(designed(search.design, shares) if search.design else {}),
        **_listed(search),
    }
    fixed = (override(f"mix.{TOKENIZER}", _text(base.first_mix)), f"tokenizer.train.mix={TOKENIZER}")
    same: tuple[str, ...] = fixed if base.tokenizer.train else ()
    arms = [Arm(name, (override(f"mix.{search.of}", _text(mix)), *same), shares=mix) for name, mix in mixes.items()]
    return [*arms, *(Arm(name, (*extra, *same), shares=shares) for name, extra in search.others.items())]


def _listed(search: MixSearch) -> dict[str, Shares]:
    for name, mix in search.arms.items():
        if name == BASE:
            raise RecipeError(f"mix.arms: {BASE!r} is the recipe's own mix, always an arm; call this one otherwise")
        if (total := sum(mix.values())) != 1:
            raise RecipeError(f"mix.arms.{name}: the shares sum to {Share(total)}; change them until they sum to 100%")
    return {name: {domain: Fraction(share) for domain, share in mix.items()} for name, mix in search.arms.items()}


def _text(shares: Mapping[Domain, Fraction]) -> dict[str, str]:
    return {domain: str(Share(share)) for domain, share in shares.items()}


def _annealing_arms(asked: Annealing, base: Recipe) -> list[Arm]:
    """Return an arm for each new source, and the control. All sources are in all recipes: they share their tokens."""
    named = [stage.name for stage in base.stages]
    if asked.after not in named:
        raise RecipeError(f"annealing.after: {asked.after!r} is no stage of the recipe; it has {', '.join(named)}")
    plain = resolved(base)
    kept = plain["stages"][: named.index(asked.after) + 1]
    mix = asked.mix or kept[-1]["mix"]
    sources = override("sources", _with_new(plain["sources"], asked))

    def arm(name: str, add: dict[str, str]) -> Arm:
        stage = {**kept[-1], "name": ANNEAL, "until": None, "for": str(asked.length), "mix": mix, "add": add}
        stage |= {"lr": "linear to 0", "average": None, "advance": {}, "draw": 0}
        free = "require_judged=nothing"  # the study is what supplies the judgements
        return Arm(name, (sources, free, override("stages", [*kept, stage]), override("evaluate.after", [])))

    return [arm(DEFAULT, {}), *(arm(name, {name: str(asked.share)}) for name in asked.new)]


def _with_new(sources: dict[str, list[dict[str, Any]]], asked: Annealing) -> dict[str, list[dict[str, Any]]]:
    found = {domain: list(items) for domain, items in sources.items()}
    for name, source in asked.new.items():
        plain = source.model_dump(mode="json", by_alias=True, exclude={"domain"})
        found.setdefault(source.domain, []).append({**plain, "name": name})
    return found
