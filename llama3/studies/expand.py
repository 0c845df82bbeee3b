"""From a study to its runs: one resolved recipe for every arm and repeat, checked before any work starts.

A run of an arm is an ordinary run: the recipe is all there is to it, so whoever has the file can repeat it without the
study. Runs are told apart by the digest of their recipe and by nothing else, which is why a study that is given again,
or that shares arms with its former self, finds what is finished. What this gives up: an arm cannot change where it
runs, since that is no part of a recipe.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from heapq import nsmallest
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import ValidationError

from llama3.model.flops import embedding_rows, flops_per_token, parameter_count, trained_flops
from llama3.recipe.base import DOMAINS, Domain, read_plain
from llama3.recipe.load import RecipeError, digest, fault_lines, parse_recipe, resolved
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from llama3.recipe.sections import Model
from llama3.recipe.units import Share, Tokens
from llama3.studies.published import batch_tokens, peak_lr
from llama3.studies.study import (
    ANNEAL,
    BASE,
    DEFAULT,
    TOKENIZER,
    Annealing,
    Ladder,
    MixDesign,
    MixSearch,
    Shares,
    Study,
    Variant,
    override,
)
from llama3.tokens.mix import apportion
from storage.artifact import flatten
from storage.secrets import refuse_secrets

# The arms of a scaling-law ladder: every budget spent on every size, with the rate and the batch that fit them.
#
# Tokens follow from budget and size by the FLOP formula that the study names, rounded down to whole batches, so a
# run takes a little less than its budget. As published (arXiv 2407.21783, section 3.2.1): a warm-up of 2,000 steps,
# a cosine to a tenth of the peak, peaks of 2e-4 to 4e-4 by size, batches of 250K to 4M tokens by budget; how rate
# and batch move between those ends is not published, and taken to be a power law. What this gives up: a rate tuned
# for each run.

STAGE = "main"


def ladder_arms(ladder: Ladder, base: Recipe) -> list[Variant]:
    """Return an arm for each budget and size that its tokens per parameter allow, budgets from the least."""
    rows = embedding_rows(base)
    counts = {name: parameter_count(spec, rows) for name, spec in ladder.sizes.items()}
    _refuse_twins(counts)
    return [arm for budget in sorted(ladder.budgets) for arm in _of_budget(ladder, base, budget, counts)]


def per_token(ladder: Ladder, spec: Model, rows: int) -> float:
    """Return training operations per token of a size, by the study's formula."""
    found = flops_per_token(spec, rows, ladder.seq)
    match ladder.formula:
        case "6N":
            return found.six_n
        case "causal":
            return found.causal
        case "full":
            return found.full
        case _:
            raise ValueError(f"ladder.formula: {ladder.formula!r} is none of 6N, causal and full")


