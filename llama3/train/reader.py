"""This process's sequences of every step, read by a thread one step ahead.

Reading is a hundredth of a step, and hidden; the thread asks in the order of positions, so nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llama3.recipe.schedule import StageSpan
from llama3.tokens.batch import Batch, Batches


@dataclass(frozen=True)
class Step:
    """One optimizer step: `batch` tokens from `start` on, in sequences of `seq`."""

    start: int
    seq: int
    batch: int

    @property
    def end(self) -> int:
        return self.start + self.batch


def steps_from(span: StageSpan, position: int) -> Iterator[Step]:
    """Yield the steps of a stage from `position` on. Raises ValueError if no step starts there."""
    expected = position
    for segment in span.segments:
        done = max(0, position - segment.start)
        if done < segment.tokens and done % segment.batch:
            raise ValueError(
                f"stage {span.name}: position {position} is inside a step of {segment.batch} tokens that starts at "
                f"{position - done % segment.batch}; the batch was another when it was saved: remove the checkpoints"
            )
        for start in range(segment.start + done, segment.end, segment.batch):
            assert start == expected
            expected = start + segment.batch
            yield Step(start, segment.seq, segment.batch)


def read_ahead(batches: Batches, steps: Iterator[Step], rank: int, size: int) -> Iterator[tuple[Step, Batch]]:
    """Yield each step with the sequences of process `rank` of `size`: equal, contiguous shares of the batch."""

    def read(step: Step) -> tuple[Step, Batch]:
        count = step.batch // step.seq // size
        return step, batches.sequences(step.start, step.seq, rank * count, count)

    with ThreadPoolExecutor(1, thread_name_prefix="reader") as pool:
        ahead = None
        for step in steps:
            ready, ahead = ahead, pool.submit(read, step)
            if ready is not None:
                yield ready.result()
        if ahead is not None:
            yield ahead.result()
