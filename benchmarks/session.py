"""One run of the benchmark: what the user chose, the inputs, and the costs, each measured once.

A cost is the key to several rows, so it is kept; the inputs are made when the first row asks for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.inputs import Input, Inputs, make_inputs
from benchmarks.measure import Bench, Cost, NotMeasured
from benchmarks.rows import Row, ratio

ALPHABETIC = 0.6
"""Share of words with a letter that both sides ask for (see `peers/datatrove_filters.py`)."""
SHINGLE = 5


@dataclass(frozen=True)
class DataSettings:
    """What the user of `python -m benchmarks data` chooses."""

    folder: Path
    """Where inputs and outputs lie; empty at first."""
    size: str = "small"
    only: tuple[str, ...] = ()
    """Names of rows or of their groups; empty: all."""
    peers: str = sys.executable
    """Python interpreter that has the peers."""
    peer_bytes: int = 0
    """Text that the peers get; 0: all."""
    corpus: Path | None = None
    tokenizer: Path | None = None


@dataclass
class Session:
    """Measures for the rows of one run."""

    settings: DataSettings
    _costs: dict[tuple[str, str], Cost] = field(default_factory=dict)
    _kept: dict[str, Any] = field(default_factory=dict)
    closing: ExitStack = field(default_factory=ExitStack)
    """Closed at the end of the run."""

    @cached_property
    def bench(self) -> Bench:
        return Bench(self.settings.folder, self.settings.peers)

    @cached_property
    def inputs(self) -> Inputs:
        given = self.settings
        return make_inputs(given.folder / "inputs", given.size, given.peer_bytes, given.corpus, given.tokenizer)

    @property
    def described(self) -> dict[str, Any]:
        """What a reader must know about the text, if any was read."""
        if "inputs" not in vars(self):
            return {}
        made, given = self.inputs, self.settings
        about = {"documents": made.ours.documents, "mb": round(made.ours.bytes / 1e6, 1), "digest": made.digest}
        peers = {"peer_documents": made.peers.documents, "peer_mb": round(made.peers.bytes / 1e6, 1)}
        return {**about, **peers, "size": given.size, "from": str(given.corpus or "installed")}

    def cost(self, module: str, kind: str = "shard", on: str = "", **options: Any) -> Cost:
        """Return the cost of `module` on its side's input, or on the input named `on`, as jsonl or shard."""
        name = on or module.split(".")[0]
        if (module, name) not in self._costs:
            source: Input = getattr(self.inputs, name)
            warm_up = getattr(self.inputs.warm_up, kind)
            self._costs[module, name] = self.bench.cost(module, getattr(source, kind), warm_up, **options)
        return self._costs[module, name]

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return what `measure` returned, or raise the error that it raised, when `name` was asked for first."""
        if name not in self._kept:
            try:
                self._kept[name] = measure()
            except (RuntimeError, NotMeasured) as error:
                self._kept[name] = error
        if isinstance(self._kept[name], Exception):
            raise self._kept[name]
        return self._kept[name]

    def ratio(self, name: str, ours: Cost, peer: Cost) -> Row:
        """Return the row that compares two costs, ours on our input and the peer's on its own."""
        return ratio(name, ours, peer, self.inputs.ours.bytes, self.inputs.peers.bytes)


def texts_of(shard: Path) -> list[str]:
    """Return the texts of a Parquet file, in its order."""
    texts: list[str] = pq.read_table(shard, columns=["text"])["text"].to_pylist()
    return texts