def _of_budget(ladder: Ladder, base: Recipe, budget: float, counts: dict[str, int]) -> Iterator[Variant]:
    least, most = ladder.tokens_per_parameter
    batch = batch_of(ladder, budget)
    for name, spec in sorted(ladder.sizes.items(), key=lambda item: counts[item[0]]):
        wanted = budget / per_token(ladder, spec, embedding_rows(base))
        total = int(wanted // batch) * batch
        if total and least <= wanted / counts[name] <= most:
            yield Variant(
                f"{budget:.3g}-{name}".replace("+", ""),
                _overrides(ladder, base, spec, counts, name, batch, total),
                budget,
            )


def _overrides(
    ladder: Ladder, base: Recipe, spec: Model, counts: dict[str, int], name: str, batch: int, total: int
) -> tuple[str, ...]:
    peak = peak_lr(counts[name], (min(counts.values()), max(counts.values())), ladder.peak)
    stage = {"name": STAGE, "until": f"{total} tokens", "seq": ladder.seq, "batch": f"{batch} tokens"}
    shape = {**spec.model_dump(mode="json"), "max_seq": max(spec.max_seq, ladder.seq)}
    rate = {
        "peak": peak,
        "warmup": str(ladder.warmup),
        "cosine": {"to": peak * ladder.decay, "over": f"{total} tokens"},
    }
    return (
        override("model", shape),
        override("lr", rate),
        override("stages", [{**stage, "mix": resolved(base)["stages"][0]["mix"]}]),
        override("evaluate.after", []),
    )


def batch_of(ladder: Ladder, budget: float) -> Tokens:
    """Return the tokens per step of a budget: a power of two of sequences."""
    wanted = batch_tokens(budget, (min(ladder.budgets), max(ladder.budgets)), ladder.batch)
    sequences = 1
    while 2 * sequences * ladder.seq <= wanted * 2**0.5:
        sequences *= 2
    return Tokens(sequences * ladder.seq)


def _refuse_twins(counts: dict[str, int]) -> None:
    by_count: dict[int, str] = {}
    for name, count in counts.items():
        if count in by_count:
            raise RecipeError(
                f"ladder.sizes: {name} and {by_count[count]} both have {count:,} parameters; leave one out"
            )
        by_count[count] = name


# Which mixes a search tries: around the base mix, on a lattice of the simplex, or drawn at random around the base.
#
# `around` moves one domain at a time by a step, up and down, the others in proportion: the fewest runs that tell
# each domain's effect. `lattice` cuts the simplex of all mixes with at least half of each base share into equal
# parts (Scheffe 1958, JRSS B 20:344-360). `draws` are Dirichlet draws around the base mix, as RegMix makes them
# (arXiv 2407.01492). All shares are whole tenths of a percent, so that they can be written down. What this gives
# up: an optimal design for a given form of the answer.
#
# Whichever way mixes were found, `check_mixes` says before any of them is run whether a fit over the logarithms of
# their shares (`llama3/studies/mixture.py`) can tell the domains apart.

MixShares = dict[Domain, Fraction]
Array = NDArray[np.float64]
PARTS = 1000
"""Shares are whole multiples of 1 / PARTS."""
LEAST_SHARE = 1e-3
"""A share of nothing has no logarithm."""


def designed(design: MixDesign, base: Mapping[Domain, Fraction]) -> dict[str, MixShares]:
    """Return the mixes of a design by name, without the base mix itself; domains without a share stay without.

    Raises ValueError for a step that no domain can take.
    """
    present = {domain: share for domain, share in base.items() if share}
    match design.kind:
        case "around":
            found = dict(_around(present, Fraction(design.step)))
        case "lattice":
            found = dict(_lattice(present, design.degree))
        case "draws":
            found = dict(_draws(present, design.count, design.spread, design.seed))
        case _:
            raise ValueError(f"mix.design.kind: {design.kind!r} is none of around, lattice and draws")
    return {name: whole(mix) for name, mix in found.items() if whole(mix) != whole(present)}


def whole(shares: Mapping[Domain, Fraction]) -> MixShares:
    """Return shares as whole multiples of 1 / PARTS that sum to 1, each within one of what it was."""
    counts = apportion(PARTS, list(shares.values()))
    return {domain: Fraction(count, PARTS) for domain, count in zip(shares, counts, strict=True)}


def _around(base: MixShares, step: Fraction) -> Iterator[tuple[str, MixShares]]:
    """Yield the base mix with each domain raised and lowered; one that has less than the step keeps half of it."""
    for domain, share in base.items():
        if not 0 < step < 1 - share:
            raise ValueError(
                f"mix.design.step: {Share(step)} more of {domain}, which has {Share(share)}, leaves nothing for the "
                f"others; write less than {Share(1 - share)}"
            )
        for word, new in (("more", share + step), ("less", max(share - step, share / 2))):
            rest = (1 - new) / (1 - share)
            yield f"{word}-{domain}", {other: new if other == domain else old * rest for other, old in base.items()}


def _lattice(base: MixShares, degree: int) -> Iterator[tuple[str, MixShares]]:
    """Yield the points of the simplex lattice {domains, degree} above half of each base share."""
    floor = {domain: share / 2 for domain, share in base.items()}
    free = 1 - sum(floor.values())
    for point in product(range(degree + 1), repeat=len(base)):
        if sum(point) == degree:
            parts = zip(base, point, strict=True)
            name = "lattice-" + "-".join(str(count) for count in point)
            yield name, {domain: floor[domain] + free * Fraction(count, degree) for domain, count in parts}


def _draws(base: MixShares, count: int, spread: float, seed: int) -> Iterator[tuple[str, MixShares]]:
    """Yield Dirichlet draws whose mean is the base mix; the larger `spread`, the nearer to it."""
    weights = np.array([float(share) for share in base.values()]) * spread * len(base)
    for number, drawn in enumerate(np.random.default_rng(seed).dirichlet(weights, count)):
        shares = [Fraction(float(share)).limit_denominator(10**6) for share in drawn]
        total = sum(shares, Fraction(0))
        yield f"draw-{number + 1}", dict(zip(base, (share / total for share in shares), strict=True))


def domains_of(mixes: Collection[Mapping[str, object]]) -> tuple[str, ...]:
    """Return the domains that have a share in any of the mixes; a mix may leave some out."""
    return tuple(dict.fromkeys(domain for mix in mixes for domain, share in mix.items() if share))


def share_table(mixes: Sequence[Mapping[str, float]], domains: Sequence[str]) -> Array:
    """Return the shares as [mixes, domains]."""
    return np.array([[float(mix.get(domain, 0.0)) for domain in domains] for mix in mixes])


def logs(shares: Array) -> Array:
    """Return logarithms of shares, a share of nothing taken for a tenth of a percent."""
    return np.asarray(np.log(np.maximum(shares, LEAST_SHARE)))


def check_mixes(mixes: Sequence[Mapping[str, float]]) -> None:
    """Raise ValueError unless a fit with one coefficient a domain can be made over the mixes, and leaves a residual."""
    domains = domains_of(mixes)
    if len(mixes) < len(domains) + 2:
        raise ValueError(
            f"mix: {len(mixes)} mixes, where a fit over {len(domains)} domains takes {len(domains) + 2}; add arms, or "
            "write design: {kind: around}"
        )
    columns = logs(share_table(mixes, domains))
    rows = np.column_stack([np.ones(len(mixes)), columns])
    if np.linalg.matrix_rank(rows, tol=1e-6) < rows.shape[1]:
        flat = [domain for domain, column in zip(domains, columns.T, strict=True) if np.ptp(column) < 1e-6]
        which = f"{flat[0]} has one share in all of them" if flat else "their domains move together"
        raise ValueError(f"mix: the mixes do not tell the domains apart: {which}; add arms that move it alone")


# The arms of each kind of study: what it changes in its base recipe.
#
# An arm is a name and overrides, as `--set` takes them, so what an arm does can be read, and done by hand. All that
# two arms must not differ in (documents, tokenizer, seeds) is set for all of them in `posed.py`.


def arms_of(study: Study, base: Recipe) -> list[Variant]:
    """Return the arms of a study of `base`, the control first. Raises ValueError naming what is wrong with them."""
    if study.ladder:
        return ladder_arms(study.ladder, base)
    if study.mix:
        return _mix_arms(study.mix, base)
    if study.annealing:
        return _annealing_arms(study.annealing, base)
    assert study.compare is not None
    control = study.compare.control
    arms = [Variant(name, tuple(overrides)) for name, overrides in study.compare.arms.items()]
    return sorted(arms, key=lambda arm: arm.name != control)


def control_of(study: Study) -> str:
    """Return the name of the arm that the others are compared with; nothing for a ladder."""
    if study.compare:
        return study.compare.control
    return {"mix": BASE, "annealing": DEFAULT}.get(study.kind, "")


def _mix_arms(search: MixSearch, base: Recipe) -> list[Variant]:
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
    arms = [Variant(name, (override(f"mix.{search.of}", _text(mix)), *same), shares=mix) for name, mix in mixes.items()]
    return [*arms, *(Variant(name, (*extra, *same), shares=shares) for name, extra in search.others.items())]


def _listed(search: MixSearch) -> dict[str, Shares]:
    for name, mix in search.arms.items():
        if name == BASE:
            raise RecipeError(f"mix.arms: {BASE!r} is the recipe's own mix, always an arm; call this one otherwise")
        if (total := sum(mix.values())) != 1:
            raise RecipeError(f"mix.arms.{name}: the shares sum to {Share(total)}; change them until they sum to 100%")
    return {name: {domain: Fraction(share) for domain, share in mix.items()} for name, mix in search.arms.items()}


def _text(shares: Mapping[Domain, Fraction]) -> dict[str, str]:
    return {domain: str(Share(share)) for domain, share in shares.items()}


def _annealing_arms(asked: Annealing, base: Recipe) -> list[Variant]:
    """Return an arm for each new source, and the control. All sources are in all recipes: they share their tokens."""
    named = [stage.name for stage in base.stages]
    if asked.after not in named:
        raise RecipeError(f"annealing.after: {asked.after!r} is no stage of the recipe; it has {', '.join(named)}")
    plain = resolved(base)
    kept = plain["stages"][: named.index(asked.after) + 1]
    mix = asked.mix or kept[-1]["mix"]
    sources = override("sources", _with_new(plain["sources"], asked))

    def arm(name: str, add: dict[str, str]) -> Variant:
        stage = {**kept[-1], "name": ANNEAL, "until": None, "for": str(asked.length), "mix": mix, "add": add}
        stage |= {"lr": "linear to 0", "average": None, "advance": {}, "draw": 0}
        free = "require_judged=nothing"  # the study is what supplies the judgements
        return Variant(name, (sources, free, override("stages", [*kept, stage]), override("evaluate.after", [])))

    return [arm(DEFAULT, {}), *(arm(name, {name: str(asked.share)}) for name in asked.new)]


def _with_new(sources: dict[str, list[dict[str, Any]]], asked: Annealing) -> dict[str, list[dict[str, Any]]]:
    found = {domain: list(items) for domain, items in sources.items()}
    for name, source in asked.new.items():
        plain = source.model_dump(mode="json", by_alias=True, exclude={"domain"})
        found.setdefault(source.domain, []).append({**plain, "name": name})
    return found


@dataclass(frozen=True)
class ArmRun:
    """One repeat of an arm."""

    arm: Variant
    repeat: int
    """Counted from 1."""
    recipe: Recipe

    @property
    def name(self) -> str:
        """How people call it: `math-30 2`."""
        return f"{self.arm.name} {self.repeat}"

    @cached_property
    def digest(self) -> str:
        return digest(resolved(self.recipe))

    @cached_property
    def tokens(self) -> int:
        return Schedule(self.recipe).tokens

    @cached_property
    def parameters(self) -> int:
        return parameter_count(self.recipe.model, embedding_rows(self.recipe))

    @cached_property
    def flops(self) -> float:
        """Training operations, causal attention counted."""
        return trained_flops(self.recipe, self.recipe.model, embedding_rows(self.recipe), self.tokens)


class ExpandedStudy:
    """A study with its base recipe: all that decides its runs."""

    def __init__(self, study: Study, data: dict[str, Any], place: str) -> None:
        self.study, self.data, self.place = study, data, place
        self.base = self.recipe([])

    def recipe(self, overrides: Iterable[str]) -> Recipe:
        """Return the base recipe with the study's changes and `overrides`, under its own name. Raises RecipeError."""
        return parse_recipe(copy.deepcopy(self.data), self.place, [*self.study.set, *overrides])

    @cached_property
    def digest(self) -> str:
        """Of the question and the base recipe, every default filled in."""
        asked = self.study.model_dump(mode="json", by_alias=True, exclude={"recipe"})
        return digest([asked, resolved(self.base)])

    @cached_property
    def control(self) -> str:
        """Name of the arm that the others are compared with; nothing for a ladder."""
        return control_of(self.study)

    @cached_property
    def runs(self) -> list[ArmRun]:
        """All runs, arm by arm. Raises ValueError."""
        return list(arm_runs(self))


ARMS = {"compare": "arms", "mix": "others"}
"""Kinds of study to which arms can be added, and the field that lists them."""


def load_study(
    path: Path, changes: Sequence[str] = (), further: Mapping[str, list[str]] | None = None
) -> ExpandedStudy:
    """Return the study in the YAML file `path`, `changes` of its base recipe and `further` arms added to its own.

    Raises RecipeError naming the file and each faulty field.
    """
    data = _read(path)
    data["set"] = [*(data.get("set") or []), *changes]
    if further:
        kind, field = next(
            ((kind, field) for kind, field in ARMS.items() if isinstance(data.get(kind), dict)), ("", "")
        )
        if not kind:
            raise RecipeError(f"{path}: takes no further arms; only a comparison or a mix search does")
        data[kind][field] = {**(data[kind].get(field) or {}), **further}
    try:
        refuse_secrets(data, str(path))
        study = Study.model_validate(data)
    except ValidationError as error:
        raise RecipeError(fault_lines(error, Study, str(path))) from None
    base = path.parent / study.recipe
    return ExpandedStudy(study, _read(base), str(base))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = read_plain(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); name a YAML file") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: must be a mapping, not {type(data).__name__}")
    return data


