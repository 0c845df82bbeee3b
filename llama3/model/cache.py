"""Keys and values of tokens that a model has read, so that the next token costs one step instead of the whole text.

A cache takes the place of the model's `exchange` while it is attached: the model asks it where its tokens stand and
hands it the keys and values of each layer in turn, which is all that a cache has to know. Room for the longest text is
taken at once, so that no step copies what is there. What this gives up: one process holds the whole model.

Shapes: B sequences, S tokens of this call, T tokens so far, K key/value heads, E features of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from llama3.model.exchange import Alone, Exchange
from llama3.model.transformer import Transformer


class Cache(Alone):
    """What every layer has seen; each call of the model adds its tokens after those that are there."""

    def __init__(self, room: int) -> None:
        """Make a cache for at most `room` tokens a sequence."""
        self.room = room
        self.length = 0
        """Tokens held, T."""
        self._stores: list[tuple[Tensor, Tensor]] = []
        self._layer = 0

    def keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, T, K, E] of all tokens so far, those of this call last."""
        begin, end = self.length - k.shape[1], self.length
        if self._layer == len(self._stores):
            self._stores.append((self._empty(k), self._empty(v)))
        held = self._stores[self._layer]
        self._layer += 1
        for store, new in zip(held, (k, v), strict=True):
            store[:, begin:end] = new
        return held[0][:, :end], held[1][:, :end]

    def positions(self, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return where the `seq` tokens of this call stand, and all that are held; the call begins here.

        Raises ValueError where there is no room for them.
        """
        if self.length + seq > self.room:
            raise ValueError(
                f"a cache with room for {self.room} tokens cannot hold {self.length + seq}; make it larger"
            )
        self._layer = 0
        self.length += seq
        held = torch.arange(self.length, device=device)
        return (held, held) if self.length == seq else (held[-seq:], held)

    def keep(self, rows: Tensor) -> None:
        """Go on with `rows` (int64, indices) of the sequences alone; a row may be named several times."""
        self._stores = [(k[rows], v[rows]) for k, v in self._stores]

    def cut(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        self.length = length

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_empty(like.shape[0], self.room, *like.shape[2:])


@contextmanager
def attached(model: Transformer, exchange: Exchange) -> Iterator[None]:
    """Let `model` use `exchange` until the block ends."""
    holders: list[Any] = [module for module in model.modules() if hasattr(module, "exchange")]
    before = [holder.exchange for holder in holders]
    try:
        for holder in holders:
            holder.exchange = exchange
        yield
    finally:
        for holder, own in zip(holders, before, strict=True):
            holder.exchange = own
