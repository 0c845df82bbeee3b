"""An arm: a name and a change of the base recipe as overrides, as `--set` takes them.

So what an arm does can be read, and done by hand. What this gives up: a change that no override can say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from llama3.recipe.section import Domain

Shares = Mapping[Domain, Fraction]
BASE, DEFAULT, ANNEAL, TOKENIZER = "base", "default", "anneal", "tokenizer"
"""Control arms of a mix search and of an annealing study; the stage that is annealed; the mix that trains the tokenizer
of every arm of a mix search."""


@dataclass(frozen=True)
class Arm:
    """One change of the base recipe."""

    name: str
    overrides: tuple[str, ...] = ()
    budget: float = 0.0
    """Of a ladder: training operations asked for."""
    shares: Shares = field(default_factory=dict)
    """Of a mix search: what it trains on."""


def override(path: str, value: object) -> str:
    """Return the override that sets `path` to plain data."""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return f"{path}={value}" if plain else f"{path}={json.dumps(value, ensure_ascii=False)}"