def arm_runs(posed: ExpandedStudy) -> Iterator[ArmRun]:
    """Yield every run of the study. Raises ValueError naming what is wrong with its arms."""
    study, base = posed.study, posed.base
    seeds = study.seeds or [base.seed]
    common = [f"name={study.name}", f"data_seed={base.seed if base.data_seed is None else base.data_seed}"]
    helpings = study.annealing.draws if study.annealing else 1
    for arm in arms_of(study, base):
        for index, (seed, draw) in enumerate((seed, draw) for seed in seeds for draw in range(1, helpings + 1)):
            overrides = [*arm.overrides, *common, f"seed={seed}", *_helping(study, draw)]
            yield ArmRun(arm, index + 1, posed.recipe(overrides))


def _helping(study: Study, draw: int) -> list[str]:
    """Return the override that makes arms of an annealing study read other documents in each repeat.

    Counted from 1: helping 0 would go on with the mix of the stage before, whose last units would then be dealt
    otherwise in the control than in the arms, and the checkpoint that all begin from would be trained twice.
    """
    return [f"stages.{ANNEAL}.draw={draw}"] if study.annealing else []


def changed(one: Recipe, other: Recipe) -> list[str]:
    """Return the fields in which two recipes differ, stages by name: `stages.main.until`, `lr.peak`."""
    plain = [flatten(_by_name(resolved(recipe))) for recipe in (one, other)]
    keys = sorted(set(plain[0]) | set(plain[1]))
    return [key for key in keys if plain[0].get(key) != plain[1].get(key)]


