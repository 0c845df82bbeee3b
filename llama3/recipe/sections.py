"""Sections of a recipe: initial weights, stages, model, optimizer, spikes, checkpoints, evaluation, promotion."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, field_validator, model_validator

from herd.llama3.recipe.base import Name, Replaced, Section, chosen_fields, decides, left_out
from herd.llama3.recipe.gates import GateRule, Metric, StageRate, default_policy
from herd.llama3.recipe.lr import Rate
from herd.llama3.recipe.units import Cadence, Duration, Share, Tokens, _Quantity


class InitFrom(Section):
    """Initial weights of a run.

    Weights start with a new optimizer, the recipe's warm-up and position 0. To limit forgetting, add text like that of
    their first training to the mix (*replay*); half of the tokens was enough for e-Llama (arXiv 2501.09706). A
    `checkpoint` also restores the optimizer and the position. It replaces the stages of this recipe up to `after`, and
    their mixes and lengths decide the next tokens of the stream.
    """

    path: Annotated[str, decides("weights")] = Field(min_length=1)
    """Folder, file or URI of the weights, or a model of the root by alias (`quickstart@champion`); `init_from:
    quickstart@champion` is short for this alone. Or a checkpoint under the root, by label
    (`checkpoint/quickstart-main-1a2b3c4d`) or by run and stage (`quickstart-7/main`). Its shape must be that of
    `model`, which may be left out for weights on this machine."""
    format: Annotated[
        Literal["auto", "hf", "meta", "gguf", "herd", "checkpoint"], decides("weights", since="never")
    ] = "auto"
    """`hf`: safetensors and config.json; `meta`: consolidated.*.pth and params.json; `gguf`: a file of llama.cpp,
    dequantized; `herd`: a herd model folder; `checkpoint`: the state at the end of a stage; `auto`: weights, of the
    format that their files show."""
    after: Annotated[Name | None, decides("checkpoint"), left_out(None)] = None
    """`checkpoint` only: the stage of this recipe that ends at the position of the checkpoint."""

    @property
    def is_checkpoint(self) -> bool:
        return self.format == "checkpoint"

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: object) -> object:
        return {"path": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if self.is_checkpoint and self.after is None:
            raise ValueError(
                f"after is missing: write the stage of this recipe that ends at the position of {self.path}, such as "
                "after: main; this stage and the stages before it are not trained"
            )
        if self.after is not None and not self.is_checkpoint:
            raise ValueError(f"after: {self.after!r}: only a checkpoint has a position; write format: checkpoint")
        return self


@dataclass(frozen=True)
class Average(_Quantity):
    """An average over the weights of a stage.

    `last 8`: mean at eight evenly spaced positions, the last at the end of the stage (as Llama 3's annealing, arXiv
    2407.21783, section 3.4.3). `polyak`: mean after every step (Polyak and Juditsky, 1992). `ema 0.99`: exponential
    moving average m = 0.99 m + 0.01 w, starting from the weights after the first step.
    """

    kind: Literal["last", "polyak", "ema"]
    count: int = 0
    """`last` only: positions."""
    decay: float = 0.0
    """`ema` only."""
    example = "last 8"

    @classmethod
    def _parse(cls, text: object) -> Self:
        if (match := re.fullmatch(r"(?:last )?(\d+)", str(text))) and int(match[1]) >= 2:
            return cls("last", count=int(match[1]))
        if text == "polyak":
            return cls("polyak")
        if (match := re.fullmatch(r"ema (0?\.\d+)", str(text))) and float(match[1]) > 0:
            return cls("ema", decay=float(match[1]))
        raise ValueError(f"{text!r} is not an average: write 'last 8' (2 or more), 'polyak' or 'ema 0.99'")

    def __str__(self) -> str:
        return {"last": f"last {self.count}", "polyak": "polyak", "ema": f"ema {self.decay:g}"}[self.kind]


# Llama 3 went from 8K to 128K in six lengths, each after short-context evaluations had recovered and the needle was
# found at the length before (arXiv 2407.21783, section 3.4.2). The paper gives no thresholds.
Gate = Literal["short-context", "needle"]
GATES: dict[str, tuple[str, str]] = {"short-context": ("no worse than", "1%"), "needle": ("at least", "0.9")}
"""Gate -> kind of its rule, and the default bound."""
Lengths = Annotated[
    Tokens | list[Tokens],
    PlainValidator(lambda text: list(map(Tokens.parse, text)) if isinstance(text, list) else Tokens.parse(text)),
    PlainSerializer(lambda length: list(map(str, length)) if isinstance(length, list) else str(length)),
]


class Stage(Section):
    """A part of the run with its own sequence length, batch, mix and learning-rate rule."""

    name: Annotated[Name, decides("checkpoint", since="use")]
    kind: Annotated[
        Literal["pretrain", "sft"], decides("conversations", "checkpoint", since="stage"), left_out("pretrain")
    ] = "pretrain"
    """`pretrain`: next-token prediction on documents of `mix`. `sft`: supervised fine-tuning on `conversations`, with
    the loss on the assistant's messages only; after all stages of kind `pretrain`."""
    until: Annotated[Tokens | None, decides("checkpoint", since="stage")] = None
    """Position at the end of the stage; write this or `for`."""
    length: Annotated[Lengths | None, decides("checkpoint", since="stage")] = Field(default=None, alias="for")
    """Tokens to train on, or a list with one number per sequence length; write this or `until`."""
    seq_len: Annotated[int | list[int], decides("conversations", "checkpoint", "evaluation", "gate", since="stage")]
    """Sequence length; a list splits the stage into equal parts, one per length."""
    batch: Annotated[Tokens | None, decides("checkpoint", since="stage")] = None
    """Tokens per optimizer step; default: as in the stage before."""
    mix: Annotated[str, decides("tokenizer", "checkpoint", "evaluation", "gate", since="use")]
    """Name of an entry in `mix`; in a stage of kind `sft` the mix of the replayed tokens."""
    replay: Annotated[Share, decides("checkpoint", since="stage"), left_out(Share.parse("0%"))] = Share.parse("0%")
    """`sft` only: share of the sequences that continue the documents of `mix`, with ordinary loss, so that the model
    forgets less."""
    epochs: Annotated[float | None, decides("nothing"), left_out(None)] = Field(default=None, gt=0)
    """`sft` only: passes over the conversations that the stage's length must give. Positions must be known before the
    conversations are tokenized, so `for` states the length; another number of epochs is an error with the length to
    write. Default: at most `tokens.max_epochs`."""
    extra_sources: Annotated[dict[Name, Share], decides("checkpoint", since="stage")] = Field(default_factory=dict)
    """Named source -> its share of the stage's tokens; the rest is from `mix`. `{gsm: 30%}`: 70 % is from the mix."""
    data_offset: Annotated[int, decides("checkpoint", since="stage")] = Field(default=0, ge=0)
    """Skip this many times the stage's own tokens of each source first. Stages that differ only in `data_offset` (from
    1) train on different documents of the same mix."""
    lr: Annotated[StageRate | None, decides("checkpoint", since="use")] = None
    """`linear to 0` or `constant`, from the run's schedule at the stage's start; with its own rate `linear from
    1e-5 to 0` or `constant at 1e-5`, or 1e-5 alone; default: the run's schedule."""
    weight_averaging: Annotated[Average | None, decides("checkpoint", since="use")] = None
    """Average of the stage's weights: `last 8` (8 evenly spaced positions), `polyak` (mean after every step) or `ema
    0.99` (exponential moving average); default: none."""
    select: Annotated[Literal["average", "best"], decides("checkpoint", since="never")] = "average"
    """Model of the stage: the `average`, or the `best`: the last weights if they have fewer bits per byte by the paired
    interval over the trainer's validation documents (`evaluate.val_documents`), else the average."""
    gates: Annotated[dict[Gate, GateRule], decides("gate")] = Field(default_factory=dict)
    """Gates after each sequence length: `[short-context, needle]`, or with thresholds `{short-context: no worse than
    1%, needle: at least 0.9}`. Each length is a separate step, and a failed gate stops the run. `short-context`: bits
    per byte of validation documents at the sequence length before the stage, against the checkpoint before the stage.
    `needle`: share of sentences hidden in validation text of this length that the model retrieves."""

    model_config = ConfigDict(populate_by_name=True)

    @field_validator("seq_len")
    @classmethod
    def _positive(cls, value: int | list[int]) -> int | list[int]:
        if not value or min(value if isinstance(value, list) else [value]) < 2:
            raise ValueError("every sequence length must be at least 2")
        return value

    @field_validator("gates", mode="before")
    @classmethod
    def _gates(cls, value: object) -> object:
        """Return one mapping with all thresholds from a list of names and mappings."""
        gates: dict[object, object] = {}
        for item in value if isinstance(value, list) else [value or {}]:
            gates |= item if isinstance(item, dict) else {item: None}
        if unknown := [str(gate) for gate in gates if gate not in GATES]:
            raise ValueError(f"{unknown[0]!r} is not a gate; the gates are {', '.join(GATES)}")
        return {gate: rule or " ".join(GATES[str(gate)]) for gate, rule in gates.items()}

    @field_validator("gates")
    @classmethod
    def _rules_fit(cls, value: dict[Gate, GateRule]) -> dict[Gate, GateRule]:
        for gate, rule in value.items():
            kind, bound = GATES[gate]
            if rule.kind != kind or rule.bound > 1:
                raise ValueError(f"{gate}: {str(rule)!r} is not a rule of this gate; write '{kind} {bound}'")
        return value

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if (self.until is None) == (self.length is None):
            raise ValueError(f"stage {self.name}: write either until: or for:")
        if isinstance(self.length, list) and len(self.length) != len(self.lengths):
            raise ValueError(
                f"stage {self.name}: for: has {len(self.length)} lengths and seq_len: {len(self.lengths)}; "
                "give each sequence length its own, or one for all"
            )
        if len(self.parts) > 1 and self.weight_averaging is not None:
            raise ValueError(
                f"stage {self.name}: weight_averaging cannot span several sequence lengths with gates; "
                "average over a later stage, or leave gates out"
            )
        if self.kind == "pretrain" and (self.replay or self.epochs):
            field = "replay" if self.replay else "epochs"
            raise ValueError(f"stage {self.name}: {field} is for stages of kind sft; write kind: sft, or leave it out")
        if self.kind == "sft":
            if self.replay >= 1:
                raise ValueError(f"stage {self.name}: replay {self.replay} leaves nothing for conversations; lower it")
            given = {"gates": self.gates, "extra_sources": self.extra_sources, "data_offset": self.data_offset}
            given["seq_len as a list"] = isinstance(self.seq_len, list)
            if wrong := [field for field, value in given.items() if value]:
                raise ValueError(f"stage {self.name}: {wrong[0]} has no meaning in a stage of kind sft; leave it out")
        if self.select == "best" and self.weight_averaging is None:
            raise ValueError(
                f"stage {self.name}: select: best chooses between an average and the last weights; add "
                "weight_averaging: last 8"
            )
        return self

    @property
    def lengths(self) -> list[int]:
        """All sequence lengths, in order."""
        return self.seq_len if isinstance(self.seq_len, list) else [self.seq_len]

    @property
    def parts(self) -> list[str]:
        """Names of the stage's pipeline steps: its own, or `<stage>-<seq_len>` for each length between gates."""
        split = bool(self.gates) and len(self.lengths) > 1
        return [f"{self.name}-{seq_len}" for seq_len in self.lengths] if split else [self.name]

    def end(self, start: int) -> int:
        """Return the end position in the recipe of a stage that starts at `start`."""
        if self.until is not None:
            return self.until
        assert self.length is not None
        return start + (sum(self.length) if isinstance(self.length, list) else self.length)


