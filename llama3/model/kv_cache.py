"""Key/value caches for generation: the next token costs one step instead of the whole text.

A cache takes the place of context parallelism in a model's `comms` (see `with_cache`): it gives the positions of new
tokens and stores the keys and values of each layer. Space for the longest text is allocated at once. A process that
holds some heads and layers of the model caches those. Storage is [B, K, T, E], the order in which attention reads
fastest.

Shapes: B sequences, S tokens of this call, T tokens so far, K key/value heads, E features of a head.
"""

from __future__ import annotations

from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from herd.llama3.model.attention import AttentionMask, can_attend
from herd.llama3.model.comms import Comms
from herd.llama3.model.transformer import Transformer


class KeyValues(Protocol):
    """What attention needs of a cache: the context-parallel methods of `Comms`."""

    def all_gather_kv(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...
    def positions(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]: ...


class Cache:
    """Keys and values of every layer; each call of the model appends its tokens."""

    def __init__(self, capacity: int) -> None:
        """Create a cache for at most `capacity` tokens per sequence."""
        self.capacity = capacity
        self.length = 0
        """Cached tokens, T."""
        self._stores: list[tuple[Tensor, Tensor]] = []
        self._layer = 0

    def all_gather_kv(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, T, K, E] of all tokens so far, those of this call last."""
        begin, end = self.length - k.shape[1], self.length
        if self._layer == len(self._stores):
            size = k.shape[0], k.shape[2], self.capacity, k.shape[3]
            self._stores.append((k.new_empty(size), v.new_empty(size)))
        stores = self._stores[self._layer]
        self._layer += 1
        for store, new in zip(stores, (k, v), strict=True):
            store[:, :, begin:end] = new.transpose(1, 2)
        return self._cached(stores)

    def positions(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Begin a call: return the positions of its `seq_len` tokens and of all cached tokens.

        Raises ValueError if they do not fit.
        """
        if self.length + seq_len > self.capacity:
            raise ValueError(
                f"a cache with room for {self.capacity} tokens cannot hold {self.length + seq_len}; make it larger"
            )
        self._layer = 0
        self.length += seq_len
        keys = torch.arange(self.length, device=device)
        return (keys, keys) if self.length == seq_len else (keys[-seq_len:], keys)

    def keep(self, indices: Tensor) -> None:
        """Keep only the sequences `indices` (int64); an index may be repeated."""
        self._stores = [(k[indices], v[indices]) for k, v in self._stores]

    def cut(self, length: int) -> None:
        """Drop all tokens after the first `length`."""
        self.length = length

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the cached keys and values [B, T, K, E] of layer `index`."""
        return self._cached(self._stores[index])

    def visible(self, seq_len: int, device: torch.device) -> AttentionMask:
        """Return the causal mask of the next `seq_len` tokens over cached and new tokens."""
        if seq_len == 1 or self.length == 0:
            return AttentionMask()
        keys = torch.arange(self.length + seq_len, device=device)
        return AttentionMask(mask=can_attend(None, keys[self.length :], keys))

    def _cached(self, stores: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k, v = (store[:, :, : self.length].transpose(1, 2) for store in stores)
        return k, v


class PaddedCache(Cache):
    """Left-padded sequences of different lengths; attention does not read the padding.

    Filled from caches of one sequence each (`put`); then each call adds one token per sequence.
    """

    def __init__(self, capacity: int, sequences: int, length: int) -> None:
        """Create a cache for as many `sequences`, the longest of which has `length` tokens so far."""
        super().__init__(capacity)
        self.length = length
        self._padding = torch.full((sequences,), length)

    def put(self, indices: slice, other: Cache) -> None:
        """Copy the only sequence of `other` into each of the sequences `indices`."""
        begin = self.length - other.length
        if not self._stores:  # zeros: padding is multiplied by 0, and uninitialized memory may hold NaN
            size = len(self._padding)
            for k, v in other._stores:
                shape = size, k.shape[1], self.capacity, k.shape[3]
                self._stores.append((k.new_zeros(shape), v.new_zeros(shape)))
        for targets, sources in zip(self._stores, other._stores, strict=True):
            for target, source in zip(targets, sources, strict=True):
                target[indices, :, begin : self.length] = source[:, :, : other.length]
        self._padding[indices] = begin

    def positions(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of the tokens within their sequences [B, S], and the cache slots."""
        queries, slots = super().positions(seq_len, device)
        return queries - self._padding.to(device).unsqueeze(1), slots

    def visible(self, seq_len: int, device: torch.device) -> AttentionMask:
        if seq_len > 1:
            raise ValueError(f"{seq_len} tokens at once cannot follow sequences of different lengths; add one per call")
        if not self._padding.any():
            return AttentionMask()
        slots = torch.arange(self.length + 1, device=device)
        return AttentionMask(mask=(slots >= self._padding.to(device).unsqueeze(1))[:, None, None])

    def keep(self, indices: Tensor) -> None:
        super().keep(indices)
        self._padding = self._padding[indices.cpu()]


class BatchCache(Cache):
    """Right-padded sequences of different lengths, which join and leave between calls (continuous batching).

    Each call adds one token to every sequence. A sequence starts at the beginning of its storage, so that a join or
    leave moves at most the last one; attention does not read the padding.
    """

    def __init__(self) -> None:
        """Create an empty cache; it grows as sequences join."""
        super().__init__(0)
        self._lengths: list[int] = []
        self._write_indices: Tensor | None = None
        """Where the tokens of this call go, among all sequences, heads and slots of a layer's storage."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._lengths)

    def join(self, other: Cache, capacity: int, sequences: int) -> None:
        """Add the only sequence of `other` as the last one.

        Storage grows to at most `sequences` sequences of `capacity` tokens, or of as many as an earlier one needed.
        """
        count, self.capacity = len(self), max(self.capacity, capacity)
        for index, sources in enumerate(other._stores):
            if index == len(self._stores):
                self._stores.append((sources[0][:0, :, :0], sources[1][:0, :, :0]))
            allocated, _, slots, _ = self._stores[index][0].shape
            if count == allocated or slots < self.capacity:
                # twice as many sequences at once, so that few joins copy the others
                size = max(count + 1, min(sequences, 2 * count))
                k, v = self._stores[index]
                self._stores[index] = self._grown(k, size), self._grown(v, size)
            for store, source in zip(self._stores[index], sources, strict=True):
                store[count, :, : other.length] = source[0, :, : other.length]
        self._lengths.append(other.length)
        self.length = max(self._lengths)

    def _grown(self, store: Tensor, size: int) -> Tensor:
        # zeros: padding is multiplied by 0, and uninitialized memory may hold NaN
        grown = store.new_zeros(size, store.shape[1], self.capacity, store.shape[3])
        grown[: len(self), :, : store.shape[2]] = store[: len(self)]
        return grown

    def leave(self, index: int) -> None:
        """Remove the sequence `index`; the last sequence gets its index."""
        last = self._lengths.pop()
        if index < len(self):
            for stores in self._stores:
                for store in stores:
                    store[index, :, :last] = store[len(self), :, :last]
            self._lengths[index] = last
        self.length = max(self._lengths, default=0)

    def positions(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of the tokens within their sequences [B, S], and the cache slots."""
        before_B1 = torch.tensor(self._lengths, device=device).unsqueeze(1)
        _, slots = super().positions(seq_len, device)
        self._lengths = [length + 1 for length in self._lengths]
        if self._stores:  # a pipeline stage may have no layer
            heads, capacity = self._stores[0][0].shape[1:3]
            heads_BK = torch.arange(len(self) * heads, device=device).view(len(self), heads)
            self._write_indices = (heads_BK * capacity + before_B1).flatten()
        return before_B1, slots

    def all_gather_kv(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert self._write_indices is not None
        stores = self._stores[self._layer]
        self._layer += 1
        for store, new in zip(stores, (k, v), strict=True):
            features = store.shape[-1]
            store.view(-1, features).index_copy_(0, self._write_indices, new.reshape(-1, features))
        return self._cached((stores[0][: len(self)], stores[1][: len(self)]))

    def visible(self, seq_len: int, device: torch.device) -> AttentionMask:
        if seq_len > 1:
            raise ValueError(f"{seq_len} tokens at once cannot follow sequences of different lengths; add one per call")
        if min(self._lengths) == self.length:
            return AttentionMask()
        slots = torch.arange(self.length + 1, device=device)
        lengths_B1 = torch.tensor(self._lengths, device=device).unsqueeze(1)
        return AttentionMask(mask=(slots <= lengths_B1)[:, None, None])


class PrefixCache:
    """Shared-prefix cache: several continuations of one prompt, which are not cached themselves.

    Call the model with an `AttentionMask` mask [B, 1, S, T], where T includes the prompt. Concatenated keys and values
    exist for one layer at a time, so memory holds the prompt once and not once per sequence.
    """

    def __init__(self, before: Cache | None, positions_BS: Tensor, repeated: int = 1) -> None:
        """Use the cache `before` of the prompt (one sequence), if any, and the positions of each sequence's tokens.

        `repeated` repeats each key head: CUDA kernels with a mask need as many key heads as query heads.
        """
        self.before = before
        self.at = positions_BS
        self.repeated = repeated
        self._layer = 0

    def all_gather_kv(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.before is not None:
            prompt = self.before.layer(self._layer)
            self._layer += 1
            k, v = (
                torch.cat([old.expand(len(new), -1, -1, -1), new], 1) for old, new in zip(prompt, (k, v), strict=True)
            )
        if self.repeated > 1:
            k, v = (x.repeat_interleave(self.repeated, 2) for x in (k, v))
        return k, v

    def positions(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        self._layer = 0
        total = seq_len if self.before is None else self.before.length + seq_len
        return self.at, torch.arange(total, device=device)


class CachedComms:
    """The communication of a model that reads with a cache."""

    def __init__(self, comms: Comms, cache: KeyValues) -> None:
        self.all_gather, self.reduce_scatter = comms.all_gather, comms.reduce_scatter
        self.tp_replicated, self.vocab_start = comms.tp_replicated, comms.vocab_start
        self.all_reduce_max, self.all_reduce_sum = comms.all_reduce_max, comms.all_reduce_sum
        self.all_gather_logits, self.from_last_stage = comms.all_gather_logits, comms.from_last_stage
        self.all_gather_kv, self.positions, self.sequence = cache.all_gather_kv, cache.positions, comms.sequence


def with_cache(model: Transformer, cache: KeyValues) -> Transformer:
    """Return a model that shares the weights of `model` and reads with `cache`; `model` itself is unchanged."""
    comms = CachedComms(model.comms, cache)

    def twin(module: Any) -> Any:
        shallow = copy(module)
        shallow._modules = {name: child and twin(child) for name, child in module._modules.items()}
        if hasattr(module, "comms"):
            shallow.comms = comms
        return shallow

    reader: Transformer = twin(model)
    return reader