def _by_name(plain: dict[str, Any]) -> dict[str, Any]:
    return {**plain, "stages": {stage["name"]: stage for stage in plain["stages"]}}


# A model shape with a given number of parameters: another one, made larger or smaller in all its proportions.
#
# Width and depth grow together, heads keep their size, the FFN its ratio to the width, key/value heads their
# number; the layers then take up what whole heads leave over. Roughly so the published sizes relate: the 8B made
# larger gives 118 layers of 16,384 for 405B parameters, where Llama 3 has 126 with a narrower FFN. What this gives
# up: exact numbers, as whole heads and layers can be a fifth off, and the best aspect ratio, on which the loss
# depends little (arXiv 2001.08361, section 3.1).

MOST_HEADS = 4096
SPAN = 1.5
"""How much deeper or shallower than in proportion."""
WIDTHS = 3
"""The nearest ones that are tried in every depth."""
PROPORTION = 0.1
"""What a factor in depth over width weighs beside the same factor in the number of parameters."""


def shape_for(parameters: float, like: Model, rows: int) -> Model:
    """Return the shape like `like` with about so many parameters, `rows` embedding rows included."""
    widths = nsmallest(WIDTHS, _widths(like), key=lambda spec: _factor(parameter_count(spec, rows), parameters))

    def off(spec: Model) -> float:
        proportion = _factor(spec.layers / spec.dim, like.layers / like.dim)
        return _factor(parameter_count(spec, rows), parameters) + PROPORTION * proportion

    return min((shape for wide in widths for shape in _depths(wide)), key=off)


