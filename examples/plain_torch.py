"""Read herd's token shards in the order of a run, and train on them in plain PyTorch, without herd.

`Tokens` needs numpy only: copy it. It keeps one number per document in memory and reads token by token run, so it suits
corpora of some ten million documents; herd's own reader pages larger ones. `train` is a loop around it, of torch and
safetensors, that gives herd's losses from the same weights. Both are written from the format's description
(docs/explanations/token-stream.md) and share no code with herd: a test compares the two.

    python plain_torch.py ROOT/tokens/NAME-KEY ROOT/checkpoint/NAME-STAGE-KEY/manifest.json MODEL_FOLDER
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

IGNORED = -100
"""Target of the last token of a segment, as torch's cross_entropy has it."""
GROUP = BLOCK = 256
"""Documents of a group, and groups of a block."""
Ints = np.ndarray[Any, np.dtype[np.int64]]


def mixed(numbers: Any) -> Any:
    """Return SplitMix64's output function, uint64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def shuffled(count: int, key: str) -> Ints:
    """Return a permutation of range(count): the numbers sorted by a hash."""
    state = np.uint64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
    return np.argsort(mixed(state + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)))


def permuted(numbers: Ints, count: int, key: str) -> Ints:
    """Return the images of `numbers` under a permutation of range(count): a Feistel network of six rounds."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(key.encode(), digest_size=48, person=b"document order").digest()
    values, mask, shift = numbers.astype(np.uint64), np.uint64((1 << half) - 1), np.uint64(half)
    again = np.ones(len(values), bool)
    while again.any():  # an image beyond `count` is permuted until it is below
        left, right = values[again] >> shift, values[again] & mask
        for round_key in np.frombuffer(digest, "<u8"):
            left, right = right, left ^ (mixed(right ^ round_key) & mask)
        values[again] = left << shift | right
        again = values >= np.uint64(count)
    return values.astype(np.int64)


