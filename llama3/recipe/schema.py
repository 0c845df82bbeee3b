"""The recipe: everything that determines the result of a training run.

Unknown keys are errors. Processes, devices and the storage root are not part of the recipe. Docstrings of fields are
their descriptions in the Prefect form and in the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from herd.llama3.recipe.base import SPECIAL_TOKENS, Domain, Name, Section, decides, left_out
from herd.llama3.recipe.data_schema import (
    ENOUGH,
    ConversationSource,
    Curate,
    Level,
    Source,
    Studied,
    TokenizerConfig,
    TokenShards,
)
from herd.llama3.recipe.lr import LearningRate
from herd.llama3.recipe.schedule import Schedule, StageSpan
from herd.llama3.recipe.sections import (
    Checkpoint,
    Evaluate,
    InitFrom,
    Model,
    Optimizer,
    Promote,
    Spikes,
    Stage,
    Tracking,
)
from herd.llama3.recipe.units import Share, Tokens


def check_batches(span: StageSpan, data_parallel: int) -> None:
    """Raise ValueError unless every batch of a stage divides into whole sequences on `data_parallel` ranks."""
    faults = []
    for segment in span.segments:
        unit = segment.seq_len * data_parallel
        if segment.batch % unit:
            faults.append(
                f"stages.{span.name}.batch: {Tokens(segment.batch)} is not a multiple of sequence {segment.seq_len} x "
                f"data-parallel size {data_parallel}; write {Tokens(max(1, round(segment.batch / unit)) * unit)}, or "
                "train on another number of processes"
            )
    if faults:
        raise ValueError("\n".join(faults))


def _stage_faults(recipe: Recipe) -> Iterator[str]:
    """Yield contradictions between stages, model and initial weights."""
    names = [stage.name for stage in recipe.stages]
    position, batch = 0, None
    for index, stage in enumerate(recipe.stages):
        at = f"stages.{index} ({stage.name})"
        end = stage.end(position)
        if end <= position:
            yield (
                f"{at}.until: {Tokens(end)} is not after {Tokens(position)}, the end of the stage before it; "
                "put the stages in the order of their positions"
            )
        if max(stage.lengths) > recipe.model.max_seq_len:
            yield (
                f"{at}.seq_len: {max(stage.lengths)} is longer than model.max_seq_len {recipe.model.max_seq_len} of "
                f"preset {recipe.model.preset!r}; shorten it or raise model.max_seq_len"
            )
        batch = stage.batch or batch
        if batch is None:
            yield f"{at}.batch: is missing; the first stage needs a batch, such as 64Ki"
        for seq_len in stage.lengths if batch else []:
            assert batch is not None
            if batch % seq_len:
                whole = max(1, round(batch / seq_len)) * seq_len
                yield f"{at}.batch: {batch} is not a multiple of sequence {seq_len}; write {Tokens(whole)}"
        position = max(position, end)
        if stage.kind == "pretrain" and index and recipe.stages[index - 1].kind == "sft":
            yield f"{at}.kind: pretrain follows {recipe.stages[index - 1].name} of kind sft; put sft stages last"
        if stage.mix not in recipe.mix:
            yield f"stages.{stage.name}.mix: {stage.mix!r} is not in mix ({', '.join(recipe.mix)})"
    tuned = [stage.name for stage in recipe.stages if stage.kind == "sft"]
    if tuned and not recipe.conversations:
        yield f"conversations: is missing; stage {tuned[0]} of kind sft needs sources, such as [{{uri: chats/*.jsonl}}]"
    if recipe.conversations and not tuned:
        yield "conversations: no stage trains on them; add a stage with kind: sft, or leave them out"
    if "short-context" in recipe.stages[0].gates:
        yield (
            f"stages.{names[0]}.gates: short-context compares with the previous stage, but there is none; "
            "leave it out or put a stage before this one"
        )
    for name in {name for name in names if names.count(name) > 1}:
        yield f"stages: the name {name!r} is used twice; give each stage a different name"
    parts = [name for stage in recipe.stages for name in stage.parts]
    for name in sorted(set(parts)):
        if parts.count(name) > max(1, names.count(name)):
            yield f"stages: two steps have the name {name!r}; list a sequence length once, or rename a stage"
    for name in recipe.evaluate.after:
        if name not in names:
            yield f"evaluate.after: {name!r} is not a stage ({', '.join(names)})"
    start = recipe.init_from
    if start is not None and start.after is not None and start.after not in names[:-1]:
        reason = "is the last stage, so there is nothing to train" if start.after in names else "is not a stage"
        yield f"init_from.after: {start.after!r} {reason}; the stages are {', '.join(names)}"
    elif start is not None and start.after is None and recipe.tokenizer.use is None:
        yield (
            f"init_from: weights from {start.path} need the tokenizer they were trained with; "
            "write tokenizer: {use: path/to/its/tokenizer.model} instead of train"
        )


def _source_faults(recipe: Recipe) -> Iterator[str]:
    """Yield contradictions between sources, mixes and the sources that stages add."""
    for name, shares in recipe.mix.items():
        for domain, share in shares.items():
            if share and not recipe.sources.get(domain):
                yield (
                    f"mix.{name}.{domain}: {share} of the tokens, but sources.{domain} is empty; "
                    "add a source or set the share to 0%"
                )
    names = [source.name for sources in recipe.sources.values() for source in sources if source.name]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"sources: the name {name!r} is used twice; give each named source a different name"
    for stage in recipe.stages:
        for name in stage.extra_sources:
            if name not in names:
                known = ", ".join(names) or "none: give a source a name"
                yield f"stages.{stage.name}.extra_sources: {name!r} is not a named source ({known})"
        if (total := sum(stage.extra_sources.values())) >= 1:
            at = f"stages.{stage.name}.extra_sources"
            yield f"{at}: {Share(total)} leave nothing for the mix; keep the sum below 100%"
    required = recipe.require_annealing_verdict
    added = {name for stage in recipe.stages for name, share in stage.extra_sources.items() if share}
    for domain, sources in recipe.sources.items():
        pooled = [source for source in sources if source.name is None]
        if len({source.weight is None for source in pooled}) > 1:
            yield f"sources.{domain}: give every source a weight, or none of them"
        mixes = [name for name, mix in recipe.mix.items() if mix.get(domain)]
        if mixes and sources and not pooled:
            yield (
                f"mix.{mixes[0]}.{domain}: all of sources.{domain} have a name, and a mix does not use named sources; "
                "add a source without a name"
            )
        for index, source in enumerate(sources):
            at, verdict = f"sources.{domain}.{index}", source.annealing_verdict
            if source.name and source.weight is not None:
                yield (
                    f"{at}.weight: {source.name!r} has a name, so stages set its share (extra_sources); leave the "
                    "weight out"
                )
            if required == "nothing" or source.name not in added:
                continue
            if verdict is None:
                yield (
                    f"{at}.annealing_verdict: is missing, but require_annealing_verdict: {required} needs a study of "
                    f"{source.name!r}; run one (herd study run, kind annealing), record its verdict (herd study "
                    "apply), or do not add the source"
                )
            elif verdict.says not in ENOUGH[required]:
                yield (
                    f"{at}.annealing_verdict: {verdict.study} says {verdict.says!r} about {source.name!r}, but "
                    f"require_annealing_verdict is {required!r}; do not add the source, or study it again at another "
                    "share"
                )


class Recipe(Section):
    """The whole chain, from raw text to a promoted model."""

    name: Annotated[Name, decides("nothing")]
    """Name of the MLflow experiment and registered model; runs are called name-1, name-2, ..."""
    seed: Annotated[int, decides("collected", "conversations", "checkpoint")] = 0
    """Seed of initial weights, document order and generated problems."""
    data_seed: Annotated[int | None, decides("collected", "conversations")] = None
    """Seed of generated problems; default: `seed`. Set it to share documents between runs with different seeds."""
    precision: Annotated[Literal["fp8", "bf16", "fp32", "fp64"], decides("checkpoint")] = "bf16"
    """Number format of matrix products; weights, gradients and sums have at least fp32. `fp8`: float8 in the blocks and
    bf16 in the rest of the model; an error on devices without float8."""
    sources: dict[Domain, list[Source]]
    """Sources of each domain: general, math, code, multilingual."""
    conversations: Annotated[list[ConversationSource], left_out([])] = Field(default_factory=list)
    """Sources of stages of kind `sft`; `curate.validation_fraction` of them is kept for evaluation."""
    require_annealing_verdict: Annotated[Level, decides("nothing"), left_out("nothing")] = "nothing"
    """Required `annealing_verdict` of each source in a stage's `extra_sources`. Sources of mixes need none, they are
    the baseline. `not hurting`: the source helps, or the study found no significant difference."""
    curate: Curate = Curate()
    tokenizer: TokenizerConfig
    tokens: TokenShards = TokenShards()
    mix: Annotated[
        dict[str, dict[Domain, Share]], decides("tokenizer", "checkpoint", "evaluation", "gate", since="use")
    ]
    """Mix name -> share of tokens of each domain; the shares of a mix sum to 100%."""
    model: Model
    lr: LearningRate
    optimizer: Optimizer = Optimizer()
    z_loss: Annotated[float, decides("checkpoint")] = Field(default=0.0, ge=0)
    """Coefficient of log(Z)^2 in the loss, Z is the sum of the softmax; 1e-4 in PaLM, 0 in Llama 3."""
    init_from: InitFrom | None = None
    """Weights or checkpoint to start from; default: random weights from `seed`."""
    stages: list[Stage] = Field(min_length=1)
    """Training stages in order; they are one continuous run over one token stream."""
    checkpoint: Checkpoint = Checkpoint()
    spikes: Spikes = Spikes()
    non_finite: Annotated[Literal["stop", "skip"], decides("nothing")] = "stop"
    """After a step with a loss or gradient that is not finite: `stop` the run or `skip` the update."""
    evaluate: Evaluate = Evaluate()
    promote: Promote = Promote()
    tracking: Annotated[Tracking, left_out(Tracking())] = Tracking()
    """Sinks of metrics besides MLflow; does not affect any artifact."""
    studies: Annotated[list[Studied], left_out([])] = Field(default_factory=list)
    """Studies whose verdicts changed this recipe, written by `herd study apply`; does not affect any artifact."""

    @cached_property
    def schedule(self) -> Schedule:
        """The stages as spans of positions, and the learning rate at each position."""
        return Schedule(self)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("schedule", None)  # pydantic copies cached values too, of the fields before the update
        return copied

    @property
    def named_sources(self) -> dict[str, Domain]:
        """Name -> domain of each named source."""
        return {source.name: domain for domain, sources in self.sources.items() for source in sources if source.name}

    def places_apart(self, domain: Domain) -> list[int]:
        """Return the indices of the named sources in `sources.<domain>`."""
        return [index for index, source in enumerate(self.sources.get(domain, [])) if source.name]

    @property
    def documents_seed(self) -> int:
        """Seed of generated documents."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def tokenizer_mix(self) -> dict[Domain, Share]:
        """Mix of the tokenizer's sample."""
        train = self.tokenizer.train
        return self.mix[train.mix] if train and train.mix else self.first_mix

    @property
    def chunk_tokens(self) -> int:
        """Tokens to take from one dataset in a row."""
        pretrained = [stage for stage in self.stages if stage.kind == "pretrain"]  # sft must not change their stream
        return self.tokens.chunk_tokens or max(max(stage.lengths) for stage in pretrained or self.stages)

    @property
    def longest_sequence(self) -> int:
        """Longest sequence of all stages, in tokens."""
        return max(max(stage.lengths) for stage in self.stages)

    @property
    def final_model(self) -> Model:
        """`model` as the last stage leaves it: it takes the longest sequence that it was trained on.

        Of weights that the recipe starts from, this knows `model.max_seq_len` only, which may be too long.
        """
        if self.init_from is not None:
            return self.model
        return self.model.model_copy(update={"max_seq_len": self.longest_sequence})

    @property
    def sft_lengths(self) -> list[int]:
        """Sequence lengths of the stages of kind `sft`, sorted, each once."""
        return sorted({stage.lengths[0] for stage in self.stages if stage.kind == "sft"})

    def rollback_tokens(self, span: StageSpan) -> int:
        """Return how many tokens before a spike a rollback in `span` goes back, at most; 0 without rollbacks."""
        if self.spikes.policy != "rollback":
            return 0
        return self.spikes.skip_window_steps * max(segment.batch for segment in span.segments)

    @property
    def first_mix(self) -> dict[Domain, Share]:
        """Mix of the first stage; its shares are the weights of means over domains."""
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
    def _consistent(self) -> Self:
        faults = [*_stage_faults(self), *_source_faults(self)]
        train = self.tokenizer.train
        if train and train.mix and train.mix not in self.mix:
            faults.append(f"tokenizer.train.mix: {train.mix!r} is not in mix ({', '.join(self.mix)})")
        ids = train.vocab + SPECIAL_TOKENS if train else 0
        if self.tokens.dtype == "uint16" and ids > 2**16:
            faults.append(
                f"tokens.dtype: uint16 holds ids below 65,536, but the vocabulary has {ids:,} "
                "(base + 256 special); write uint32 or auto"
            )
        if not faults:  # a schedule needs valid stages
            faults += self.lr.decay.faults(self.schedule.timeline)
        if faults:
            raise ValueError("\n".join(faults))
        return self
