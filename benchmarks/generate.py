"""Rows of `python -m benchmarks generate`: a KV cache beside no cache, and stream and server beside transformers.

All sides write greedily with the same weights, one thread, in processes of their own that take turns; what counts is
CPU time, and the tokens that they write must be equal. Weights are random, with nothing in the vocabulary that ends a
text, so that all write the same number of tokens. What this gives up: one size of model that no cache of a processor
holds; where weights are much larger, any side's time is the time to read them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from benchmarks.generate_side import BYTES, coder
from benchmarks.measure import NotMeasured
from benchmarks.rows import GENERATE_TARGETS, Row, measured, rows_of
from benchmarks.train_rounds import Rounds, Side, take_rounds
from herd.llama3.export.convert import convert
from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model

SizeName = Literal["tiny", "small"]
PROMPT = "When the ship came in, the harbour was full of people who had waited for it since the morning. "


@dataclass(frozen=True)
class GenerateSize:
    """How large what is measured is."""

    model: Model
    vocab: int
    tokens: int
    """New tokens of one text."""
    together: tuple[int, int]
    """Prompts of the batch rows, and new tokens of each."""
    rounds: int
    recomputed: int
    """Rounds in which everything is computed anew: each takes a minute."""
    long: int
    """How often the prompt is repeated whose first token is waited for."""


SIZES: Mapping[SizeName, GenerateSize] = {
    "tiny": GenerateSize(
        Model(layers=2, dim=32, ffn=112, heads=4, kv_heads=2, max_seq_len=256), 600, 16, (3, 8), 2, 1, 1
    ),
    "small": GenerateSize(
        Model(layers=6, dim=384, ffn=1344, heads=6, kv_heads=2, max_seq_len=2048), 8192, 512, (8, 128), 9, 3, 10
    ),
}


@dataclass(frozen=True)
class GenerateSettings:
    """What the user of `python -m benchmarks generate` chooses."""

    folder: Path
    """Where weights, texts and logs lie; empty at first."""
    size: SizeName = "small"
    only: tuple[str, ...] = ()
    """Names of rows or of their groups; empty: all."""
    peers: str = sys.executable
    """Python interpreter that has transformers."""


@dataclass
class GenerateSession:
    """Measures for the rows of one run."""

    settings: GenerateSettings
    versions: dict[str, str] = field(default_factory=dict)
    _rounds: dict[str, Rounds] = field(default_factory=dict)

    @property
    def size(self) -> GenerateSize:
        return SIZES[self.settings.size]

    @cached_property
    def weights(self) -> Path:
        """Folder with the model, as herd's in `herd` and as transformers' in `hf`."""
        write_models(self.settings.folder, self.size)
        return self.settings.folder

    def rounds(self, name: str, sides: Mapping[str, Side], rounds: int) -> Rounds:
        """Return rounds of `sides`, taken once under `name`. Raises NotMeasured if a library is missing."""
        if name not in self._rounds:
            (self.settings.folder / name).mkdir()
            taken = take_rounds(sides, self.settings.folder / name / "weights", self._shape(name), rounds)
            self.versions |= {side: taken.versions[side] for side in ("transformers",) if side in taken.versions}
            self._rounds[name] = taken
        if self._rounds[name].missing:
            raise NotMeasured("; ".join(self._rounds[name].missing.values()))
        return self._rounds[name]

    def beside_transformers(self) -> Rounds:
        """Return rounds of herd's stream and transformers' generate."""
        theirs = Side("peers.generate_transformers", self.settings.peers, shape={"side": "transformers"})
        return self.rounds("peer", {"ours": _ours("stream"), "transformers": theirs}, self.size.rounds)

    def served(self, name: str) -> Rounds:
        """Return rounds of herd's server, without its clients, and transformers' generate of all texts at once."""
        theirs = Side("peers.generate_transformers", self.settings.peers, shape={"side": "transformers"})
        return self.rounds(name, {"ours": _ours("served"), "transformers": theirs}, self.size.rounds)

    def written(self, name: str, side: str) -> list[list[int]]:
        """Return the tokens that a side wrote in the rounds called `name`."""
        tokens: list[list[int]] = json.loads((self.settings.folder / name / f"{side}.json").read_text())
        return tokens

    def _shape(self, name: str) -> dict[str, Any]:
        prompts, tokens = (
            self.size.together if name in ("batch", "serve-batch-8", "serve-stream-8") else (1, self.size.tokens)
        )
        texts, more = [PROMPT[number:] for number in range(prompts)], {}
        if name == "serve-first-token":
            texts, tokens, more = [PROMPT * self.size.long], 1, {"first": True}
        rows = [[coder(self.size.vocab).begin, *coder(self.size.vocab).encode(text)] for text in texts]
        return {
            "models": str(self.weights),
            "out": str(self.settings.folder / name),
            "vocab": self.size.vocab,
            "texts": texts,
            "prompts": rows,
            "new": tokens,
            "together": True,
            "stream": name in ("serve-stream-8", "serve-first-token"),
            **more,
        }


def write_models(folder: Path, size: GenerateSize) -> None:
    """Write random weights in both formats; no logit of a special token or a single byte is ever the largest."""
    rows = coder(size.vocab).rows
    model = build_model(size.model, rows, 0, torch.float32, torch.device("cpu"))
    assert model.output is not None
    with torch.no_grad():
        for layer in model.layers.parameters():
            layer.mul_(4 if layer.ndim > 1 else 1)  # or every text would be one token again and again
        model.output.weight[:BYTES] = 0
        model.output.weight[size.vocab :] = 0
    save_model(folder / "herd", size.model, rows, model.state_dict())
    convert(folder / "herd", "herd", folder / "hf", "hf")


def cache_recompute(run: GenerateSession, name: str) -> Row:
    """CPU time of computing every token anew over that with a cache."""
    taken = run.rounds("cache", {"ours": _ours("stream"), "anew": _ours("recompute")}, run.size.recomputed)
    if run.written("cache", "stream") != run.written("cache", "recompute"):
        raise RuntimeError("the tokens differ between writing with and without a cache")
    return _row(name, taken, "anew", "ours", f"{run.size.tokens} new tokens")


def transformers_speed(run: GenerateSession, name: str) -> Row:
    """CPU time of transformers' generate over herd's."""
    return _row(name, run.beside_transformers(), "transformers", "ours", f"{run.size.tokens} new tokens")


def transformers_equal(run: GenerateSession, name: str) -> Row:
    """Share of equal tokens."""
    run.beside_transformers()
    (ours,), (theirs,) = run.written("peer", "stream"), run.written("peer", "transformers")
    equal = sum(one == other for one, other in zip(ours, theirs, strict=False))
    due = max(len(ours), len(theirs))
    return measured(name, 100 * equal / due, f"{equal} of {due}, {len(set(ours))} different ones")


def batch_speed(run: GenerateSession, name: str) -> Row:
    """CPU time of one text after another over that of all together."""
    taken = run.rounds("batch", {"together": _ours("answer"), "alone": _ours("stream")}, run.size.rounds)
    if run.written("batch", "answer") != run.written("batch", "stream"):
        raise RuntimeError("the tokens differ between texts written together and alone")
    prompts, tokens = run.size.together
    return _row(name, taken, "alone", "together", f"{prompts} prompts, {tokens} new tokens each")


def serve_speed(run: GenerateSession, name: str) -> Row:
    """CPU time of transformers' generate over that of the server, whose clients are another process."""
    folder, prompts = name.replace("/", "-"), int(name.rpartition("-")[2])
    taken = run.served(folder)
    pairs = zip(run.written(folder, "served"), run.written(folder, "transformers"), strict=True)
    equal = [ours == theirs for text, other in pairs for ours, theirs in zip(text, other, strict=True)]
    speeds = ", ".join(f"{side} {len(equal) / taken.seconds(side):.0f} tokens/s" for side in ("transformers", "ours"))
    note = f"{len(equal) // prompts} new tokens each, {100 * sum(equal) / len(equal):.0f} % equal; {speeds}"
    return _row(name, taken, "transformers", "ours", note)


