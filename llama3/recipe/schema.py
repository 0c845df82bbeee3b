"""The recipe: the whole intent of a training run as one object.

Reading it is enough to know what will be trained; nothing that decides a result lives anywhere else. Keys that
nobody knows are refused. What is not here on purpose: where it runs (processes, devices, storage root), which
never changes what is made. Attribute docstrings become field descriptions in the Prefect form and the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from llama3.recipe.base import SPECIAL_TOKENS, Domain, Name, Section
from llama3.recipe.data_schema import ENOUGH, Curate, Level, Source, Studied, TokenizerConfig, TokenShards
from llama3.recipe.lr import LearningRate
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.sections import Checkpoint, Evaluate, Model, Optimizer, Promote, Spikes, Stage, Start
from llama3.recipe.units import Share, Tokens

# Rules that span several fields of a recipe: what cannot be run is refused here, before any work starts.
#
# Each message names the field, the value and the remedy. What is legal but odd is the linter's business.


def check_recipe(recipe: Recipe) -> None:
    """Raise ValueError, one line per fault, if the parts of `recipe` contradict each other."""
    faults = [*_stage_faults(recipe), *_advance_faults(recipe), *_reference_faults(recipe)]
    faults += [*_vocabulary_faults(recipe), *_start_faults(recipe)]
    if not faults:  # only stages without a fault can be laid out
        faults = list(_fall_faults(recipe))
    if faults:
        raise ValueError("\n".join(faults))


def check_batches(span: StageSpan, data_parallel: int) -> None:
    """Raise ValueError unless every batch of a stage splits into whole sequences on `data_parallel` ranks."""
    faults = []
    for segment in span.segments:
        if segment.batch % (segment.seq * data_parallel):
            whole = max(1, round(segment.batch / (segment.seq * data_parallel))) * segment.seq * data_parallel
            faults.append(
                f"stages.{span.name}.batch: {Tokens(segment.batch)} is not a multiple of sequence {segment.seq} x "
                f"data-parallel size {data_parallel}; write {Tokens(whole)}, or train on another number of processes"
            )
    if faults:
        raise ValueError("\n".join(faults))


def _stage_faults(recipe: Recipe) -> list[str]:
    faults, position, batch = [], 0, None
    for index, stage in enumerate(recipe.stages):
        at = f"stages.{index} ({stage.name})"
        end = stage.end(position)
        if end <= position:
            faults.append(
                f"{at}.until: {Tokens(end)} is not after {Tokens(position)}, where the stage before it ends; "
                "put the stages in the order of their positions"
            )
        batch = stage.batch or batch
        faults += _shape_faults(recipe, stage, at, batch)
        position = max(position, end)
    return faults


def _shape_faults(recipe: Recipe, stage: Stage, at: str, batch: Tokens | None) -> list[str]:
    faults = []
    if max(stage.lengths) > recipe.model.max_seq:
        faults.append(
            f"{at}.seq: {max(stage.lengths)} is longer than model.max_seq {recipe.model.max_seq} of preset "
            f"{recipe.model.preset!r}; shorten it or raise model.max_seq"
        )
    if batch is None:
        faults.append(f"{at}.batch: the first stage needs one, such as 64Ki")
    for seq in stage.lengths if batch else []:
        assert batch is not None
        if batch % seq:
            whole = max(1, round(batch / seq)) * seq
            faults.append(f"{at}.batch: {batch} is not a multiple of sequence {seq}; write {Tokens(whole)}")
    return faults


def _fall_faults(recipe: Recipe) -> Iterator[str]:
    """Yield the cosine or line that ends inside the warm-up, where one counts steps and the other tokens."""
    rate = recipe.lr
    if rate.wsd is None and rate.fall.over.unit != rate.warmup.unit:
        step, position = Schedule(recipe).warm
        end = step if rate.fall.over.unit == "steps" else position
        if rate.fall.over.amount <= end:
            yield (
                f"lr.{rate.rule}.over: {rate.fall.over} is not longer than the warm-up of {rate.warmup}, which ends at "
                f"{rate.fall.over.unit[:-1]} {math.ceil(end):,} of these stages; lengthen it"
            )


def _advance_faults(recipe: Recipe) -> list[str]:
    faults = []
    first = recipe.stages[0]
    if "short-context" in first.advance:
        faults.append(
            f"stages.{first.name}.advance: short-context compares with the stage before, and there is none; "
            "leave it out or put a stage before this one"
        )
    whole = [stage.name for stage in recipe.stages]
    names = [name for stage in recipe.stages for name in stage.parts]
    for name in sorted(set(names)):
        if names.count(name) > max(1, whole.count(name)):
            faults.append(f"stages: two steps are called {name!r}; list a sequence length once, or rename a stage")
    return faults


def _start_faults(recipe: Recipe) -> list[str]:
    start, names = recipe.start, [stage.name for stage in recipe.stages]
    if start is None:
        return []
    if start.after is not None:
        if start.after in names[:-1]:
            return []
        left = "is the last stage, so nothing is left to train" if start.after in names else "is no stage"
        return [f"start.after: {start.after!r} {left}; the stages are {', '.join(names)}"]
    if recipe.tokenizer.use is not None:
        return []
    return [
        f"start: weights from {start.origin} read the ids of their own tokenizer; "
        "write tokenizer: {use: path/to/its/tokenizer.model} in place of train"
    ]


def _reference_faults(recipe: Recipe) -> list[str]:
    faults = []
    names = [stage.name for stage in recipe.stages]
    for name in {name for name in names if names.count(name) > 1}:
        faults.append(f"stages: the name {name!r} stands twice; give each stage its own")
    for stage in recipe.stages:
        if stage.mix not in recipe.mix:
            faults.append(f"stages.{stage.name}.mix: {stage.mix!r} is not under mix ({', '.join(recipe.mix)})")
    train = recipe.tokenizer.train
    if train and train.mix and train.mix not in recipe.mix:
        faults.append(f"tokenizer.train.mix: {train.mix!r} is not under mix ({', '.join(recipe.mix)})")
    for name, shares in recipe.mix.items():
        for domain in (domain for domain, share in shares.items() if share and not recipe.sources.get(domain)):
            faults.append(
                f"mix.{name}.{domain}: {shares[domain]} of the tokens, but sources.{domain} is empty; "
                "add a source or set the share to 0%"
            )
    for name in recipe.evaluate.after:
        if name not in names:
            faults.append(f"evaluate.after: {name!r} is not a stage ({', '.join(names)})")
    for domain, sources in recipe.sources.items():
        pooled = [source for source in sources if source.name is None]
        weighted = [source for source in pooled if source.weight is not None]
        if weighted and len(weighted) < len(pooled):
            faults.append(f"sources.{domain}: give every source a weight, or none of them")
    return [*faults, *_apart_faults(recipe), *_judged_faults(recipe)]


def _apart_faults(recipe: Recipe) -> list[str]:
    """Return what is wrong with sources that stand apart and with the stages that draw from them."""
    faults = []
    names = [source.name for sources in recipe.sources.values() for source in sources if source.name]
    for name in sorted({name for name in names if names.count(name) > 1}):
        faults.append(f"sources: the name {name!r} stands twice; give each source that stands apart its own")
    for stage in recipe.stages:
        for name in stage.add:
            if name not in names:
                known = ", ".join(names) or "none: give a source a name"
                faults.append(f"stages.{stage.name}.add: {name!r} is no source that stands apart ({known})")
        if (total := sum(stage.add.values())) >= 1:
            faults.append(f"stages.{stage.name}.add: {Share(total)} leave nothing for the mix; keep the sum below 100%")
    for domain, sources in recipe.sources.items():
        asked = [name for name, mix in recipe.mix.items() if mix.get(domain)]
        if asked and sources and all(source.name for source in sources):
            faults.append(
                f"mix.{asked[0]}.{domain}: all of sources.{domain} stand apart, and a mix does not draw from those; "
                "add a source without a name"
            )
        faults += [
            f"sources.{domain}.{place}.weight: {source.name!r} stands apart, so its share is what a stage adds; leave "
            "the weight out"
            for place, source in enumerate(sources)
            if source.name and source.weight is not None
        ]
    return faults


def _judged_faults(recipe: Recipe) -> list[str]:
    """Return the sources that stages add though no study found of them what the recipe asks for."""
    asked, faults = recipe.require_judged, []
    added = {name for stage in recipe.stages for name, share in stage.add.items() if share}
    for at, source in (
        (f"sources.{domain}.{place}.judged", source)
        for domain, sources in recipe.sources.items()
        for place, source in enumerate(sources)
        if asked != "nothing" and source.name in added
    ):
        if source.judged is None:
            faults.append(
                f"{at}: nothing, but require_judged: {asked} wants a study of {source.name!r}; let it be judged "
                "(herd study run, kind annealing), write that back (herd study apply), or do not add it"
            )
        elif source.judged.says not in ENOUGH[asked]:
            faults.append(
                f"{at}: {source.judged.study} says {source.judged.says!r} of {source.name!r}, but require_judged is "
                f"{asked!r}; do not add it, or judge it again at another share"
            )
    return faults


def _vocabulary_faults(recipe: Recipe) -> list[str]:
    if recipe.tokens.dtype != "uint16" or recipe.tokenizer.train is None:
        return []
    rows = recipe.tokenizer.train.vocab + SPECIAL_TOKENS
    if rows <= 2**16:
        return []
    return [
        f"tokens.dtype: uint16 holds ids below 65,536, but the vocabulary has {rows:,} "
        "(base + 256 special); write uint32 or auto"
    ]


class Recipe(Section):
    """The whole chain, from raw text to a promoted model."""

    name: Name
    """Family name: runs are called name-1, name-2, ...; also the MLflow experiment and registered model."""
    seed: int = 0
    """Of initial weights, document order and generated problems."""
    data_seed: int | None = None
    """Of generated problems; left out, `seed`. Runs that differ in `seed` alone then share their documents."""
    compute: Literal["fp8", "bf16", "fp32", "fp64"] = "bf16"
    """Number format of matrix products; weights, gradients and sums stay at least fp32. `fp8`: those of the blocks in
    float8 on GPUs that have it, the rest in bf16; refused elsewhere."""
    sources: dict[Domain, list[Source]]
    """One list per domain: general, math, code, multilingual."""
    require_judged: Level = Field(default="nothing", exclude_if=lambda level: level == "nothing")
    """What a study must have found (`judged`) about every source that a stage adds to its mix; the sources of the mixes
    are what it was compared with. `not hurting`: it helps, or no difference was found."""
    curate: Curate = Curate()
    tokenizer: TokenizerConfig
    tokens: TokenShards = TokenShards()
    mix: dict[str, dict[Domain, Share]]
    """Named mixes; each gives the share of every domain in tokens and sums to 100%."""
    model: Model
    lr: LearningRate
    optimizer: Optimizer = Optimizer()
    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of log(Z)^2, Z the sum under the softmax, added to the loss; 1e-4 in PaLM, 0 in Llama 3."""
    start: Start | None = None
    """Weights or checkpoint to go on from; left out, weights are drawn from `seed`."""
    stages: list[Stage] = Field(min_length=1)
    """What is trained, in order; one continuous run over one token stream."""
    checkpoint: Checkpoint = Checkpoint()
    spikes: Spikes = Spikes()
    non_finite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient is not finite: `stop` ends the run, `skip` leaves its update out."""
    evaluate: Evaluate = Evaluate()
    promote: Promote = Promote()
    studies: list[Studied] = Field(default_factory=list, exclude_if=lambda studies: not studies)
    """Studies whose verdicts changed this recipe, written by `herd study apply`; changes nothing that is made."""

    @property
    def apart(self) -> dict[str, Domain]:
        """The domain of each source that stands apart, by its name."""
        return {source.name: domain for domain, sources in self.sources.items() for source in sources if source.name}

    def places_apart(self, domain: Domain) -> list[int]:
        """Return the places under `sources.<domain>` of those that stand apart."""
        return [place for place, source in enumerate(self.sources.get(domain, [])) if source.name]

    @property
    def documents_seed(self) -> int:
        """The seed that decides what generated documents say."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def tokenizer_mix(self) -> dict[Domain, Share]:
        """The mix by whose shares the tokenizer's sample is drawn."""
        train = self.tokenizer.train
        return self.mix[train.mix] if train and train.mix else self.first_mix

    @property
    def first_mix(self) -> dict[Domain, Share]:
        """The mix of the first stage, by which means over domains are weighted."""
        return self.mix[self.stages[0].mix]

    @field_validator("mix")
    @classmethod
    def _whole(cls, mix: dict[str, dict[Domain, Share]]) -> dict[str, dict[Domain, Share]]:
        for name, shares in mix.items():
            total = sum(shares.values())
            if total != 1:
                raise ValueError(f"the shares of {name} sum to {Share(total)}; change them until they sum to 100%")
        return mix

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        check_recipe(self)
        return self
