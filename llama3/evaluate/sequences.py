"""Requests as tokens: what a model reads and from where on it is scored, by the conventions of `scoring`.

A text is encoded once, however many requests it stands in: an encoder whose tokens end before a space lets a question
and its choices be encoded apart. Everything else is encoded together, as the model would have read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from llama3.evaluate.packing import Scorable
from llama3.evaluate.task import Request


class Encoder(Protocol):
    """What scoring needs of a tokenizer: its tokens end before every space that follows something else than a blank.

    Llama 3's cutting pattern makes that so. The two sides of such a place are encoded apart.
    """

    @property
    def begin(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...


def encoded(tokenizer: Encoder, requests: Iterable[Request]) -> list[Scorable]:
    """Return (tokens, start) of each request. Raises ValueError for an empty continuation."""
    known: dict[str, list[int]] = {"": []}

    def encode(text: str) -> list[int]:
        if text not in known:
            known[text] = tokenizer.encode(text)
        return known[text]

    sequences = []
    for request in requests:
        if not request.continuation:
            raise ValueError(f"{request.task}: question {request.document} has an empty choice {request.choice}")
        context = encode(request.context)
        if request.context[-1:].strip() and request.continuation.startswith(" "):
            whole, shared = [*context, *encode(request.continuation)], len(context)
        else:
            whole = tokenizer.encode(request.context + request.continuation)
            shared = next((i for i, (a, b) in enumerate(zip(whole, context, strict=False)) if a != b), len(context))
        sequences.append(([tokenizer.begin, *whole], 1 + min(shared, len(whole))))
    return sequences
