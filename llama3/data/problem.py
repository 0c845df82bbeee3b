"""What a generated mathematics problem is, and the random draws that make it.

Draws come from SplitMix64 (Steele, Lea and Flood 2014) over a BLAKE2b digest of the key, not from `random`: the
numbers are then fixed by this file, whatever the Python version, and problem i can be made without problems 0..i-1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
_MASK = 2**64 - 1
HELD_OUT_ONE_IN = 16
NAMES = (
    "Ada",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kofi",
    "Lena",
    "Mei",
    "Noor",
)


class Draws:
    """A stream of uniform draws that `key` alone determines."""

    def __init__(self, *key: str | int) -> None:
        text = "\x1f".join(map(str, key))
        self._state = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def below(self, bound: int) -> int:
        """Return a uniform integer in [0, bound); the bias, under bound / 2^64, cannot be seen."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) * bound) >> 64

    def between(self, low: int, high: int) -> int:
        """Return a uniform integer in [low, high]."""
        return low + self.below(high - low + 1)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def sample(self, choices: Sequence[T], count: int) -> list[T]:
        """Return `count` different elements in random order. Raises IndexError if there are not so many."""
        rest = list(choices)
        return [rest.pop(self.below(len(rest))) for _ in range(count)]

    def size(self) -> int:
        """Return an upper bound for operands: most problems are small, as in any schoolbook."""
        return self.pick((9, 9, 12, 20, 20, 50, 100, 100, 500, 1000))


@dataclass(frozen=True)
class Problem:
    """A question, its worked steps and its answer."""

    kind: str
    statement: str
    """Canonical form, equal for two phrasings of one problem (`7+8` for `8 plus 7`); what overlap is judged by."""
    question: str
    steps: str
    answer: str
    number: int | None = None
    """The answer if it is a whole number."""

    @property
    def held_out(self) -> bool:
        """Whether the problem may only be asked in an evaluation: one statement in 16, by hash, for every seed."""
        digest = hashlib.blake2b(self.statement.encode(), digest_size=8, person=b"held-out").digest()
        return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def numeric(kind: str, statement: str, question: str, steps: str, number: int) -> Problem:
    """Return a problem whose answer is the whole number `number`."""
    return Problem(kind, statement, question, steps, str(number), number)
