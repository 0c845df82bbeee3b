"""A stage of training, and the gates that a long-context stage must pass to go on to a longer sequence.

Llama 3 went from 8K to 128K in six lengths and took the next one when short-context evaluations had recovered and the
needle in a haystack was found at this length (arXiv 2407.21783, section 3.4.2). Here `advance:` names these gates;
their thresholds are ours, because the paper gives none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, field_validator, model_validator

from llama3.recipe.base import Name, Section
from llama3.recipe.gates import GateRule, Metric, StageRate, default_policy
from llama3.recipe.lr import Rate
from llama3.recipe.presets import PRESETS
from llama3.recipe.units import Cadence, Duration, Share, Tokens, _Quantity

# Where a run's weights come from, if it does not draw them: from elsewhere, or from a stage of another run.


def _every(value: object) -> Tokens | str:
    return str(value) if value in ("auto", "never") else Tokens.parse(value)


Every = Annotated[Tokens | Literal["auto", "never"], PlainValidator(_every), PlainSerializer(str)]


class Start(Section):
    """What training goes on from.

    Weights (`hf`, `meta`, `herd`) get a fresh optimizer and the recipe's own warm-up, and positions count from 0. What
    they knew is forgotten without *replay*: keep text like their first training's in the mix; half of the tokens kept
    nearly all of it in e-Llama (arXiv 2501.09706). A `checkpoint` brings its optimizer and its position too: it stands
    for the stages of this recipe up to `after`, which are not trained, and training goes on as if they had been. Their
    mixes and lengths still say which tokens of the stream come next.
    """

    origin: str = Field(alias="from", min_length=1)
    """Folder or URI of the weights, or a checkpoint under the root by its label (`checkpoint/quickstart-main-1a2b3c4d`)
    or as run and stage (`quickstart-7/main`); its shape must be that of `model`."""
    format: Literal["hf", "meta", "herd", "checkpoint"] = "hf"
    """`hf`: safetensors and config.json; `meta`: consolidated.*.pth and params.json; `herd`: a model folder of ours;
    `checkpoint`: the state at the end of a stage."""
    after: Name | None = Field(default=None, exclude_if=lambda after: after is None)
    """`checkpoint` only: the stage of this recipe that ends where the checkpoint does."""

    model_config = ConfigDict(populate_by_name=True)

    @property
    def is_checkpoint(self) -> bool:
        return self.format == "checkpoint"

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if self.is_checkpoint and self.after is None:
            raise ValueError(
                f"after is missing: write the stage of this recipe that ends where {self.origin} does, such as "
                "after: main; it and those before it are not trained"
            )
        if self.after is not None and not self.is_checkpoint:
            raise ValueError(f"after: {self.after!r}: only a checkpoint has a position; write format: checkpoint")
        return self


# Which weights of a stage are averaged into its model.


@dataclass(frozen=True)
class Average(_Quantity):
    """The rule of an average over the weights of a stage.

    `last 8`: the mean at eight positions spread evenly over the stage, the last of them its end (Llama 3 averages
    checkpoints of the annealing, arXiv 2407.21783, section 3.4.3). `polyak`: the mean after every step (Polyak and
    Juditsky, 1992). `ema 0.99`: an average that forgets, each step m = 0.99 m + 0.01 w, begun with the weights after
    the first step.
    """

    kind: Literal["last", "polyak", "ema"]
    count: int = 0
    """Positions of `last`."""
    decay: float = 0.0
    """Of `ema`."""
    example = "last 8"

    @classmethod
    def parse(cls, text: object) -> Average:
        if isinstance(text, Average):
            return text
        words = str(text)
        if (match := re.fullmatch(r"(?:last )?(\d+)", words)) and int(match[1]) >= 2:
            return cls("last", count=int(match[1]))
        if words == "polyak":
            return cls("polyak")
        if (match := re.fullmatch(r"ema (0?\.\d+)", words)) and float(match[1]) > 0:
            return cls("ema", decay=float(match[1]))
        raise ValueError(f"{text!r} is not an average: write 'last 8' (2 or more), 'polyak' or 'ema 0.99'")

    def __str__(self) -> str:
        return {"last": f"last {self.count}", "polyak": "polyak", "ema": f"ema {self.decay:g}"}[self.kind]


Gate = Literal["short-context", "needle"]
GATES: dict[str, tuple[str, str]] = {"short-context": ("no worse than", "1%"), "needle": ("at least", "0.9")}
"""Gate -> kind of rule that it takes, and its bound where the recipe names only the gate."""


def _lengths(value: object) -> Tokens | list[Tokens]:
    return [Tokens.parse(item) for item in value] if isinstance(value, list) else Tokens.parse(value)


def _written(value: Tokens | list[Tokens]) -> str | list[str]:
    return [str(item) for item in value] if isinstance(value, list) else str(value)


Lengths = Annotated[Tokens | list[Tokens], PlainValidator(_lengths), PlainSerializer(_written)]


class Stage(Section):
    """A span of positions with its own sequence length, batch, mix and learning-rate rule."""

    name: Name
    until: Tokens | None = None
    """Position at which the stage ends; or `for`."""
    length: Lengths | None = Field(default=None, alias="for")
    """Tokens that the stage trains on; or `until`. A list gives each sequence length its own number."""
    seq: int | list[int]
    """Sequence length; a list splits the stage into equal parts, one per length."""
    batch: Tokens | None = None
    """Tokens per optimizer step; left out, as in the stage before."""
    mix: str
    """Name of an entry under `mix`."""
    add: dict[Name, Share] = Field(default_factory=dict)
    """Sources that stand apart -> their share of the stage's tokens; `mix` has the rest. `{gsm: 30%}`: 70 % is mix."""
    draw: int = Field(default=0, ge=0)
    """Which helping of data the stage reads: every source's stream is read from `draw` times the stage's own need
    further on, so stages that differ in `draw` alone, from 1 on, train on other documents of the same mix."""
    lr: StageRate | None = None
    """`linear to 0`, `constant`, or left out: the run's schedule."""
    average: Average | None = None
    """Average weights of the stage into its model: `last 8` (8 positions spread over it), `polyak` (after every step)
    or `ema 0.99` (after every step, the old ones forgotten)."""
    keep: Literal["average", "better"] = "average"
    """`better`: the stage's model is its average or its last weights, whichever needs fewer bits for the held-out
    documents that the trainer scores (`evaluate.every`)."""
    advance: dict[Gate, GateRule] = Field(default_factory=dict)
    """Gates after each sequence length, each length a step of its own: `[short-context, needle]`, or with a threshold
    `{short-context: no worse than 1%, needle: at least 0.9}`. `short-context`: bits per byte of held-out documents at
    the sequence length before the stage, against the checkpoint that the stage started from. `needle`: share of
    sentences hidden in held-out text of this length that the model finds again. A failed gate stops the run."""

    model_config = ConfigDict(populate_by_name=True)

    @field_validator("seq")
    @classmethod
    def _positive(cls, value: int | list[int]) -> int | list[int]:
        if not value or min(value if isinstance(value, list) else [value]) < 2:
            raise ValueError("every sequence length must be at least 2")
        return value

    @field_validator("advance", mode="before")
    @classmethod
    def _gates(cls, value: object) -> object:
        """Turn a list of names and mappings into one mapping with every threshold filled in."""
        gates: dict[object, object] = {}
        for item in value if isinstance(value, list) else [value or {}]:
            gates |= item if isinstance(item, dict) else {item: None}
        if unknown := [str(gate) for gate in gates if gate not in GATES]:
            raise ValueError(f"{unknown[0]!r} is not a gate; the gates are {', '.join(GATES)}")
        return {gate: rule or " ".join(GATES[str(gate)]) for gate, rule in gates.items()}

    @field_validator("advance")
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
                f"stage {self.name}: for: has {len(self.length)} lengths and seq: {len(self.lengths)}; "
                "give each sequence length its own, or one for all"
            )
        if len(self.parts) > 1 and self.average is not None:
            raise ValueError(
                f"stage {self.name}: average cannot go over several sequence lengths with gates between them; "
                "average over a stage after it, or leave advance out"
            )
        if self.keep == "better" and self.average is None:
            raise ValueError(
                f"stage {self.name}: keep: better chooses between an average and the last weights; add average: last 8"
            )
        return self

    @property
    def lengths(self) -> list[int]:
        """Sequence lengths of the stage's parts."""
        return self.seq if isinstance(self.seq, list) else [self.seq]

    @property
    def parts(self) -> list[str]:
        """Names of the steps that train the stage: its own, or `<stage>-<seq>` of each length between two gates."""
        split = bool(self.advance) and len(self.lengths) > 1
        return [f"{self.name}-{seq}" for seq in self.lengths] if split else [self.name]

    def end(self, start: int) -> int:
        """Return the position at which the stage is asked to end when it starts at `start`."""
        if self.until is not None:
            return self.until
        assert self.length is not None
        return start + (sum(self.length) if isinstance(self.length, list) else self.length)