def first_token(run: GenerateSession, name: str) -> Row:
    """CPU time of one token after a long prompt by transformers over that by the server."""
    taken = run.served("serve-first-token")
    tokens = len(run._shape("serve-first-token")["prompts"][0])
    wall = ", ".join(f"{side} {median(taken.losses[side]):.0f} ms" for side in ("transformers", "ours"))
    return _row(name, taken, "transformers", "ours", f"prompt of {tokens} tokens; wall time {wall}")


MEASURES: Mapping[str, Callable[[GenerateSession, str], Row]] = {
    "cache/recompute": cache_recompute,
    "transformers/speed": transformers_speed,
    "transformers/equal": transformers_equal,
    "batch/speed": batch_speed,
    "serve/batch-1": serve_speed,
    "serve/batch-8": serve_speed,
    "serve/stream-8": serve_speed,
    "serve/first-token": first_token,
}


def generate_rows(run: GenerateSession) -> Iterator[Row]:
    """Yield the rows as they are measured. Raises ValueError for a row that there is not."""
    return rows_of(run, GENERATE_TARGETS, MEASURES)


def _ours(how: str) -> Side:
    return Side("generate_side", shape={"side": how})


def _row(name: str, rounds: Rounds, slow: str, fast: str, note: str) -> Row:
    ratio = rounds.ratio(slow, fast)
    seconds = {side: round(rounds.seconds(side), 4) for side in (slow, fast)}
    told = f"{note}: {slow} {seconds[slow]:.2f} s, {fast} {seconds[fast]:.2f} s; noise +-{100 * ratio.noise:.1f} %"
    return measured(name, ratio.value, told, seconds=seconds)
