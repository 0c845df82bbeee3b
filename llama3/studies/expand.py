"""Expand a study into its runs: one resolved recipe for every arm and repeat.

A run of an arm is an ordinary run: its recipe contains everything, so it can be repeated without the study. Runs are
identified by the digest of their recipe only, so a study that is started again, or changed, reuses its finished runs.
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

MixShares = dict[Domain, Fraction]
Array = NDArray[np.float64]
STAGE = "main"
"""The single stage of a ladder's arms."""
PARTS = 1000
"""Shares are multiples of 1 / PARTS."""
LEAST_SHARE = 1e-3
"""Replaces a share of 0, which has no logarithm."""
ARMS = {"compare": "arms", "mix": "others"}
"""Kinds of study to which arms can be added, and the field that lists them."""
MOST_HEADS = 4096
SPAN = 1.5
"""Range of depths that are tried, relative to the proportional depth."""
WIDTHS = 3
"""Number of widths that are tried in every depth."""
PROPORTION = 0.1
"""Weight of a factor in depth over width, relative to the same factor in the number of parameters."""


@dataclass(frozen=True)
class ArmRun:
    """One repeat of an arm."""

    arm: Variant
    repeat: int
    """Counted from 1."""
    recipe: Recipe

    @property
    def name(self) -> str:
        """Name for people: `math-30 2`."""
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
        """Training operations, including causal attention."""
        return trained_flops(self.recipe, self.recipe.model, embedding_rows(self.recipe), self.tokens)


class ExpandedStudy:
    """A study with its base recipe, which together determine its runs."""

    def __init__(self, study: Study, data: dict[str, Any], place: str) -> None:
        self.study, self.data, self.place = study, data, place
        self.base = self.recipe([])

    def recipe(self, overrides: Iterable[str]) -> Recipe:
        """Return the base recipe with the study's changes and `overrides`, under its own name. Raises RecipeError."""
        return parse_recipe(copy.deepcopy(self.data), self.place, [*self.study.set, *overrides])

    @cached_property
    def digest(self) -> str:
        """Of the question and the base recipe, with every default."""
        question = self.study.model_dump(mode="json", by_alias=True, exclude={"recipe"})
        return digest([question, resolved(self.base)])

    @cached_property
    def control(self) -> str:
        """Name of the control arm; empty for a ladder."""
        if self.study.compare:
            return self.study.compare.control
        return {"mix": BASE, "annealing": DEFAULT}.get(self.study.kind, "")

    @cached_property
    def runs(self) -> list[ArmRun]:
        """All runs, arm by arm. Raises ValueError."""
        return list(arm_runs(self))


def load_study(
    path: Path, changes: Sequence[str] = (), further: Mapping[str, list[str]] | None = None
) -> ExpandedStudy:
    """Return the study in the YAML file `path`, with `changes` of its base recipe and `further` arms.

    Raises RecipeError with the file and each faulty field.
    """
    data = _read(path)
    data["set"] = [*(data.get("set") or []), *changes]
    if further:
        kind = next((kind for kind in ARMS if isinstance(data.get(kind), dict)), None)
        if kind is None:
            raise RecipeError(f"{path}: takes no further arms; only a comparison or a mix search does")
        data[kind][ARMS[kind]] = {**(data[kind].get(ARMS[kind]) or {}), **further}
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
    """Yield every run of the study. Raises ValueError if its arms are invalid."""
    study, base = posed.study, posed.base
    seeds = study.seeds or [base.seed]
    common = [f"name={study.name}", f"data_seed={base.seed if base.data_seed is None else base.data_seed}"]
    # In an annealing study each repeat reads other documents. Draws count from 1: draw 0 would continue the mix of the
    # stage before, whose last chunks would then differ between control and arms, so the shared checkpoint would be
    # trained twice.
    draws = range(1, study.annealing.draws + 1) if study.annealing else range(1)
    for arm in arms_of(study, base):
        for index, (seed, draw) in enumerate(product(seeds, draws)):
            offset = [f"stages.{ANNEAL}.draw={draw}"] if study.annealing else []
            recipe = posed.recipe([*arm.overrides, *common, f"seed={seed}", *offset])
            yield ArmRun(arm, index + 1, recipe)