_SHAPE = decides("weights", "checkpoint")


class RopeScaling(Section):
    """RoPE frequencies scaled to longer sequences as in Llama 3.1; those between the two bounds are blended."""

    model_config = ConfigDict(allow_inf_nan=False)
    type: Annotated[Literal["llama3", "linear"], _SHAPE, left_out("llama3")] = "llama3"
    """`linear`: `factor` divides all frequencies (arXiv 2306.15595), and the other fields change nothing."""
    factor: Annotated[float, _SHAPE] = Field(default=8.0, gt=1)
    """Divisor of low frequencies."""
    low_freq_factor: Annotated[float, _SHAPE] = Field(default=1.0, gt=0)
    """Frequencies with fewer turns in `original` positions are divided."""
    high_freq_factor: Annotated[float, _SHAPE] = Field(default=4.0, gt=0)
    """Frequencies with more turns in `original` positions do not change."""
    original: Annotated[int, _SHAPE] = Field(default=8192, ge=2)
    """Sequence length of the model before scaling."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor:g} must be above low_freq_factor {self.low_freq_factor:g}"
            )
        return self


# 8b, 70b and 405b: Table 3 of "The Llama 3 Herd of Models" (arXiv 2407.21783). Small presets keep the proportions of
# the large ones (FFN 3.5 x dim, grouped-query attention).
_FIELDS = ("layers", "dim", "ffn", "heads", "kv_heads", "max_seq_len", "tied_embeddings")
_SHAPES = {
    "8b": (32, 4096, 14336, 32, 8, 131_072, False),
    "70b": (80, 8192, 28672, 64, 8, 131_072, False),
    "405b": (126, 16384, 53248, 128, 8, 131_072, False),
    "1b": (16, 2048, 8192, 32, 8, 131_072, True),
    "100m": (12, 768, 2688, 12, 4, 8192, True),
    "30m": (8, 512, 1792, 8, 4, 4096, True),
    "6m": (6, 256, 896, 4, 2, 2048, True),
    "3m": (4, 192, 672, 4, 2, 2048, True),
    "2m": (2, 192, 512, 4, 2, 2048, False),
    "tiny": (2, 64, 224, 4, 2, 512, True),
}
PRESETS: dict[str, dict[str, Any]] = {name: dict(zip(_FIELDS, shape, strict=True)) for name, shape in _SHAPES.items()}
"""Model shapes by name; a recipe can override each number."""


FROM_WEIGHTS = "from_weights"
INIT_STD = 0.02
"""Standard deviation of initial weights."""


class Model(Section):
    """The shape of the transformer; missing fields come from the preset."""

    model_config = ConfigDict(allow_inf_nan=False)
    preset: Annotated[str, decides("nothing")] = "custom"
    """Name in the table of presets below, or `from_weights`: the shape that the weights of `init_from` have, as without
    `model`. Fields beside it change it."""
    layers: Annotated[int, _SHAPE] = Field(ge=1)
    dim: Annotated[int, _SHAPE] = Field(ge=8)
    """Hidden size."""
    ffn: Annotated[int, _SHAPE] = Field(ge=8)
    """Hidden size of the SwiGLU block."""
    heads: Annotated[int, _SHAPE] = Field(ge=1)
    kv_heads: Annotated[int, _SHAPE] = Field(ge=1)
    """Key/value heads, shared by groups of query heads (GQA)."""
    max_seq_len: Annotated[int, decides("nothing")] = Field(ge=2)
    """Longest sequence that stages may have. A trained model has here the longest that it and its ancestors were
    trained on (imported weights: what their configuration declares), and takes no longer one."""
    tied_embeddings: Annotated[bool, _SHAPE] = False
    rope_theta: Annotated[float, _SHAPE] = Field(default=500_000.0, gt=1)
    rope_scaling: RopeScaling | None = None
    """Scaled RoPE frequencies; Llama 3.1 has factor 8 (`rope_scaling: {}`), 3.2 factor 32; default: none."""
    norm_eps: Annotated[float, _SHAPE] = Field(default=1e-5, gt=0)
    embedding_std: Annotated[float, decides("checkpoint"), left_out(INIT_STD)] = Field(default=INIT_STD, gt=0)
    """Standard deviation of initial embeddings. 1, as in torchtitan, makes a short run learn much faster if embeddings
    are not tied; tied ones are also the output and need a small one."""

    @property
    def shape(self) -> dict[str, Any]:
        """What the model computes, as plain data: the fields that imported weights must match."""
        return chosen_fields(self, lambda _, mark: "weights" in mark.kinds)

    @property
    def head_dim(self) -> int:
        """Features of an attention head."""
        return self.dim // self.heads

    @property
    def kv_dim(self) -> int:
        """Features of all key heads, or of all value heads."""
        return self.kv_heads * self.head_dim

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: object) -> object:
        if not isinstance(data, dict) or "preset" not in data or data["preset"] == "custom":
            return data
        if data["preset"] == FROM_WEIGHTS:
            raise ValueError(f"preset {FROM_WEIGHTS!r} needs init_from with weights on this machine")
        if data["preset"] not in PRESETS:
            raise ValueError(f"preset {data['preset']!r} is unknown; the presets are {', '.join(PRESETS)}")
        return {**PRESETS[data["preset"]], **data}

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim {self.dim} must be an even multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        return self


class Optimizer(Section):
    """AdamW and gradient clipping."""

    betas: Annotated[tuple[float, float], decides("checkpoint")] = (0.9, 0.95)
    eps: Annotated[Rate, decides("checkpoint")] = 1e-8
    weight_decay: Annotated[float, decides("checkpoint")] = 0.1
    """Decoupled weight decay of the matrices of the blocks and the output, times the learning rate."""
    decay_norms: Annotated[bool, decides("checkpoint")] = False
    """Also decay the weights of norms."""
    decay_embeddings: Annotated[bool, decides("checkpoint")] = False
    """Also decay the embedding table (with tied embeddings also the output matrix)."""
    clip: Annotated[float, decides("checkpoint")] = Field(default=1.0, gt=0)
    """Maximum gradient norm."""


class Spikes(Section):
    """Reaction to jumps of the loss or the gradient norm.

    A step is a spike if its loss, or the logarithm of its gradient norm, is more than `sigma` spreads above the mean of
    the last `window` steps. The spread is the larger of the standard deviation and a third of the distance from the
    mean to the maximum, so that rare but known batches are not spikes. Each spike is logged with its documents.
    """

    policy: Annotated[Literal["off", "stop", "skip", "rollback"], decides("nothing")] = "off"
    """`stop` the run; `skip` the update of this batch; `rollback` to the newest checkpoint before the spike and skip
    the batches around it (PaLM, arXiv 2204.02311, section 5.1); `off`: no detection."""
    sigma: Annotated[float, decides("nothing")] = Field(default=6.0, gt=0)
    """Threshold, in spreads above the mean."""
    window: Annotated[int, decides("nothing")] = Field(default=128, ge=8)
    """Good steps for mean and spread; there are no spikes in a stage before this number of steps."""
    skip_window_steps: Annotated[int, decides("nothing")] = Field(default=32, ge=0)
    """`rollback` only: batches to skip before and after the spike, in addition to its own batch."""
    max_bad_steps: Annotated[int, decides("nothing")] = Field(default=8, ge=1)
    """Stop the run at this number of bad steps (spikes or not finite) in one stage, with any policy."""

    @field_validator("policy", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare off as false


class Keep(Section):
    last: Annotated[int, decides("nothing")] = Field(default=3, ge=1)
    """Number of newest checkpoints to keep while a stage trains. With `spikes.policy: rollback` up to three more are
    kept, so that one is older than `spikes.skip_window_steps`."""
    every: Annotated[Tokens | None, decides("nothing")] = None
    """Also keep one checkpoint per this many tokens; null: none."""

    def kept(self, positions: Iterable[int], pinned: Iterable[int] = (), rollback: int = 0) -> set[int]:
        """Return which of `positions` (ascending) to keep: pinned ones, the newest few, the first after each milestone.

        With `rollback`, also at most three, one of them that many tokens older than the newest, unless all are
        younger.
        Calling it after every save keeps the same checkpoints as calling it once at the end.
        """
        saved = list(positions)
        kept = {*saved[-self.last :], *pinned}
        if rollback and saved:
            old = [position for position in saved if position <= saved[-1] - rollback]
            window = (old[-1] if old else saved[0]) // rollback
            firsts: dict[int, int] = {}
            for position in saved:
                firsts.setdefault(position // rollback, position)
            kept |= {position for number, position in firsts.items() if number >= window}
        if self.every is not None:
            first: dict[int, int] = {}
            for position in saved:
                first.setdefault(position // self.every, position)
            kept |= {position for milestone, position in first.items() if milestone}
        return kept


class Checkpoint(Section):
    every: Annotated[Cadence, decides("nothing")] = Cadence.parse("10 min")
    """Interval between checkpoints: a time or a number of tokens."""
    keep: Keep = Keep()


class Evaluate(Section):
    after: Annotated[list[str], decides("nothing")] = Field(default_factory=list)
    """Stages after which to evaluate; empty: the last one."""
    next_stage: Annotated[Literal["wait", "overlap"], decides("nothing"), left_out("wait")] = "wait"
    """`overlap`: the next stage, or length of a stage, trains while evaluation and gates of the one before run as other
    jobs of Slurm or Kubernetes. A gate that fails ends the run before the stage or length after that; the model of the
    last stage is always evaluated alone."""
    val_interval: Annotated[
        Tokens | Literal["auto", "never"],
        PlainValidator(lambda text: text if text in ("auto", "never") else Tokens.parse(text)),
        PlainSerializer(str),
        decides("checkpoint", since="never"),
    ] = "auto"
    """Tokens between the trainer's own scores on validation documents (`val/bpb`), such as `50B`; `auto`: 1 % of the
    training time; `never`."""
    val_documents: Annotated[int, decides("checkpoint", since="never")] = Field(default=8, ge=1)
    """Validation documents per domain for these scores."""
    every: Annotated[
        Tokens | Literal["never"],
        PlainValidator(lambda text: text if text == "never" else Tokens.parse(text)),
        PlainSerializer(str),
        decides("nothing"),
        left_out("never"),
    ] = "never"
    """Tokens between the checkpoints of a stage in progress that the deployment `evaluate-checkpoint` scores while the
    stage trains, such as `50B`; `never`. By `deferred_suite`, or `suite`."""
    mean_of: Annotated[int, decides("nothing"), left_out(1)] = Field(default=1, ge=1)
    """Checkpoints whose mean `every` scores: the one that waits and those saved before it, which are kept until it is
    scored; 1: it alone."""
    suite: Annotated[str, decides("curated", "evaluation", since="never")] = "quick"
    """`quick` (needs no data outside the recipe), `core`, `full`, `full-hub`, or a YAML file with tasks."""
    final: Annotated[str | None, decides("curated", "evaluation", since="never")] = None
    """Suite for the model of the last stage, which the promotion gate judges, and for the champion; null: `suite`."""
    deferred_suite: Annotated[str | None, decides("curated", "evaluation", since="never")] = None
    """Suite that the deployment `evaluate` runs on each new checkpoint, on other machines; null: only the evaluations
    that the run has not done."""
    data: Annotated[str | None, decides("curated", "evaluation", since="never")] = None
    """Folder or object-store URI of the published data sets for `core` and `full`."""
    on_missing_data: Annotated[Literal["refuse", "skip"], decides("curated", since="never")] = "refuse"
    """If `data` lacks a file of the suite, or this machine cannot sandbox the programs of a code task: `refuse` the
    recipe, or `skip` the task with a warning."""
    documents: Annotated[int, decides("evaluation", "gate")] = Field(default=64, ge=2)
    """Validation documents per domain to score."""
    questions: Annotated[int, decides("evaluation")] = Field(default=1000, ge=2)
    """Questions per multiple-choice task."""
    limit: Annotated[int | None, decides("evaluation"), left_out(None)] = Field(default=None, ge=2)
    """Maximum questions of each published task, as for lm-eval's `--limit`; null: all. Scores become noisy."""
    precision: Annotated[Literal["fp32", "bf16"], decides("evaluation", "gate"), left_out("fp32")] = "fp32"
    """Number format of weights and products. bf16 takes half the memory and time on GPUs and rounds likelihoods by a
    hundredth; two models are compared in the same format."""
    needles: Annotated[int, decides("evaluation", "gate")] = Field(default=55, ge=11)
    """Sentences that the `needle` gate and the task `needle` of a suite hide, spread over eleven depths."""
    ngram_baseline: Annotated[bool, decides("evaluation"), left_out(False)] = False
    """Also report the bits per byte of a 5-gram of bytes that counted 5 MB of the training text: what a model must beat
    to have learned more than spelling."""
    tasks: Annotated[list[str], decides("curated", "evaluation", since="never")] = Field(default_factory=list)
    """More tasks: YAML files, folders of rendered requests, or JSON-lines files of multiple-choice questions."""