class Dataset:
    """The endless stream of one dataset: its documents, epoch after epoch, in shuffled order."""

    def __init__(self, folder: Path, shards: dict[str, list[int]], dtype: str, seed: int, chunk: int | None) -> None:
        """`chunk`: tokens of the pieces that are shuffled after the documents; None: they are not."""
        self.seed, self.name, self.chunk = seed, folder.name, chunk
        lengths = [read_lengths(folder / f"tokens-{number:05}.idx") for number in shards["number"]]
        self.bins = [np.memmap(folder / f"tokens-{number:05}.bin", f"<{np.dtype(dtype).str[1:]}", "r")
                     for number in shards["number"]]  # fmt: skip
        self.lengths = np.concatenate(lengths)
        self.shard = np.repeat(np.arange(len(lengths)), [len(each) for each in lengths])
        self.offset = np.concatenate([np.cumsum(each) - each for each in lengths])
        self.tokens = int(self.lengths.sum())
        self.block = lru_cache(4)(self._block)
        self.starts = lru_cache(2)(self._starts)

    def _rows(self, epoch: int, block: int) -> Ints:
        """Return the documents of a block, ascending."""
        groups = -(-len(self.lengths) // GROUP)
        numbers = np.arange(block * BLOCK, min((block + 1) * BLOCK, groups))
        chosen = np.sort(permuted(numbers, groups, f"{self.seed}/{self.name}/{epoch}"))
        rows = (chosen[:, None] * GROUP + np.arange(GROUP)).ravel()
        return rows[rows < len(self.lengths)]

    def _starts(self, epoch: int) -> Ints:
        """Return the first token of each block of an epoch, and the epoch's tokens."""
        blocks = -(-len(self.lengths) // (GROUP * BLOCK))
        return np.cumsum([0, *(int(self.lengths[self._rows(epoch, block)].sum()) for block in range(blocks))])

    def _block(self, epoch: int, block: int) -> tuple[Ints, Ints, Ints]:
        """Return shard, first token and number of tokens of each piece of a block, in reading order."""
        rows = self._rows(epoch, block)
        rows = rows[shuffled(len(rows), f"{self.seed}/{self.name}/{epoch}" + (f"/{block}" if block else ""))]
        shard, offset, length = self.shard[rows], self.offset[rows], self.lengths[rows]
        if self.chunk is None:
            return shard, offset, length
        starts, total = np.cumsum(length) - length, int(length.sum())
        edges = np.union1d(starts, np.arange(0, total, self.chunk))
        of = np.searchsorted(starts, edges, "right") - 1
        whole, key = total // self.chunk, f"{self.seed}/{self.name}/chunks/{epoch}" + (f"/{block}" if block else "")
        order = [*shuffled(whole, key), whole]  # the last, shorter chunk stays behind
        moved = np.concatenate([np.flatnonzero(edges // self.chunk == number) for number in order])
        return shard[of][moved], (offset[of] + edges - starts[of])[moved], np.diff(edges, append=total)[moved]

    def read(self, first: int, count: int) -> tuple[Ints, Any]:
        """Return tokens [first, first + count) of the stream, and whether each begins a document or piece."""
        tokens, begins, done = np.empty(count, np.int64), np.zeros(count, bool), 0
        while done < count:
            epoch, at = divmod(first + done, self.tokens)
            starts = self.starts(epoch)
            block = int(np.searchsorted(starts, at, "right")) - 1
            shard, offset, length = self.block(epoch, block)
            ends = np.cumsum(length) + starts[block]
            piece = int(np.searchsorted(ends, at, "right"))
            while done < count and piece < len(ends):
                inside = at - int(ends[piece] - length[piece])
                size = min(count - done, int(length[piece]) - inside)
                source = int(offset[piece]) + inside
                tokens[done : done + size] = self.bins[shard[piece]][source : source + size]
                begins[done] |= inside == 0
                done, at, piece = done + size, at + size, piece + 1
        return tokens, begins


def read_lengths(index: Path) -> Ints:
    """Return the tokens of each document of a Megatron index."""
    data = index.read_bytes()
    magic, version, _, sequences, _ = struct.unpack_from("<9sQBQQ", data)
    assert (magic, version) == (b"MMIDIDX\0\0", 1), index
    return np.frombuffer(data, "<i4", sequences, 34).astype(np.int64)


class Phase:
    """Positions of constant mix: which dataset has which unit of them."""

    def __init__(self, described: dict[str, Any], names: list[str], unit: int) -> None:
        """`described` is one of the `spans` of a run's stream; `names` are the datasets in their order."""
        self.names = [name for name in names if name in described["mix"]]
        self.shares = [Fraction(described["mix"][name]["share"]) for name in self.names]
        self.first = [int(described["mix"][name]["from"]) for name in self.names]
        self.start, self.unit = int(described["start"]), unit
        self.end = described["end"] or 1 << 62  # none: the units asked for are the same wherever the mix ends
        size = self.end - self.start
        self.totals = [math.floor(size * share) for share in self.shares]
        remainders = sorted(range(len(self.shares)), key=lambda each: self.totals[each] - size * self.shares[each])
        for each in remainders[: size - sum(self.totals)]:
            self.totals[each] += 1
        period = math.lcm(*(share.denominator for share in self.shares))
        self.block = min(period * max(1, 256 // period), 4096)
        self.whole = size // (unit * self.block)

    def before(self, block: int, rounded: Any = math.floor) -> list[int]:
        """Return the units of each dataset before a block."""
        return [rounded(block * self.block * share) for share in self.shares]

    def units(self, position: int) -> Iterator[tuple[int, str, int, int]]:
        """Yield position, dataset, first token in its stream and size of the units from one at or before `position`."""
        block = min((position - self.start) // (self.unit * self.block), self.whole)
        while block < self.whole and self.start + sum(self.before(block + 1)) * self.unit <= position:
            block += 1
        at = self.start + sum(self.before(block)) * self.unit
        while block <= self.whole:
            first = self.before(block)
            last = self.before(block + 1, math.floor if block < self.whole else math.ceil)
            for dataset, turn in turns(tuple(high - low for low, high in zip(first, last, strict=True))):
                token = (first[dataset] + turn) * self.unit
                if (size := min(self.unit, self.totals[dataset] - token)) > 0:
                    yield at, self.names[dataset], self.first[dataset] + token, size
                    at += size
            block += 1


@lru_cache(64)
def turns(counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (dataset, its earlier turns) of each turn, evenly spread: earliest deadline first."""
    total, dealt, order = sum(counts), [0] * len(counts), []
    for turn in range(total):
        ready = [each for each, count in enumerate(counts) if dealt[each] < count
                 and dealt[each] * total // count <= turn]  # fmt: skip
        chosen = min(ready, key=lambda each: -(-(dealt[each] + 1) * total // counts[each]))
        order.append((chosen, dealt[chosen]))
        dealt[chosen] += 1
    return order


class Tokens:
    """The tokens of a run by position, from a folder of token shards and the `stream` of a checkpoint's manifest."""

    def __init__(self, folder: Path, stream: dict[str, Any]) -> None:
        index = json.loads((folder / "tokens.json").read_text())
        chunk = stream["unit"] if stream.get("shuffle") == "chunks" else None
        self.phases = [Phase(span, list(index["datasets"]), stream["unit"]) for span in stream["spans"]]
        self.datasets = {
            name: Dataset(folder / name, index["datasets"][name]["shards"], index["dtype"], stream["seed"], chunk)
            for name in {name for phase in self.phases for name in phase.names}
        }

    def read(self, start: int, stop: int) -> tuple[Ints, Any]:
        """Return the tokens at positions [start, stop), and whether each begins a segment.

        Attention stays inside a segment. A position after the last phase has token 0 and begins a segment.
        """
        tokens, begins = np.zeros(stop - start, np.int64), np.ones(stop - start, bool)
        for phase in self.phases:
            low, high = max(start, phase.start), min(stop, phase.end)
            for at, name, first, size in phase.units(low) if low < high else ():
                if at >= high:
                    break
                begin, end = max(at, low), min(at + size, high)
                if begin < end:
                    read = self.datasets[name].read(first + begin - at, end - begin)
                    tokens[begin - start : end - start], begins[begin - start : end - start] = read
                    begins[begin - start] |= begin == at
        return tokens, begins

    def batch(self, start: int, seq_len: int, sequences: int) -> tuple[Ints, Ints, Ints]:
        """Return tokens, targets and segment numbers, int64[sequences, seq_len] each, of a step at position `start`."""
        tokens, begins = self.read(start, start + seq_len * sequences + 1)
        targets = np.where(begins[1:], IGNORED, tokens[1:]).reshape(sequences, seq_len)
        marks = begins[:-1].reshape(sequences, seq_len)
        return tokens[:-1].reshape(sequences, seq_len), targets, marks.cumsum(1) - marks[:, :1]

    def steps(self, shape: list[list[int]]) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield the batches of a stage by the `shape` of its manifest: start, seq_len, tokens and number of steps."""
        for start, seq_len, batch, steps in shape:
            for step in range(steps):
                yield self.batch(start + step * batch, seq_len, batch // seq_len)


def train(tokens: Tokens, shape: list[list[int]], model: Path, rates: list[float]) -> list[float]:
    """Train the weights in a herd model folder on the first `len(rates)` steps of a stage; return their losses.

    AdamW as in Llama 3: betas 0.9 and 0.95, weight decay 0.1 of the matrices of the blocks, gradient norm at most 1.
    """
    import torch
    from safetensors.torch import load_file
    from torch.nn import functional as F

    settings = json.loads((model / "config.json").read_text())["model"]
    weights = {name: value.clone().requires_grad_() for name, value in load_file(model / "model.safetensors").items()}
    heads, kv_heads = settings["heads"], settings["kv_heads"]
    size = settings["dim"] // heads
    assert settings["rope_scaling"] is None, "this example has plain rotary frequencies"

    def norm(x: Any, name: str) -> Any:
        return F.rms_norm(x, x.shape[-1:], weights[name], settings["norm_eps"])

    def rotated(x: Any) -> Any:
        powers = torch.arange(0, size, 2, dtype=torch.float64) / size
        angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), settings["rope_theta"] ** -powers)
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)

    def loss(inputs: Any, targets: Any, segments: Any) -> Any:
        same = segments[:, None, :, None] == segments[:, None, None, :]
        visible = same & torch.ones(same.shape[-2:], dtype=torch.bool).tril()
        x = F.embedding(inputs, weights["embedding.weight"])
        for layer in range(settings["layers"]):
            at = f"layers.{layer}."
            normed = norm(x, f"{at}attention_norm.weight")
            q, k, v = (
                (normed @ weights[f"{at}attention.{name}.weight"].T).unflatten(-1, (-1, size)).transpose(1, 2)
                for name in "qkv"
            )
            k, v = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (k, v))
            mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, attn_mask=visible)
            x = x + mixed.transpose(1, 2).flatten(2) @ weights[f"{at}attention.o.weight"].T
            normed = norm(x, f"{at}ffn_norm.weight")
            gate, up = (normed @ weights[f"{at}ffn.{name}.weight"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ weights[f"{at}ffn.down.weight"].T
        output = weights.get("output.weight", weights["embedding.weight"])
        logits = norm(x, "norm.weight") @ output.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    decayed = [value for name, value in weights.items() if value.ndim == 2 and not name.startswith("embedding")]
    plain = [value for name, value in weights.items() if value.ndim == 1 or name.startswith("embedding")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for rate, batch in zip(rates, tokens.steps(shape), strict=False):
        value = loss(*map(torch.from_numpy, batch))
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


if __name__ == "__main__":
    shards, manifest, folder = map(Path, sys.argv[1:4])
    parameters = json.loads(manifest.read_text())["parameters"]
    stage = Tokens(shards, parameters["stream"])
    for number, value in enumerate(train(stage, parameters["shape"], folder, [1e-4] * 20), start=1):
        print(f"step {number}: loss {value:.4f}")