def changed(one: Recipe, other: Recipe) -> list[str]:
    """Return the fields in which two recipes differ, stages by name: `stages.main.until`, `lr.peak`."""
    values = []
    for plain in (resolved(one), resolved(other)):
        values.append(flatten({**plain, "stages": {stage["name"]: stage for stage in plain["stages"]}}))
    keys = sorted(set(values[0]) | set(values[1]))
    return [key for key in keys if values[0].get(key) != values[1].get(key)]


# The arms of each kind of study. What must not differ between them (documents, seeds) is set in `arm_runs`.


def arms_of(study: Study, base: Recipe) -> list[Variant]:
    """Return the arms of a study of `base`, the control first. Raises ValueError if they are invalid."""
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


def ladder_arms(ladder: Ladder, base: Recipe) -> list[Variant]:
    """Return an arm for each budget and each size in its range of tokens per parameter, smallest budgets first."""
    rows, arms = embedding_rows(base), []
    counts = {name: parameter_count(spec, rows) for name, spec in ladder.sizes.items()}
    by_count: dict[int, str] = {}
    for name, count in counts.items():
        if by_count.setdefault(count, name) != name:
            raise RecipeError(
                f"ladder.sizes: {name} and {by_count[count]} both have {count:,} parameters; leave one out"
            )
    least, most = ladder.tokens_per_parameter
    mix = resolved(base)["stages"][0]["mix"]
    for budget in sorted(ladder.budgets):
        batch = batch_of(ladder, budget)
        for name, spec in sorted(ladder.sizes.items(), key=lambda item: counts[item[0]]):
            tokens = budget / per_token(ladder, spec, rows)
            total = int(tokens // batch) * batch  # whole batches, so a run takes slightly less than its budget
            if not total or not least <= tokens / counts[name] <= most:
                continue
            peak = peak_lr(counts[name], (min(counts.values()), max(counts.values())), ladder.peak)
            shape = {**spec.model_dump(mode="json"), "max_seq": max(spec.max_seq, ladder.seq)}
            cosine = {"to": peak * ladder.decay, "over": f"{total} tokens"}
            stage = {"name": STAGE, "until": f"{total} tokens", "seq": ladder.seq, "batch": f"{batch} tokens"}
            overrides = (
                override("model", shape),
                override("lr", {"peak": peak, "warmup": str(ladder.warmup), "cosine": cosine}),
                override("stages", [{**stage, "mix": mix}]),
                override("evaluate.after", []),
            )
            arms.append(Variant(f"{budget:.3g}-{name}".replace("+", ""), overrides, budget))
    return arms


def per_token(ladder: Ladder, spec: Model, rows: int) -> float:
    """Return training operations per token of a size, by the study's formula."""
    flops = flops_per_token(spec, rows, ladder.seq)
    match ladder.formula:
        case "6N":
            return flops.six_n
        case "causal":
            return flops.causal
        case "full":
            return flops.full
        case _:
            raise ValueError(f"ladder.formula: {ladder.formula!r} is none of 6N, causal and full")


def batch_of(ladder: Ladder, budget: float) -> Tokens:
    """Return the tokens per step of a budget: a power of two of sequences."""
    target = batch_tokens(budget, (min(ladder.budgets), max(ladder.budgets)), ladder.batch)
    sequences = 1
    while 2 * sequences * ladder.seq <= target * 2**0.5:
        sequences *= 2
    return Tokens(sequences * ladder.seq)


def _mix_arms(search: MixSearch, base: Recipe) -> list[Variant]:
    """Return an arm for each mix."""
    if search.of not in base.mix:
        raise RecipeError(f"mix.of: {search.of!r} is not a mix of the recipe; it has {', '.join(base.mix)}")
    control = {domain: Fraction(base.mix[search.of].get(domain, 0)) for domain in DOMAINS}
    mixes: dict[str, Shares] = {BASE: control, **(designed(search.design, control) if search.design else {})}
    for name, mix in search.arms.items():
        if name == BASE:
            raise RecipeError(f"mix.arms: {BASE!r} is the recipe's own mix, always an arm; choose another name")
        if (total := sum(mix.values())) != 1:
            raise RecipeError(f"mix.arms.{name}: the shares sum to {Share(total)}; change them until they sum to 100%")
        mixes[name] = {domain: Fraction(share) for domain, share in mix.items()}

    def text(shares: Mapping[Domain, Fraction]) -> dict[str, str]:
        return {domain: str(Share(share)) for domain, share in shares.items()}

    common: tuple[str, ...] = ()
    if base.tokenizer.train:  # on the base mix in all arms, so that they share one tokenizer
        common = (override(f"mix.{TOKENIZER}", text(base.first_mix)), f"tokenizer.train.mix={TOKENIZER}")
    arms = [
        Variant(name, (override(f"mix.{search.of}", text(mix)), *common), shares=mix) for name, mix in mixes.items()
    ]
    return [*arms, *(Variant(name, (*extra, *common), shares=control) for name, extra in search.others.items())]


def _annealing_arms(annealing: Annealing, base: Recipe) -> list[Variant]:
    """Return the control and an arm for each new source. All recipes have all sources, so they share their tokens."""
    names = [stage.name for stage in base.stages]
    if annealing.after not in names:
        raise RecipeError(
            f"annealing.after: {annealing.after!r} is not a stage of the recipe; it has {', '.join(names)}"
        )
    plain = resolved(base)
    kept = plain["stages"][: names.index(annealing.after) + 1]
    mix = annealing.mix or kept[-1]["mix"]
    by_domain = {domain: list(sources) for domain, sources in plain["sources"].items()}
    for name, source in annealing.new.items():
        fields = source.model_dump(mode="json", by_alias=True, exclude={"domain"})
        by_domain.setdefault(source.domain, []).append({**fields, "name": name})
    # the study itself supplies the judgements
    common = (override("sources", by_domain), "require_judged=nothing")
    arms = []
    for arm, add in ((DEFAULT, {}), *((name, {name: str(annealing.share)}) for name in annealing.new)):
        stage = {**kept[-1], "name": ANNEAL, "until": None, "for": str(annealing.length), "mix": mix, "add": add}
        stage |= {"lr": "linear to 0", "average": None, "advance": {}, "draw": 0}
        arms.append(Variant(arm, (*common, override("stages", [*kept, stage]), override("evaluate.after", []))))
    return arms


# Mixes of a search


def designed(design: MixDesign, base: Mapping[Domain, Fraction]) -> dict[str, MixShares]:
    """Return the mixes of a design by name, without the base mix; domains without a share keep none.

    Raises ValueError if the step is too large for a domain.
    """
    present = {domain: share for domain, share in base.items() if share}
    match design.kind:
        case "around":
            mixes = dict(_around(present, Fraction(design.step)))
        case "lattice":
            mixes = dict(_lattice(present, design.degree))
        case "draws":
            mixes = dict(_draws(present, design.count, design.spread, design.seed))
        case _:
            raise ValueError(f"mix.design.kind: {design.kind!r} is none of around, lattice and draws")
    return {name: whole(mix) for name, mix in mixes.items() if whole(mix) != whole(present)}


def whole(shares: Mapping[Domain, Fraction]) -> MixShares:
    """Return shares as multiples of 1 / PARTS that sum to 1, each within 1 / PARTS of its exact value."""
    counts = apportion(PARTS, list(shares.values()))
    return {domain: Fraction(count, PARTS) for domain, count in zip(shares, counts, strict=True)}


def _around(base: MixShares, step: Fraction) -> Iterator[tuple[str, MixShares]]:
    """Yield the base mix with each domain raised and lowered by `step`, or halved if its share is less."""
    for domain, share in base.items():
        if not 0 < step < 1 - share:
            raise ValueError(
                f"mix.design.step: {Share(step)} more of {domain}, which has {Share(share)}, leaves nothing for the "
                f"others; write less than {Share(1 - share)}"
            )
        for direction, new in (("more", share + step), ("less", max(share - step, share / 2))):
            rest = (1 - new) / (1 - share)
            mix = {other: new if other == domain else old * rest for other, old in base.items()}
            yield f"{direction}-{domain}", mix


def _lattice(base: MixShares, degree: int) -> Iterator[tuple[str, MixShares]]:
    """Yield the points of the simplex lattice above half of each base share (Scheffe 1958, JRSS B 20:344-360)."""
    floor = {domain: share / 2 for domain, share in base.items()}
    free = 1 - sum(floor.values())
    for point in product(range(degree + 1), repeat=len(base)):
        if sum(point) == degree:
            steps = zip(base, point, strict=True)
            name = "lattice-" + "-".join(str(count) for count in point)
            yield name, {domain: floor[domain] + free * Fraction(count, degree) for domain, count in steps}


def _draws(base: MixShares, count: int, spread: float, seed: int) -> Iterator[tuple[str, MixShares]]:
    """Yield Dirichlet draws with the base mix as mean, as in RegMix (arXiv 2407.01492)."""
    weights = np.array([float(share) for share in base.values()]) * spread * len(base)
    for number, draw in enumerate(np.random.default_rng(seed).dirichlet(weights, count)):
        shares = [Fraction(float(share)).limit_denominator(10**6) for share in draw]
        total = sum(shares, Fraction(0))
        yield f"draw-{number + 1}", dict(zip(base, (share / total for share in shares), strict=True))


def domains_of(mixes: Collection[Mapping[str, object]]) -> tuple[str, ...]:
    """Return the domains that have a share in any of the mixes; a mix may leave some out."""
    return tuple(dict.fromkeys(domain for mix in mixes for domain, share in mix.items() if share))


def share_table(mixes: Sequence[Mapping[str, float]], domains: Sequence[str]) -> Array:
    """Return the shares as [mixes, domains]."""
    return np.array([[float(mix.get(domain, 0.0)) for domain in domains] for mix in mixes])


def logs(shares: Array) -> Array:
    """Return logarithms of shares, at least that of `LEAST_SHARE`."""
    return np.asarray(np.log(np.maximum(shares, LEAST_SHARE)))


def check_mixes(mixes: Sequence[Mapping[str, float]]) -> None:
    """Raise ValueError unless the mixes determine a fit with one coefficient per domain, and leave a residual."""
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
        reason = f"{flat[0]} has one share in all of them" if flat else "their domains move together"
        raise ValueError(f"mix: the mixes do not separate the domains: {reason}; add arms that move it alone")


# Model shapes with a given number of parameters


def shape_for(parameters: float, like: Model, rows: int) -> Model:
    """Return `like` scaled in all proportions to about `parameters`, `rows` embedding rows included.

    Heads keep their size, the FFN its ratio to the width, key/value heads their number. The 8B scaled to 405B
    parameters has 118 layers of 16,384, where Llama 3 has 126 with a narrower FFN.
    """
    size, ratio = like.dim // like.heads, like.ffn / like.dim
    widths = []
    for heads in range(like.kv_heads, MOST_HEADS, like.kv_heads):
        dim = heads * size
        layers = max(1, round(like.layers * dim / like.dim))
        shape = {"layers": layers, "dim": dim, "ffn": max(8, round(ratio * dim / 8) * 8), "heads": heads}
        widths.append(Model.model_validate({**like.model_dump(), "preset": "custom", **shape}))

    def error(spec: Model) -> float:
        # the loss depends little on the aspect ratio (arXiv 2001.08361, section 3.1)
        aspect = _log_factor(spec.layers / spec.dim, like.layers / like.dim)
        return _log_factor(parameter_count(spec, rows), parameters) + PROPORTION * aspect

    nearest_widths = nsmallest(WIDTHS, widths, key=lambda spec: _log_factor(parameter_count(spec, rows), parameters))
    shapes = (
        wide.model_copy(update={"layers": layers})  # the depth compensates for whole heads
        for wide in nearest_widths
        for layers in range(max(1, math.floor(wide.layers / SPAN)), math.ceil(wide.layers * SPAN) + 1)
    )
    return min(shapes, key=error)


def nearest(parameters: float, sizes: Iterable[Model], rows: int) -> Model:
    """Return the shape whose parameter count differs by the smallest factor."""
    return min(sizes, key=lambda spec: _log_factor(parameter_count(spec, rows), parameters))


def shape_changes(spec: Model, base: Model) -> list[str]:
    """Return the overrides that give a recipe with `base` the shape of `spec`."""
    fields = ("layers", "dim", "ffn", "heads", "kv_heads", "tied_embeddings")
    changes = {field: getattr(spec, field) for field in fields if getattr(spec, field) != getattr(base, field)}
    return [f"model.{field}={str(value).lower()}" for field, value in changes.items()]


def _log_factor(a: float, b: float) -> float:
    return abs(math.log(a / b))
