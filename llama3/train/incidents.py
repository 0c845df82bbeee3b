"""`skips.json` of a stage: the positions whose batches are skipped since a rollback, as spans of whole steps.

Tokens, recipe and this file together decide the weights, so it is written atomically before training goes back. A span
begins where the journal was rewound to, so it does not matter which checkpoints happened to exist.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from storage.filesystem import write_atomic

NAME = "skips.json"


class Skip(BaseModel):
    """Positions [start, end) are skipped because of the spike in the step that begins at `spike`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: int
    end: int
    spike: int
    reason: str


_SPANS = TypeAdapter(tuple[Skip, ...])


@dataclass(frozen=True)
class SkippedRanges:
    """The spans of a stage, in the order in which they were decided."""

    spans: tuple[Skip, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> SkippedRanges:
        """Return the spans in `folder`, () without the file. Raises ValueError for a broken file."""
        path = folder / NAME
        if not path.exists():
            return cls()
        try:
            return cls(_SPANS.validate_json(path.read_bytes()))
        except ValueError as error:
            raise ValueError(
                f"{path}: is not a list of spans ({error}); restore the file, or train the stage again"
            ) from None

    def write(self, folder: Path) -> None:
        write_atomic(folder / NAME, json.dumps(self.facts(), indent=1) + "\n")

    def plus(self, span: Skip) -> SkippedRanges:
        """Return these spans and one more."""
        return SkippedRanges((*self.spans, span))

    def covers(self, start: int) -> bool:
        """Return whether the step that begins at `start` is skipped."""
        return any(span.start <= start < span.end for span in self.spans)

    def facts(self) -> list[dict[str, Any]]:
        """Return the spans as plain data."""
        return [span.model_dump() for span in self.spans]
