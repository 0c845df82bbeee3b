"""The score table: what an evaluation hands to the gate, the tracker and the report; and the files beside it.

Every score carries its spread, size, chance level, direction and the digest of the requests it was measured on, so a
reader needs nothing else to compare two of them. One Parquet file, one row per score.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from llama3.evaluate.statistics import Estimate, Z

SCORES_FILE = "scores.parquet"
SAMPLES_FILE = "samples.parquet"
GENERATIONS_FILE = "generations.json"
TASKS_FILE = "tasks.json"
"""What was asked (kind, version, shots, digest, sources), what counts in `eval/core`, what was left out and why."""

Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Score:
    """One number about a model."""

    key: str
    """`eval/bpb/math`, `eval/arithmetic`, ...; also the name of the tracked metric."""
    value: float
    stderr: float
    """Standard error of `value` over documents or questions; NaN where there are fewer than two."""
    low: float
    high: float
    """Ends of the 95 % interval."""
    n: int
    """Documents or questions."""
    chance: float | None
    """What guessing scores, or None where guessing has no meaning."""
    unit: str
    """`bits per byte`, `accuracy`, `share above chance`."""
    better: Better
    requests: str
    """Digest of what was asked; two scores with different digests were measured on different text."""
    shots: int = 0
    """Solved examples before each question."""
    version: int = 1
    """Of the task."""
    unjudged: int = 0
    """Questions that are not among `n` because an answer could not be judged: neither right nor wrong."""

    @classmethod
    def of(cls, key: str, estimate: Estimate, unit: str, better: Better, requests: str, chance: float | None) -> Score:
        """Return the score called `key` whose value and spread are `estimate`."""
        return cls(key=key, unit=unit, better=better, requests=requests, chance=chance, **dataclasses.asdict(estimate))

    @property
    def half(self) -> float:
        """Half the width of the published interval, 1.96 sqrt(S (1 - S) / N) for a share (arXiv 2407.21783, 5.1)."""
        return Z * self.stderr

    def interval(self, form: str = ".4g") -> str:
        """Return the 95 % interval as people read it; nothing where one document gives none."""
        return f"{self.low:{form}} to {self.high:{form}}" if math.isfinite(self.stderr) else ""

    @property
    def estimate(self) -> Estimate:
        """Value and spread alone."""
        return Estimate(self.value, self.stderr, self.low, self.high, self.n)


Scores = Mapping[str, Score]

_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("value", pa.float64()),
        ("stderr", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("n", pa.int64()),
        ("chance", pa.float64()),
        ("unit", pa.string()),
        ("better", pa.string()),
        ("requests", pa.string()),
        ("shots", pa.int64()),
        ("version", pa.int64()),
        ("unjudged", pa.int64()),
    ]
)


def write_scores(scores: Scores, folder: Path) -> None:
    """Write `scores` into `folder`, sorted by key."""
    rows = [dataclasses.asdict(scores[key]) for key in sorted(scores)]
    pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), folder / SCORES_FILE)


def read_scores(folder: Path) -> dict[str, Score]:
    """Return the scores of the evaluation in `folder` by key. Raises ValueError if there are none."""
    path = folder / SCORES_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {SCORES_FILE}; evaluate the model into it first")
    rows = pq.read_table(path, schema=_SCHEMA).to_pylist()
    return {row["key"]: Score(**{**row, "unjudged": row["unjudged"] or 0}) for row in rows}


def read_asked(folder: Path) -> dict[str, Any]:
    """Return what the evaluation in `folder` asked: `suite`, `baselines`, `tasks` and `skipped` ({task: why}).

    A task has key, kind, version, shots, n, chance, average (`items` or `groups`), digest, sources ({file: SHA-256})
    and baseline, the accuracy that counts as 0 in `eval/core`, or None where it does not count.
    Raises ValueError if the folder holds no evaluation.
    """
    path = folder / TASKS_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {TASKS_FILE}; evaluate the model into it first")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
