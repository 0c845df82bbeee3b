"""A stage of training, and the gates that a long-context stage must pass to go on to a longer sequence.

Llama 3 went from 8K to 128K in six lengths and took the next one when short-context evaluations had recovered and the
needle in a haystack was found at this length (arXiv 2407.21783, section 3.4.2). Here `advance:` names these gates;
their thresholds are ours, because the paper gives none.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, field_validator, model_validator

from llama3.recipe.averaging import Average
from llama3.recipe.rules import GateRule, StageRate
from llama3.recipe.section import Name, Section
from llama3.recipe.units import Share, Tokens

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
