"""Expand a study into its runs: one resolved recipe for every variant and repeat.

A run of a variant is an ordinary run: its recipe contains everything, so it can be repeated without the study. Runs are
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
from numpy.typing import NDArray
from pydantic import ValidationError

from herd.llama3.model.flops import flops_per_token, parameter_count, recipe_vocab_size, trained_flops
from herd.llama3.recipe.base import DOMAINS, Domain, read_yaml
from herd.llama3.recipe.load import (
    RECIPES,
    RecipeError,
    digest,
    fault_lines,
    find_recipe,
    parse_recipe,
    read_recipe,
    resolved,
)
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Model
from herd.llama3.recipe.units import Share, Tokens
from herd.llama3.studies.study import (
    ANNEAL,
    BASE,
    DEFAULT,
    PROPOSED,
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
from herd.llama3.tokens.mix import apportion
from herd.storage.artifact import flatten
from herd.storage.secrets import refuse_secrets

# The scaling-law ladder of Llama 3 (arXiv 2407.21783, section 3.2.1). Published: the ends of the ranges of budgets,
# sizes, peak rates and batches, and the law's two constants, in Figure 3 and, rounded, in the text. Assumed: the eight
# budgets between the ends (1, 3 and 6 of each decade), and power laws between the ends of peak rate and batch, with the
# lower peak for the larger model.

BUDGETS = (6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21, 1e22)
"""Operations; the ends are published, the rest is assumed."""
SIZES = (40e6, 16e9)
"""Parameters of the smallest and the largest model."""
PEAK_LR = (4e-4, 2e-4)
"""Peak rates of the smallest and the largest model."""
BATCH_TOKENS = (250e3, 4e6)
"""Tokens per step at the smallest and the largest budget."""
FLAGSHIP_FLOPS = 3.8e25
"""Operations of the 405B's training."""


@dataclass(frozen=True)
class PowerLaw:
    """N*(C) = A C^alpha, in tokens."""

    alpha: float
    coefficient: float

    def tokens(self, flops: float) -> float:
        """Return the best number of tokens for `flops`."""
        return self.coefficient * math.pow(flops, self.alpha)


FIGURE = PowerLaw(0.537, 0.299)
"""Figure 3: 16.3T tokens at 3.8e25."""
TEXT = PowerLaw(0.53, 0.29)
"""The same constants, rounded, in the text: 10.5T tokens at 3.8e25."""


def peak_lr(parameters: float, sizes: tuple[float, float] = SIZES, peaks: tuple[float, float] = PEAK_LR) -> float:
    """Return the peak rate of a model of `parameters`: a power law between the ends, constant outside."""
    return _power_law_between(parameters, sizes, peaks)


def batch_tokens(
    flops: float,
    budgets: tuple[float, float] = (BUDGETS[0], BUDGETS[-1]),
    batches: tuple[float, float] = BATCH_TOKENS,
) -> float:
    """Return the tokens per step for a budget: a power law between the ends, constant outside."""
    return _power_law_between(flops, budgets, batches)


def _power_law_between(x: float, ends: tuple[float, float], values: tuple[float, float]) -> float:
    if not 0 < ends[0] <= ends[1] or not x > 0 or not min(values) > 0:
        raise ValueError(f"{x:g} between {ends} with values {values}: give numbers above 0, the lower end first")
    if ends[0] == ends[1]:
        return values[0]
    share = min(1.0, max(0.0, math.log(x / ends[0]) / math.log(ends[1] / ends[0])))
    return math.pow(values[0], 1 - share) * math.pow(values[1], share)


MixShares = dict[Domain, Fraction]
Array = NDArray[np.float64]
STAGE = "main"
"""The single stage of a ladder's variants."""
PARTS = 1000
"""Shares are multiples of 1 / PARTS."""
LEAST_SHARE = 1e-3
"""Replaces a share of 0, which has no logarithm."""
VARIANT_FIELDS = {"compare": "variants", "mix": "others"}
"""Kinds of study to which variants can be added, and the field that lists them."""
MOST_HEADS = 4096
SPAN = 1.5
"""Range of depths that are tried, relative to the proportional depth."""
WIDTHS = 3
"""Number of widths that are tried in every depth."""
PROPORTION = 0.1
"""Weight of a factor in depth over width, relative to the same factor in the number of parameters."""


