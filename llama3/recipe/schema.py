"""The recipe: everything that determines the result of a training run, as one object.

Unknown keys are errors. Where a run executes (processes, devices, storage root) is not part of the recipe. Attribute
docstrings become field descriptions in the Prefect form and in the reference.
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from llama3.recipe.base import SPECIAL_TOKENS, Domain, Name, Section
from llama3.recipe.data_schema import ENOUGH, Curate, Level, Source, Studied, TokenizerConfig, TokenShards
from llama3.recipe.lr import LearningRate
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.sections import Checkpoint, Evaluate, Model, Optimizer, Promote, Spikes, Stage, Start
from llama3.recipe.units import Share, Tokens

# Checks across fields. Each error names field, value and remedy; `lint` warns about what is legal but unusual.


def check_recipe(recipe: Recipe) -> None:
    """Raise ValueError, one line per fault, if fields of `recipe` contradict each other."""
    faults = [*_stage_faults(recipe), *_advance_faults(recipe), *_reference_faults(recipe)]
    train = recipe.tokenizer.train
    rows = train.vocab + SPECIAL_TOKENS if train else 0
    if recipe.tokens.dtype == "uint16" and rows > 2**16:
        faults.append(
            f"tokens.dtype: uint16 holds ids below 65,536, but the vocabulary has {rows:,} "
            "(base + 256 special); write uint32 or auto"
        )
    faults += _start_faults(recipe)
    rate = recipe.lr
    # A cosine or line that ends inside the warm-up, if one counts steps and the other tokens. Needs a valid schedule.
    if not faults and rate.wsd is None and rate.fall.over.unit != rate.warmup.unit:
        step, position = Schedule(recipe).warm
        end = step if rate.fall.over.unit == "steps" else position
        if rate.fall.over.amount <= end:
            faults.append(
                f"lr.{rate.rule}.over: {rate.fall.over} is not longer than the warm-up of {rate.warmup}, which ends at "
                f"{rate.fall.over.unit[:-1]} {math.ceil(end):,} of these stages; lengthen it"
            )
    if faults:
        raise ValueError("\n".join(faults))


def check_batches(span: StageSpan, data_parallel: int) -> None:
    """Raise ValueError unless every batch of a stage divides into whole sequences on `data_parallel` ranks."""
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
        if max(stage.lengths) > recipe.model.max_seq:
            faults.append(
                f"{at}.seq: {max(stage.lengths)} is longer than model.max_seq {recipe.model.max_seq} of preset "
                f"{recipe.model.preset!r}; shorten it or raise model.max_seq"
            )
        batch = stage.batch or batch
        if batch is None:
            faults.append(f"{at}.batch: is missing; the first stage needs a batch, such as 64Ki")
        for seq in stage.lengths if batch else []:
            assert batch is not None
            if batch % seq:
                whole = max(1, round(batch / seq)) * seq
                faults.append(f"{at}.batch: {batch} is not a multiple of sequence {seq}; write {Tokens(whole)}")
        position = max(position, end)
    return faults


def _advance_faults(recipe: Recipe) -> list[str]:
    faults = []
    first = recipe.stages[0]
    if "short-context" in first.advance:
        faults.append(
            f"stages.{first.name}.advance: short-context compares with the previous stage, but there is none; "
            "leave it out or put a stage before this one"
        )
    whole = [stage.name for stage in recipe.stages]
    names = [name for stage in recipe.stages for name in stage.parts]
    for name in sorted(set(names)):
        if names.count(name) > max(1, whole.count(name)):
            faults.append(f"stages: two steps have the name {name!r}; list a sequence length once, or rename a stage")
    return faults


def _start_faults(recipe: Recipe) -> list[str]:
    start, names = recipe.start, [stage.name for stage in recipe.stages]
    if start is None:
        return []
    if start.after is not None:
        if start.after in names[:-1]:
            return []
        reason = "is the last stage, so nothing is left to train" if start.after in names else "is not a stage"
        return [f"start.after: {start.after!r} {reason}; the stages are {', '.join(names)}"]
    if recipe.tokenizer.use is not None:
        return []
    return [
        f"start: weights from {start.origin} need the tokenizer they were trained with; "
        "write tokenizer: {use: path/to/its/tokenizer.model} instead of train"
    ]


def _reference_faults(recipe: Recipe) -> list[str]:
    faults = []
    names = [stage.name for stage in recipe.stages]
    for name in {name for name in names if names.count(name) > 1}:
        faults.append(f"stages: the name {name!r} is used twice; give each stage a different name")
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
    """Return the faults of named sources and of the stages that add them."""
    faults = []
    names = [source.name for sources in recipe.sources.values() for source in sources if source.name]
    for name in sorted({name for name in names if names.count(name) > 1}):
        faults.append(f"sources: the name {name!r} is used twice; give each named source a different name")
    for stage in recipe.stages:
        for name in stage.add:
            if name not in names:
                known = ", ".join(names) or "none: give a source a name"
                faults.append(f"stages.{stage.name}.add: {name!r} is not a named source ({known})")
        if (total := sum(stage.add.values())) >= 1:
            faults.append(f"stages.{stage.name}.add: {Share(total)} leave nothing for the mix; keep the sum below 100%")
    for domain, sources in recipe.sources.items():
        mixes = [name for name, mix in recipe.mix.items() if mix.get(domain)]
        if mixes and sources and all(source.name for source in sources):
            faults.append(
                f"mix.{mixes[0]}.{domain}: all of sources.{domain} have a name, and a mix does not use named sources; "
                "add a source without a name"
            )
        faults += [
            f"sources.{domain}.{index}.weight: {source.name!r} has a name, so stages set its share (add); leave the "
            "weight out"
            for index, source in enumerate(sources)
            if source.name and source.weight is not None
        ]
    return faults


def _judged_faults(recipe: Recipe) -> list[str]:
    """Return the sources that stages add without the verdict that `require_judged` demands."""
    required, faults = recipe.require_judged, []
    if required == "nothing":
        return []
    added = {name for stage in recipe.stages for name, share in stage.add.items() if share}
    for domain, sources in recipe.sources.items():
        for index, source in enumerate(sources):
            at = f"sources.{domain}.{index}.judged"
            if source.name not in added:
                continue
            if source.judged is None:
                faults.append(
                    f"{at}: is missing, but require_judged: {required} needs a study of {source.name!r}; run one "
                    "(herd study run, kind annealing), record its verdict (herd study apply), or do not add the source"
                )
            elif source.judged.says not in ENOUGH[required]:
                faults.append(
                    f"{at}: {source.judged.study} says {source.judged.says!r} about {source.name!r}, but "
                    f"require_judged is {required!r}; do not add the source, or study it again at another share"
                )
    return faults


class Recipe(Section):
    """The whole chain, from raw text to a promoted model."""

    name: Name
    """Family name: runs are called name-1, name-2, ...; also the MLflow experiment and registered model."""
    seed: int = 0
    """Seed of initial weights, document order and generated problems."""
    data_seed: int | None = None
    """Seed of generated problems; default: `seed`. With it, runs that differ only in `seed` share their documents."""
    compute: Literal["fp8", "bf16", "fp32", "fp64"] = "bf16"
    """Number format of matrix products; weights, gradients and sums are at least fp32. `fp8`: float8 in the blocks, on
    GPUs that have it, and bf16 elsewhere in the model; an error on other devices."""
    sources: dict[Domain, list[Source]]
    """One list per domain: general, math, code, multilingual."""
    require_judged: Level = Field(default="nothing", exclude_if=lambda level: level == "nothing")
    """The verdict (`judged`) that every source in a stage's `add` needs; sources of mixes need none, because they are
    the baseline. `not hurting`: the source helps, or the study found no significant difference."""
    curate: Curate = Curate()
    tokenizer: TokenizerConfig
    tokens: TokenShards = TokenShards()
    mix: dict[str, dict[Domain, Share]]
    """Named mixes: the share of tokens of each domain; the shares of a mix sum to 100%."""
    model: Model
    lr: LearningRate
    optimizer: Optimizer = Optimizer()
    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of log(Z)^2, Z the sum under the softmax, added to the loss; 1e-4 in PaLM, 0 in Llama 3."""
    start: Start | None = None
    """Weights or checkpoint to start from; default: random weights from `seed`."""
    stages: list[Stage] = Field(min_length=1)
    """Training stages in order; one continuous run over one token stream."""
    checkpoint: Checkpoint = Checkpoint()
    spikes: Spikes = Spikes()
    non_finite: Literal["stop", "skip"] = "stop"
    """What to do with a step whose loss or gradient is not finite: `stop` the run or `skip` the update."""
    evaluate: Evaluate = Evaluate()
    promote: Promote = Promote()
    studies: list[Studied] = Field(default_factory=list, exclude_if=lambda studies: not studies)
    """Studies whose verdicts changed this recipe, written by `herd study apply`; does not affect any artifact."""

    @property
    def apart(self) -> dict[str, Domain]:
        """The domain of each named source, by its name."""
        return {source.name: domain for domain, sources in self.sources.items() for source in sources if source.name}

    def places_apart(self, domain: Domain) -> list[int]:
        """Return the indices of the named sources in `sources.<domain>`."""
        return [index for index, source in enumerate(self.sources.get(domain, [])) if source.name]

    @property
    def documents_seed(self) -> int:
        """The seed of generated documents."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def tokenizer_mix(self) -> dict[Domain, Share]:
        """The mix whose shares the tokenizer's sample has."""
        train = self.tokenizer.train
        return self.mix[train.mix] if train and train.mix else self.first_mix

    @property
    def first_mix(self) -> dict[Domain, Share]:
        """The mix of the first stage; means over domains are weighted with it."""
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
