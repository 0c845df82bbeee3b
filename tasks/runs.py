"""The record of runs: names people can read, what each run made, and how it stands.

A record is a small JSON file in the run's folder, rewritten atomically at every change. It is the truth that reports,
reruns and MLflow are made from; nothing here needs a server.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from llama3.recipe.load import digest, load_recipe, resolved, to_yaml
from llama3.recipe.schema import Recipe
from storage.filesystem import write_atomic

State = Literal["running", "finished", "failed", "interrupted"]


class StepRecord(BaseModel):
    """One step of a run: which artifact it stands on and where that came from."""

    artifact: str
    outcome: str
    """`made`, `reused`, or `resumed at 1.2B`."""
    why: str = ""
    """For a step that was made: what was new about it."""
    seconds: float = 0.0
    mlflow_run: str = ""


class RunRecord(BaseModel):
    name: str
    family: str
    recipe_digest: str
    state: State = "running"
    attempts: int = 1
    started: str
    ended: str = ""
    code: str
    rerun_of: str = ""
    redo_from: str = ""
    """Step from which this run makes everything anew, whatever exists."""
    steps: dict[str, StepRecord] = {}
    verdict: str = ""
    """`promoted`, `refused`, or empty while there is none."""
    error: str = ""
    mlflow_run: str = ""
    mlflow_experiment: str = ""
    prefect_run: str = ""
    peak_memory_gib: float = 0.0


class Runs:
    """The runs under one root."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "runs"

    def place(self, name: str) -> Path:
        return self.folder / name

    def all(self) -> list[RunRecord]:
        """Return every run, oldest first."""
        records = [RunRecord.model_validate_json(path.read_text()) for path in self.folder.glob("*/run.json")]
        return sorted(records, key=lambda record: record.started)

    def find(self, name: str) -> RunRecord:
        """Return the run called `name`. Raises ValueError naming the runs that exist."""
        path = self.place(name) / "run.json"
        if not path.is_file():
            known = ", ".join(record.name for record in self.all()) or "none yet; start one with: herd run RECIPE"
            raise ValueError(f"run {name!r} does not exist under {self.folder.parent}; runs: {known}")
        return RunRecord.model_validate_json(path.read_text())

    def recipe(self, name: str) -> Recipe:
        """Return the resolved recipe that run `name` was started with."""
        return load_recipe(self.place(self.find(name).name) / "recipe.yaml")

    def save(self, record: RunRecord) -> None:
        write_atomic(self.place(record.name) / "run.json", record.model_dump_json(indent=1))

    def unfinished(self, recipe: Recipe) -> RunRecord | None:
        """Return the newest run of exactly this recipe if it did not finish: it is continued, not begun again."""
        same = [record for record in self.all() if record.recipe_digest == digest(resolved(recipe))]
        return same[-1] if same and same[-1].state != "finished" else None

    def begin(self, recipe: Recipe, code: str, rerun_of: str = "", redo_from: str = "") -> RunRecord:
        """Create the next run of the recipe's family (`quickstart-7`) and write its resolved recipe."""
        record = RunRecord(
            name=self._next_name(recipe.name),
            family=recipe.name,
            recipe_digest=digest(resolved(recipe)),
            started=now(),
            code=code,
            rerun_of=rerun_of,
            redo_from=redo_from,
        )
        write_atomic(self.place(record.name) / "recipe.yaml", to_yaml(recipe))
        self.save(record)
        return record

    def _next_name(self, family: str) -> str:
        pattern = re.compile(rf"{re.escape(family)}-(\d+)")
        taken = [int(match[1]) for path in self.folder.glob("*/") if (match := pattern.fullmatch(path.name))]
        return f"{family}-{max(taken, default=0) + 1}"


def now() -> str:
    """Return the time as ISO 8601 text in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