@dataclass(frozen=True)
class VariantRun:
    """One repeat of a variant."""

    variant: Variant
    repeat: int
    """Counted from 1."""
    recipe: Recipe

    @property
    def name(self) -> str:
        """Name for people: `math-30 2`."""
        return f"{self.variant.name} {self.repeat}"

    @cached_property
    def digest(self) -> str:
        return digest(resolved(self.recipe))

    @cached_property
    def tokens(self) -> int:
        return self.recipe.schedule.tokens

    @cached_property
    def parameters(self) -> int:
        return parameter_count(self.recipe.model, recipe_vocab_size(self.recipe))

    @cached_property
    def flops(self) -> float:
        """Training operations, including causal attention."""
        return trained_flops(self.recipe, self.recipe.model, recipe_vocab_size(self.recipe), self.tokens)


class ExpandedStudy:
    """A study with its base recipe, which together determine its runs."""

    def __init__(self, study: Study, data: dict[str, Any], path: str) -> None:
        self.study, self.data, self.path = study, data, path
        self.base = self.recipe([])
        self.proposal: Mapping[Domain, Fraction] | None = None
        """The mix that the variants of a mix search propose, once it is known."""

    def recipe(self, overrides: Iterable[str]) -> Recipe:
        """Return the base recipe with the study's changes and `overrides`, under its own name. Raises RecipeError."""
        return parse_recipe(copy.deepcopy(self.data), self.path, [*self.study.set, *overrides])

    @cached_property
    def digest(self) -> str:
        """Of the question and the base recipe, with every default."""
        question = self.study.model_dump(mode="json", by_alias=True, exclude={"recipe"})
        return digest([question, resolved(self.base)])

    @cached_property
    def control(self) -> str:
        """Name of the control variant; empty for a ladder."""
        if self.study.compare:
            return self.study.compare.control
        return {"mix": BASE, "annealing": DEFAULT}.get(self.study.kind, "")

    def with_proposal(self, shares: Mapping[Domain, Fraction]) -> ExpandedStudy:
        """Return the study with the mix that its other variants propose as one more variant."""
        study = copy.copy(self)
        study.__dict__.pop("runs", None)  # they are cached
        study.proposal = shares
        return study

    def own_fields(self, seed: int) -> dict[str, object]:
        """Return the fields that the study itself sets in the runs with `seed`."""
        return {"name": self.study.name, "data_seed": self.base.documents_seed, "seed": seed}

    @cached_property
    def runs(self) -> list[VariantRun]:
        """All runs, variant by variant. Raises ValueError."""
        return list(variant_runs(self))


def load_study(
    path: Path, changes: Sequence[str] = (), further: Mapping[str, list[str]] | None = None
) -> ExpandedStudy:
    """Return the study in a YAML file, or shipped under that name, with `changes` of its base and `further` variants.

    Raises RecipeError with the file and each faulty field.
    """
    path = find_recipe(path, "study", RECIPES / "experiments")
    data = _read(path)
    data["set"] = [*(data.get("set") or []), *changes]
    if further:
        kind = next((kind for kind in VARIANT_FIELDS if isinstance(data.get(kind), dict)), None)
        if kind is None:
            raise RecipeError(f"{path}: takes no further variants; only a comparison or a mix search does")
        data[kind][VARIANT_FIELDS[kind]] = {**(data[kind].get(VARIANT_FIELDS[kind]) or {}), **further}
    try:
        refuse_secrets(data, str(path))
        study = Study.model_validate(data)
    except ValidationError as error:
        raise RecipeError(fault_lines(error, Study, str(path))) from None
    base = path.parent / study.recipe
    return ExpandedStudy(study, read_recipe(base), str(base))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = read_yaml(path)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: must be a mapping, not {type(data).__name__}")
    return data


