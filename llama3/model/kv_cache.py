"""Keys and values of tokens that a model has read, so that the next token costs one step instead of the whole text.

A cache takes the place of a model's `exchange` (see `reading`): the model asks it where its tokens stand and hands it
the keys and values of each layer in turn, which is all that a cache has to know. Room for the longest text is taken at
once, so that no step copies what is there. What this gives up: one process holds the whole model.

Stored is [B, K, T, E], the order in which attention reads fastest.

Shapes: B sequences, S tokens of this call, T tokens so far, K key/value heads, E features of a head.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from llama3.model.attention import AttentionMask, readable
from llama3.model.comms import Comms, NoComms
from llama3.model.transformer import Transformer


class Cache(NoComms):
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
            store[:, :, begin:end] = new.transpose(1, 2)
        return self._held(held)

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

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, T, K, E] that layer `index` of the model has seen."""
        return self._held(self._stores[index])

    def visible(self, seq: int, device: torch.device) -> AttentionMask:
        """Return what the next `seq` tokens of each sequence may read: what is held, and themselves up to each."""
        if seq == 1 or self.length == 0:
            return AttentionMask()
        held = torch.arange(self.length + seq, device=device)
        return AttentionMask(mask=readable(None, held[self.length :], held))

    def _held(self, stores: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k, v = (store[:, :, : self.length].transpose(1, 2) for store in stores)
        return k, v

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_empty(like.shape[0], like.shape[2], self.room, like.shape[3])


class Padded(Cache):
    """Sequences of different lengths that end together: before each stands padding, which nothing reads.

    They come from caches of one sequence each (`put`) and go on together, one token of each a call.
    """

    def __init__(self, room: int, rows: int, length: int) -> None:
        """Make a cache for `rows` sequences, of which the longest has `length` tokens so far."""
        super().__init__(room)
        self.length = length
        self._padding = torch.full((rows,), length)

    def put(self, rows: slice, other: Cache) -> None:
        """Let each of `rows` be the only sequence of `other`."""
        begin = self.length - other.length
        if not self._stores:  # zeros: what is not read is multiplied by 0, and memory may hold NaN
            size = len(self._padding)
            self._stores = [(_zeros(k, size, self.room), _zeros(v, size, self.room)) for k, v in other._stores]
        for mine, theirs in zip(self._stores, other._stores, strict=True):
            for store, new in zip(mine, theirs, strict=True):
                store[rows, :, begin : self.length] = new[:, :, : other.length]
        self._padding[rows] = begin

    def positions(self, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return where the tokens of each sequence stand in it [B, S], and the places that are held."""
        queries, held = super().positions(seq, device)
        return queries - self._padding.to(device).unsqueeze(1), held

    def visible(self, seq: int, device: torch.device) -> AttentionMask:
        if seq > 1:
            raise ValueError(f"{seq} tokens at once cannot follow sequences of different lengths; read them before")
        if not self._padding.any():
            return AttentionMask()
        held = torch.arange(self.length + 1, device=device)
        return AttentionMask(mask=(held >= self._padding.to(device).unsqueeze(1))[:, None, None])

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self._padding = self._padding[rows.cpu()]


def _zeros(like: Tensor, rows: int, room: int) -> Tensor:
    return like.new_zeros(rows, like.shape[1], room, like.shape[3])


class PrefixCache(NoComms):
    """Rows that stand behind one text, which was read before, each token where it is told; nothing of them is kept.

    Give the model a `Visible` mask [B, 1, S, T] with them; T counts the text before. The joined keys and values of a
    layer last as long as the layer, so memory holds the text once, and not once for each row.
    """

    def __init__(self, before: Cache | None, positions_BS: Tensor, repeated: int = 1) -> None:
        """Take the cache of the text before (one row), if there is one, and where the tokens of each row stand.

        `repeated` gives each key head that many times: CUDA's kernels that take a mask want as many as query heads.
        """
        self.before = before
        self.at = positions_BS
        self.repeated = repeated
        self._layer = 0

    def keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.before is not None:
            held = self.before.layer(self._layer)
            self._layer += 1
            k, v = (
                torch.cat([old.expand(len(new), -1, -1, -1), new], 1) for old, new in zip(held, (k, v), strict=True)
            )
        if self.repeated > 1:
            k, v = (x.repeat_interleave(self.repeated, 2) for x in (k, v))
        return k, v

    def positions(self, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
        self._layer = 0
        held = seq if self.before is None else self.before.length + seq
        return self.at, torch.arange(held, device=device)


def reading(model: Transformer, exchange: Comms) -> Transformer:
    """Return a model of the same weights that uses `exchange`; `model` itself stays free for others meanwhile."""
    twin: Transformer = _twin(model, exchange)
    return twin


def _twin(module: Any, exchange: Comms) -> Any:
    """Return a copy of a module that shares its parameters and has copies of the modules in it."""
    twin = copy(module)
    twin._modules = {name: child and _twin(child, exchange) for name, child in module._modules.items()}
    if hasattr(module, "exchange"):
        twin.exchange = exchange
    return twin
