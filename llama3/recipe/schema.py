"""The recipe: the whole intent of a training run as one object.

Reading it is enough to know what will be trained; nothing that decides a result lives anywhere else. Keys that
nobody knows are refused. What is not here on purpose: where it runs (processes, devices, storage root), which
never changes what is made. Attribute docstrings become field descriptions in the Prefect form and the reference.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PlainSerializer, PlainValidator, field_validator, model_validator

from llama3.recipe.checks import check_recipe
from llama3.recipe.curation import Curate
from llama3.recipe.data import Source, Tokenizer, TokenShards
from llama3.recipe.judged import Level, Studied
from llama3.recipe.presets import PRESETS
from llama3.recipe.rates import LearningRate, Rate
from llama3.recipe.rules import GateRule, Metric, default_policy
from llama3.recipe.section import Domain, Name, Section
from llama3.recipe.stage import Stage
from llama3.recipe.start import Start
from llama3.recipe.units import Cadence, Duration, Share, Tokens


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


def _every(value: object) -> Tokens | str:
    return str(value) if value in ("auto", "never") else Tokens.parse(value)


Every = Annotated[Tokens | Literal["auto", "never"], PlainValidator(_every), PlainSerializer(str)]


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
    tokenizer: Tokenizer
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