def variant_runs(expanded: ExpandedStudy) -> Iterator[VariantRun]:
    """Yield every run of the study. Raises ValueError if its variants are invalid."""
    study, base = expanded.study, expanded.base
    seeds = study.seeds or [base.seed]
    # In an annealing study each repeat reads other documents. Draws count from 1: draw 0 would continue the mix of the
    # stage before, whose last chunks would then differ between control and variants, so the shared checkpoint would be
    # trained twice.
    draws = range(1, study.annealing.draws + 1) if study.annealing else range(1)
    for variant in study_variants(study, base, expanded.proposal):
        for index, (seed, draw) in enumerate(product(seeds, draws)):
            offset = [f"stages.{ANNEAL}.data_offset={draw}"] if study.annealing else []
            own = [f"{field}={value}" for field, value in expanded.own_fields(seed).items()]
            yield VariantRun(variant, index + 1, expanded.recipe([*variant.overrides, *own, *offset]))


def changed_fields(recipe: Recipe, other: Recipe) -> list[str]:
    """Return the fields in which two recipes differ, stages by name: `stages.main.until`, `lr.peak`."""
    values = []
    for plain in (resolved(recipe), resolved(other)):
        values.append(flatten({**plain, "stages": {stage["name"]: stage for stage in plain["stages"]}}))
    keys = sorted(set(values[0]) | set(values[1]))
    return [key for key in keys if values[0].get(key) != values[1].get(key)]


# The variants of each kind of study. What must not differ between them (documents, seeds) is set in `variant_runs`.


def study_variants(study: Study, base: Recipe, proposal: Mapping[Domain, Fraction] | None = None) -> list[Variant]:
    """Return the variants of a study of `base`, the control first. Raises ValueError if they are invalid.

    `proposal` is one more mix of a mix search.
    """
    if study.ladder:
        return ladder_variants(study.ladder, base)
    if study.mix:
        return _mix_variants(study.mix, base, proposal)
    if study.annealing:
        return _annealing_variants(study.annealing, base)
    assert study.compare is not None
    control = study.compare.control
    variants = [Variant(name, tuple(overrides)) for name, overrides in study.compare.variants.items()]
    return sorted(variants, key=lambda variant: variant.name != control)


