"""Quantities with units: `252M`, `4Mi`, `8000 steps`, `50%`, `10 min`, `40MB`.

A number without a unit is an error, because steps read as tokens or 4M read as 4Mi spoil a run. Each type parses and
prints itself, exactly: `parse(str(x)) == x`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Self, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

_DECIMAL = {"T": 10**12, "B": 10**9, "M": 10**6, "K": 10**3}
_BINARY = {"Ti": 2**40, "Gi": 2**30, "Mi": 2**20, "Ki": 2**10}
_BYTES = {
    **{f"{k}iB": 2**p for k, p in (("T", 40), ("G", 30), ("M", 20), ("K", 10))},
    **{f"{k}B": 10**p for k, p in (("T", 12), ("G", 9), ("M", 6), ("k", 3), ("K", 3))},
    "B": 1,
}
_SECONDS = {"d": 86400, "h": 3600, "min": 60, "s": 1}
N = TypeVar("N")
_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z%]*)\s*([a-z]*)\s*")


class _Quantity:
    """A value type as a pydantic field: parsed from text and serialized as text."""

    example: ClassVar[str]

    @classmethod
    def parse(cls, text: object) -> Self:
        """Return the value of `text`, or `text` itself if it is a value. Raises ValueError with the form to use."""
        return text if isinstance(text, cls) else cls._parse(text)

    @classmethod
    def _parse(cls, text: object) -> Self:
        raise NotImplementedError

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "examples": [cls.example]}


def _split(text: object, expected: str) -> tuple[Fraction, str, str]:
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not {expected}")
    return Fraction(match[1].replace("_", "")), match[2], match[3]


def _whole(amount: Fraction, text: object, unit: str) -> int:
    if amount.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of {unit}")
    return int(amount)


def _scaled(text: object, expected: str, scales: dict[str, int], noun: str) -> int:
    amount, unit, word = _split(text, expected)
    if unit not in scales or word:
        raise ValueError(f"{text!r} is not {expected}")
    return _whole(amount * scales[unit], text, noun)


def _shortest(count: int, scales: dict[str, int]) -> str:
    """Return the shortest exact text with at most three decimals, such as `2.87T` or `4Mi`; "" if none."""
    texts = []
    for suffix, scale in scales.items():
        amount = Fraction(count, scale)
        if amount >= 1 and (amount * 1000).denominator == 1:
            texts.append(f"{float(amount):.3f}".rstrip("0").rstrip(".") + suffix)
    return min(texts, key=len, default="")


class Tokens(_Quantity, int):
    """A number of tokens: `252M`, `2.87T` (powers of 1000), `4Mi`, `16Ki` (powers of 1024), `500 tokens`."""

    example = "252M"

    @classmethod
    def _parse(cls, text: object) -> Self:
        expected = "a number of tokens: write 252M, 4Mi or 500 tokens"
        amount, unit, word = _split(text, expected)
        if unit == "tokens":
            unit, word = "", "tokens"
        scale = {**_DECIMAL, **_BINARY, "": 1 if word else 0}.get(unit, 0)
        if word not in ("", "tokens") or not scale:
            raise ValueError(f"{text!r} is not {expected}")
        return cls(_whole(amount * scale, text, "tokens"))

    def __str__(self) -> str:
        return _shortest(int(self), {**_DECIMAL, **_BINARY}) or f"{int(self)} tokens"

    __repr__ = __str__


@dataclass(frozen=True)
class Span(_Quantity):
    """A length of training in tokens (`252M`) or in optimizer steps (`8000 steps`, `1.2M steps`)."""

    amount: int
    unit: str
    example = "8000 steps"

    @classmethod
    def _parse(cls, text: object) -> Self:
        amount, unit, word = _split(text, "a length: write 8000 steps, 1.2M steps or 252M")
        if "steps" not in (unit, word):
            return cls(Tokens.parse(text), "tokens")
        scale = {"steps": 1, **_DECIMAL}.get(unit)
        if scale is None:
            raise ValueError(f"{text!r}: steps are counted in powers of 1000, write 1.2M steps")
        return cls(_whole(amount * scale, text, "steps"), "steps")

    def pick(self, step: N, position: N) -> N:
        """Return `step` or `position`, the one in this span's unit."""
        return step if self.unit == "steps" else position

    def __str__(self) -> str:
        if self.unit == "tokens":
            return str(Tokens(self.amount))
        return f"{_shortest(self.amount, {'M': 10**6, 'K': 10**3}) or self.amount} steps"


class Share(_Quantity, Fraction):
    """An exact share in percent: `50%`, `12.5%`."""

    example = "25%"

    @classmethod
    def _parse(cls, text: object) -> Self:
        amount, unit, word = _split(text, "a share: write 25%")
        if unit != "%" or word:
            raise ValueError(f"{text!r} is not a share: write 25%")
        return cls(amount / 100)

    def __str__(self) -> str:
        return f"{float(self * 100):.10g}%"

    __repr__ = __str__


class Duration(_Quantity, int):
    """A time in whole seconds: `30 s`, `10 min`, `2 h`, `1 d`."""

    example = "10 min"

    @classmethod
    def _parse(cls, text: object) -> Self:
        return cls(_scaled(text, "a time: write 30 s, 10 min, 2 h or 1 d", _SECONDS, "seconds"))

    def __str__(self) -> str:
        unit = next((u for u, s in _SECONDS.items() if self and self % s == 0), "s")
        return f"{self // _SECONDS[unit]} {unit}"

    __repr__ = __str__


class Bytes(_Quantity, int):
    """A number of bytes: `40MB` (powers of 1000), `2GiB` (powers of 1024), `512 B`."""

    example = "40MB"

    @classmethod
    def _parse(cls, text: object) -> Self:
        return cls(_scaled(text, "a size in bytes: write 40MB or 2GiB", _BYTES, "bytes"))

    def __str__(self) -> str:
        return _shortest(int(self), _BYTES) or f"{int(self)} B"

    __repr__ = __str__


@dataclass(frozen=True)
class Cadence(_Quantity):
    """An interval in seconds (`10 min`) or tokens (`100B`)."""

    amount: int
    unit: str
    example = "10 min"

    @classmethod
    def _parse(cls, text: object) -> Self:
        try:
            return cls(Duration.parse(text), "seconds")
        except ValueError:
            return cls(Tokens.parse(text), "tokens")

    def __str__(self) -> str:
        return str(Duration(self.amount) if self.unit == "seconds" else Tokens(self.amount))


def tokens(count: float) -> str:
    """Return a rounded number of tokens for tables and logs, such as `251.7M`."""
    for suffix, scale in _DECIMAL.items():
        if count >= scale:
            return f"{count / scale:.4g}{suffix}"
    return f"{count:.0f}"