class Tracking(Section):
    tensorboard: Annotated[bool, decides("nothing")] = False
    """Also write TensorBoard event files, in `tensorboard/<run>/<stage>` of the root; needs `herd-llm[tensorboard]`."""


class Promote(Section):
    to: Annotated[Name, decides("promotion")] = "champion"
    """Alias of the registered model that a candidate gets when it passes."""
    when: Annotated[dict[Metric, GateRule], decides("promotion"), Replaced()] = Field(default_factory=default_policy)
    """Score, or pattern of scores -> rule: `better`, `no worse than 0.5%`, `no drop over 5 points`, `no significant
    drop`, `at most 2.5`, `at least 0.3`. `*` matches any text between two slashes; the most exact pattern applies.
    Rules of a recipe replace the default as a whole: they are judged together."""
    approval: Annotated[Literal["none", "manual"], decides("promotion")] = "none"
    """`manual`: a candidate that passes is the `challenger` until a person approves or rejects it."""
    mlflow_timeout: Annotated[Duration, decides("nothing")] = Duration.parse("1 h")
    """Maximum time to wait for an MLflow server that does not answer; then the run fails."""

    @field_validator("to")
    @classmethod
    def _free(cls, alias: str) -> str:
        if alias in ("candidate", "previous"):
            raise ValueError(f"{alias!r} is reserved for the promotion log; use another alias, such as champion")
        return alias