def ladder_variants(ladder: Ladder, base: Recipe) -> list[Variant]:
    """Return a variant for each budget and each size in its range of tokens per parameter, smallest budgets first."""
    vocab_size, variants = recipe_vocab_size(base), []
    counts = {name: parameter_count(config, vocab_size) for name, config in ladder.sizes.items()}
    by_count: dict[int, str] = {}
    for name, count in counts.items():
        if by_count.setdefault(count, name) != name:
            raise RecipeError(
                f"ladder.sizes: {name} and {by_count[count]} both have {count:,} parameters; leave one out"
            )
    least, most = ladder.tokens_per_parameter
    mix = resolved(base)["stages"][0]["mix"]
    for budget in sorted(ladder.budgets):
        batch = budget_batch(ladder, budget)
        for name, config in sorted(ladder.sizes.items(), key=lambda item: counts[item[0]]):
            tokens = budget / flops_per_ladder_token(ladder, config, vocab_size)
            total = int(tokens // batch) * batch  # whole batches, so a run takes slightly less than its budget
            if not total or not least <= tokens / counts[name] <= most:
                continue
            peak = peak_lr(counts[name], (min(counts.values()), max(counts.values())), ladder.peak)
            shape = {**config.model_dump(mode="json"), "max_seq_len": max(config.max_seq_len, ladder.seq_len)}
            cosine = {"to": peak * ladder.decay, "over": f"{total} tokens"}
            stage = {"name": STAGE, "until": f"{total} tokens", "seq_len": ladder.seq_len, "batch": f"{batch} tokens"}
            overrides = (
                override("model", shape),
                override("lr", {"peak": peak, "warmup": str(ladder.warmup), "cosine": cosine}),
                override("stages", [{**stage, "mix": mix}]),
                override("evaluate.after", []),
            )
            variants.append(Variant(f"{budget:.3g}-{name}".replace("+", ""), overrides, budget))
    return variants


def flops_per_ladder_token(ladder: Ladder, config: Model, vocab_size: int) -> float:
    """Return training operations per token of a size, by the study's formula."""
    flops = flops_per_token(config, vocab_size, ladder.seq_len)
    match ladder.formula:
        case "6N":
            return flops.six_n
        case "causal":
            return flops.causal
        case "full":
            return flops.full
        case _:
            raise ValueError(f"ladder.formula: {ladder.formula!r} is none of 6N, causal and full")


def budget_batch(ladder: Ladder, budget: float) -> Tokens:
    """Return the tokens per step of a budget: a power of two of sequences."""
    target = batch_tokens(budget, (min(ladder.budgets), max(ladder.budgets)), ladder.batch)
    sequences = 1
    while 2 * sequences * ladder.seq_len <= target * 2**0.5:
        sequences *= 2
    return Tokens(sequences * ladder.seq_len)


def _mix_variants(search: MixSearch, base: Recipe, proposal: Mapping[Domain, Fraction] | None) -> list[Variant]:
    """Return a variant for each mix."""
    if search.of not in base.mix:
        raise RecipeError(f"mix.of: {search.of!r} is not a mix of the recipe; it has {', '.join(base.mix)}")
    control = {domain: Fraction(base.mix[search.of].get(domain, 0)) for domain in DOMAINS}
    mixes: dict[str, Shares] = {BASE: control, **(design_mixes(search.design, control) if search.design else {})}
    for field, names in (("variants", search.variants), ("others", search.others)):
        for name in names.keys() & {BASE, PROPOSED}:
            which = "the recipe's own mix, always" if name == BASE else "the mix that the search proposes,"
            raise RecipeError(f"mix.{field}: {name!r} is {which} a variant; choose another name")
    for name, mix in search.variants.items():
        if (total := sum(mix.values())) != 1:
            raise RecipeError(
                f"mix.variants.{name}: the shares sum to {Share(total)}; change them until they sum to 100%"
            )
        mixes[name] = {domain: Fraction(share) for domain, share in mix.items()}
    if proposal is not None:
        mixes[PROPOSED] = dict(proposal)

    def text(shares: Mapping[Domain, Fraction]) -> dict[str, str]:
        return {domain: str(Share(share)) for domain, share in shares.items()}

    common: tuple[str, ...] = ()
    if base.tokenizer.train:  # on the base mix in all variants, so that they share one tokenizer
        common = (override(f"mix.{TOKENIZER}", text(base.first_mix)), f"tokenizer.train.mix={TOKENIZER}")
    variants = [
        Variant(name, (override(f"mix.{search.of}", text(mix)), *common), shares=mix) for name, mix in mixes.items()
    ]
    return [*variants, *(Variant(name, (*extra, *common), shares=control) for name, extra in search.others.items())]


def _annealing_variants(annealing: Annealing, base: Recipe) -> list[Variant]:
    """Return the control and a variant per new source. All recipes have all sources, so they share tokens."""
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
    common = (override("sources", by_domain), "require_annealing_verdict=nothing")
    variants = []
    for variant, add in ((DEFAULT, {}), *((name, {name: str(annealing.share)}) for name in annealing.new)):
        stage = {
            **kept[-1],
            "name": ANNEAL,
            "until": None,
            "for": str(annealing.length),
            "mix": mix,
            "extra_sources": add,
        }
        stage |= {"lr": "linear to 0", "weight_averaging": None, "gates": {}, "data_offset": 0}
        variants.append(Variant(variant, (*common, override("stages", [*kept, stage]), override("evaluate.after", []))))
    return variants


# Mixes of a search


def design_mixes(design: MixDesign, base: Mapping[Domain, Fraction]) -> dict[str, MixShares]:
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
    return {name: round_shares(mix) for name, mix in mixes.items() if round_shares(mix) != round_shares(present)}


def round_shares(shares: Mapping[Domain, Fraction]) -> MixShares:
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


def mixed_domains(mixes: Collection[Mapping[str, object]]) -> tuple[str, ...]:
    """Return the domains that have a share in any of the mixes; a mix may leave some out."""
    return tuple(dict.fromkeys(domain for mix in mixes for domain, share in mix.items() if share))


def share_table(mixes: Sequence[Mapping[str, float]], domains: Sequence[str]) -> Array:
    """Return the shares as [mixes, domains]."""
    return np.array([[float(mix.get(domain, 0.0)) for domain in domains] for mix in mixes])


def log_shares(shares: Array) -> Array:
    """Return logarithms of shares, at least that of `LEAST_SHARE`."""
    return np.asarray(np.log(np.maximum(shares, LEAST_SHARE)))


def check_mixes(mixes: Sequence[Mapping[str, float]]) -> None:
    """Raise ValueError unless the mixes determine a fit with one coefficient per domain, and leave a residual."""
    domains = mixed_domains(mixes)
    if len(mixes) < len(domains) + 2:
        raise ValueError(
            f"mix: {len(mixes)} mixes, where a fit over {len(domains)} domains takes {len(domains) + 2}; add variants, "
            "or write design: {kind: around}"
        )
    columns = log_shares(share_table(mixes, domains))
    design_matrix = np.column_stack([np.ones(len(mixes)), columns])
    if np.linalg.matrix_rank(design_matrix, tol=1e-6) < design_matrix.shape[1]:
        flat = [domain for domain, column in zip(domains, columns.T, strict=True) if np.ptp(column) < 1e-6]
        reason = f"{flat[0]} has one share in all of them" if flat else "their domains move together"
        raise ValueError(f"mix: the mixes do not separate the domains: {reason}; add variants that move it alone")


# Model shapes with a given number of parameters


def scale_shape(parameters: float, like: Model, vocab_size: int) -> Model:
    """Return `like` scaled in all proportions to about `parameters`, the embedding of `vocab_size` ids included.

    Heads keep their size, the FFN its ratio to the width, key/value heads their number. The 8B scaled to 405B
    parameters has 118 layers of 16,384, where Llama 3 has 126 with a narrower FFN.
    """
    size, ratio = like.head_dim, like.ffn / like.dim
    widths = []
    for heads in range(like.kv_heads, MOST_HEADS, like.kv_heads):
        dim = heads * size
        layers = max(1, round(like.layers * dim / like.dim))
        shape = {"layers": layers, "dim": dim, "ffn": max(8, round(ratio * dim / 8) * 8), "heads": heads}
        widths.append(Model.model_validate({**like.model_dump(), "preset": "custom", **shape}))

    def error(config: Model) -> float:
        # the loss depends little on the aspect ratio (arXiv 2001.08361, section 3.1)
        aspect = _log_factor(config.layers / config.dim, like.layers / like.dim)
        return _log_factor(parameter_count(config, vocab_size), parameters) + PROPORTION * aspect

    nearest_widths = nsmallest(
        WIDTHS, widths, key=lambda config: _log_factor(parameter_count(config, vocab_size), parameters)
    )
    shapes = (
        wide.model_copy(update={"layers": layers})  # the depth compensates for whole heads
        for wide in nearest_widths
        for layers in range(max(1, math.floor(wide.layers / SPAN)), math.ceil(wide.layers * SPAN) + 1)
    )
    return min(shapes, key=error)


def nearest_shape(parameters: float, sizes: Iterable[Model], vocab_size: int) -> Model:
    """Return the shape whose parameter count differs by the smallest factor."""
    return min(sizes, key=lambda config: _log_factor(parameter_count(config, vocab_size), parameters))


def shape_changes(config: Model, base: Model) -> list[str]:
    """Return the overrides that give a recipe with `base` the shape of `config`."""
    fields = ("layers", "dim", "ffn", "heads", "kv_heads", "tied_embeddings")
    changes = {field: getattr(config, field) for field in fields if getattr(config, field) != getattr(base, field)}
    return [f"model.{field}={str(value).lower()}" for field, value in changes.items()]


def _log_factor(a: float, b: float) -> float:
    return abs(math.log(a / b))