def nearest(parameters: float, sizes: Iterable[Model], rows: int) -> Model:
    """Return the shape whose parameter count is off by the smallest factor."""
    return min(sizes, key=lambda spec: _factor(parameter_count(spec, rows), parameters))


def shape_changes(spec: Model, base: Model) -> list[str]:
    """Return the overrides that give a recipe with `base` the shape of `spec`."""
    fields = ("layers", "dim", "ffn", "heads", "kv_heads", "tied_embeddings")
    wanted = {field: getattr(spec, field) for field in fields if getattr(spec, field) != getattr(base, field)}
    return [f"model.{field}={str(value).lower()}" for field, value in wanted.items()]


def _factor(one: float, other: float) -> float:
    return abs(math.log(one / other))


def _depths(wide: Model) -> Iterator[Model]:
    for layers in range(max(1, math.floor(wide.layers / SPAN)), math.ceil(wide.layers * SPAN) + 1):
        yield wide.model_copy(update={"layers": layers})


def _widths(like: Model) -> Iterator[Model]:
    size, ratio = like.dim // like.heads, like.ffn / like.dim
    for heads in range(like.kv_heads, MOST_HEADS, like.kv_heads):
        dim = heads * size
        layers = max(1, round(like.layers * dim / like.dim))
        shape = {"layers": layers, "dim": dim, "ffn": max(8, round(ratio * dim / 8) * 8), "heads": heads}
        yield Model.model_validate({**like.model_dump(), "preset": "custom", **shape})