class RopeScaling(Section):
    """Rotary frequencies stretched to longer sequences by the rule of Llama 3.1 (`original` is what it was trained on).

    A feature that turns more than `high_freq_factor` times within `original` positions keeps its frequency, one that
    turns less than `low_freq_factor` times is slowed by `factor`, those in between are blended.
    """

    factor: float = Field(default=8.0, gt=1)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original: int = Field(default=8192, ge=2)
    """Sequence length of the model before it was stretched."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor:g} must be above low_freq_factor {self.low_freq_factor:g}"
            )
        return self


class Model(Section):
    """The shape of the transformer; what is left out comes from the preset."""

    preset: str = "custom"
    layers: int = Field(ge=1)
    dim: int = Field(ge=8)
    ffn: int = Field(ge=8)
    """Hidden size of the SwiGLU block."""
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    """Key/value heads, shared by groups of query heads (GQA)."""
    max_seq: int = Field(ge=2)
    """Longest sequence that the rotary embedding is meant for."""
    tied_embeddings: bool = False
    rope_theta: float = Field(default=500_000.0, gt=1)
    rope_scaling: RopeScaling | None = None
    """Stretched rotary frequencies; the published 3.1 models use factor 8 (`rope_scaling: {}`), 3.2 factor 32."""
    norm_eps: float = 1e-5

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: object) -> object:
        if not isinstance(data, dict) or "preset" not in data or data["preset"] == "custom":
            return data
        if data["preset"] not in PRESETS:
            known = ", ".join(PRESETS)
            raise ValueError(f"preset {data['preset']!r} is unknown; the presets are {known}")
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

    betas: tuple[float, float] = (0.9, 0.95)
    eps: Rate = 1e-8
    weight_decay: float = 0.1
    """Of the matrices of the blocks and the output (decoupled, times the learning rate)."""
    decay_norms: bool = False
    """Also decay the weights of norms."""
    decay_embeddings: bool = False
    """Also decay the embedding table (which is the output matrix as well where the two are tied)."""
    clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""


class Spikes(Section):
    """What happens when the loss or the gradient norm jumps.

    A step is a spike when its loss, or the logarithm of its gradient norm, lies more than `sigma` times the spread
    above the mean over the last `window` steps. The spread is their standard deviation, or a third of the distance from
    the mean to their largest where that is more, so that a batch of a rare domain is no spike if such batches came
    before. Every spike is logged with the documents of its batch.
    """

    policy: Literal["off", "stop", "skip", "rollback"] = "off"
    """`stop` ends the run; `skip` leaves this batch's update out; `rollback` goes back to the newest checkpoint before
    the spike and leaves out the batches around it (PaLM, arXiv 2204.02311, section 5.1); `off` does not look."""
    sigma: float = Field(default=6.0, gt=0)
    """Spreads above the mean that make a spike."""
    window: int = Field(default=128, ge=8)
    """Good steps of history for mean and deviation; until a stage has so many, nothing in it is a spike."""
    around: int = Field(default=32, ge=0)
    """`rollback` only: batches left out before the spike and as many after it, besides the spike's own."""
    most: int = Field(default=8, ge=1)
    """Bad steps, spikes or not finite, in one stage at which the run stops, whatever the policy."""

    @field_validator("policy", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare off as false


class Keep(Section):
    last: int = Field(default=3, ge=1)
    """Newest checkpoints of a stage that are kept while it trains."""
    every: Tokens | None = None
    """Besides, keep one every so many tokens."""


class Checkpoint(Section):
    every: Cadence = Cadence.parse("10 min")
    """How often to save: a time or a number of tokens."""
    keep: Keep = Keep()


class Evaluate(Section):
    after: list[str] = Field(default_factory=list)
    """Stages after which to evaluate; empty: the last one."""
    every: Every = "auto"
    """How often training itself scores a few held-out documents (`held_out/bpb`), such as `50B`; `auto`: as often as
    costs a hundredth of the time; `never`."""
    every_documents: int = Field(default=8, ge=1)
    """How many of each domain that are."""
    suite: str = "quick"
    """`quick` (needs no data but the recipe's), `core`, `full`, or a YAML file that lists tasks."""
    final: str | None = None
    """The suite for the last stage's model, which the gate judges, and for the champion beside it; none: `suite`."""
    later: str | None = None
    """The suite that the deployment `evaluate` puts to every new checkpoint, on machines of its own, beside the run;
    none: it only does what the run has not done."""
    data: str | None = None
    """Folder, here or in an object store, of the published sets that `core` and `full` ask for."""
    missing: Literal["refuse", "skip"] = "refuse"
    """What to do where `data` lacks a file of the suite, or this machine cannot contain the programs of a code task:
    refuse the recipe, or leave the task out, said aloud."""
    documents: int = Field(default=64, ge=2)
    """Held-out documents per domain to score."""
    questions: int = Field(default=1000, ge=2)
    """Questions per multiple-choice task."""
    needles: int = Field(default=55, ge=11)
    """Sentences that the `needle` gate of a long-context stage hides, spread over eleven depths."""
    tasks: list[str] = Field(default_factory=list)
    """Further tasks: YAML files, folders of rendered requests, or JSON-lines files of multiple-choice questions."""


class Promote(Section):
    to: Name = "champion"
    """Alias of the registered model that a passing candidate takes over."""
    when: dict[Metric, GateRule] = Field(default_factory=default_policy)
    """Score, or pattern of scores -> rule: `better`, `no worse than 0.5%`, `no drop over 5 points`,
    `no significant drop`, `at most 2.5`, `at least 0.3`. `*` stands for anything between two slashes; the most exact
    name judges a score."""
    approval: Literal["none", "person"] = "none"
    """`person`: a candidate that passes is the `challenger` until somebody approves or refuses it."""
    patience: Duration = Duration.parse("1 h")
    """How long a promotion waits for an MLflow server that does not answer before the run fails."""

    @field_validator("to")
    @classmethod
    def _free(cls, alias: str) -> str:
        if alias in ("candidate", "previous"):
            raise ValueError(f"{alias!r} is given by the promotion log itself; name another alias, such as champion")
        return alias
