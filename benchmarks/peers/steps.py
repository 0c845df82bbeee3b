"""How the datatrove peers run their steps: LocalPipelineExecutor, one task and one worker, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader, ParquetReader
from datatrove.utils.logging import logger

logger.remove()  # a line per document that a filter drops would be measured too


def run_steps(steps: list[Any], folder: Path, name: str, tasks: int = 1) -> None:
    """Run `steps` as one pipeline of `tasks`, one after another; raises what a step raises."""
    LocalPipelineExecutor(pipeline=steps, tasks=tasks, workers=1, logging_dir=str(folder / "logs" / name)).run()


def reader(source: Path) -> Any:
    """Return the reader of `source`, one Parquet or jsonl file with columns `text` and `id`."""
    folder, name = str(source.parent), source.name
    if source.suffix == ".parquet":
        return ParquetReader(folder, glob_pattern=name, read_metadata=False)
    return JsonlReader(folder, glob_pattern=name)
