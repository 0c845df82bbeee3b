"""The record of a study: its question, its state and its verdict, in the folder `studies/NAME`.

`study.yaml` and `base.yaml` contain the whole question, the record the state. Runs are matched to variants by the
digest of their recipe, not stored. Another question under the same name replaces the record; the runs of the first
remain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from pydantic import BaseModel

from herd.llama3.recipe.schema import Recipe
from herd.llama3.studies.expand import ExpandedStudy, VariantRun, load_study
from herd.llama3.studies.results import StudyVerdict
from herd.storage.fenced import VERSIONS, DamagedRecord, FencedRecords
from herd.storage.filesystem import write_atomic
from herd.storage.lease import LeaseHeld, lease_holders
from herd.storage.root import Root
from herd.tasks.runs.records import RunRecord, Runs, State, now, read_records

FOLDER, QUESTION, BASE, PAGE = "studies", "study.yaml", "base.yaml", "report.html"


class StudyRecord(BaseModel):
    """The state of a study."""

    name: str
    digest: str
    kind: str
    question: str = ""
    recipe: str
    """The base recipe's file, as given to the study."""
    state: State = "running"
    error: str = ""
    started: str
    ended: str = ""
    seconds: float = 0.0
    """From the first variant to the verdict, over all attempts."""
    variant_seconds: float = 0.0
    """Of these, seconds inside the flows of its variants."""
    code: str
    machine: str = ""
    command: str = ""
    mlflow_run: str = ""
    mlflow_experiment: str = ""
    prefect_run: str = ""
    verdict: StudyVerdict | None = None
    recipes: list[str] = []
    """Digests of the recipes of its runs: retention keeps their artifacts for the report."""

    def abandoned(self) -> StudyRecord:
        """Return the record for the case that no process works on the study: `running` becomes `interrupted`."""
        if self.state != "running":
            return self
        message = f"its process is gone; go on with: {self.command}"
        return self.model_copy(update={"state": "interrupted", "error": message, "ended": self.ended or now()})


class Studies:
    """The studies under one root."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self._records = FencedRecords(root, FOLDER)

    def folder(self, name: str) -> Path:
        """Return the study's local folder. Raises ValueError for a name that leaves it."""
        return self.root.file(FOLDER, name)

    def names(self) -> list[str]:
        return self.root.names(FOLDER)

    def find(self, name: str) -> StudyRecord:
        """Return the record of a study. Raises ValueError with the existing names."""
        text = self._records.read(name)
        if text is None:
            known = ", ".join(self.names()) or "none yet; start one with: herd study run ramp-cpu"
            raise ValueError(f"study {name!r} does not exist under {self.root.uri}; studies: {known}")
        return self._parse(name, text)

    def known(self, name: str) -> StudyRecord | None:
        """Return the record of a study, if there is one. Raises DamagedRecord."""
        text = self._records.read(name)
        return self._parse(name, text) if text else None

    def _parse(self, name: str, text: bytes) -> StudyRecord:
        try:
            return StudyRecord.model_validate_json(text)
        except ValueError as error:
            raise DamagedRecord(
                f"study {name}: {self.root.join(FOLDER, name, VERSIONS)} is not a valid record "
                f"({' '.join(str(error).split())[:200]}); delete it; the next run of the study writes it again"
            ) from None

    def all(self, strict: bool = False) -> list[StudyRecord]:
        """Return every study, by name; a damaged record is left out with a warning, or raises if `strict`."""
        return read_records(self.known, self.names(), strict)

    def standing(self) -> list[StudyRecord]:
        """Return every study, with `running` corrected to `interrupted` where no process works on it."""
        records = self.all()
        running = [f"{FOLDER}/{record.name}" for record in records if record.state == "running"]
        held = lease_holders(self.root, running) if running else {}
        return [record if f"{FOLDER}/{record.name}" in held else record.abandoned() for record in records]

    @contextmanager
    def alone(self, name: str, wait: Callable[[str], None] | None = None) -> Iterator[None]:
        """Hold the lease of a study until the block ends.

        With `wait`, which is called with the name of another holder, wait for that holder; else raise LeaseHeld.
        """
        try:
            with self._records.alone(name, name, wait):
                yield
        except LeaseHeld as error:
            raise LeaseHeld(f"study {name}: another process works on it ({error}); wait, or stop that one") from error

    def expanded(self, name: str) -> ExpandedStudy:
        """Return the recorded question. Raises ValueError if there is no such study."""
        self.find(name)
        for file in (QUESTION, BASE):
            if not self.root.is_local:
                write_atomic(self.folder(name) / file, self.root.read(FOLDER, name, file) or b"")
        return load_study(self.folder(name) / QUESTION)

    def save(self, record: StudyRecord) -> None:
        """Write a record. Raises LeaseHeld if another process works on the study, or LeaseLost if one took it over."""
        self._records.write(record.name, record.model_dump_json(indent=1))

    def ask(self, expanded: ExpandedStudy) -> None:
        """Write the question and its base recipe, so that it can be run again without the original files."""
        plain = expanded.study.model_dump(mode="json", by_alias=True, exclude_unset=True)
        for file, data in {QUESTION: {**plain, "recipe": BASE}, BASE: expanded.data}.items():
            text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
            self.root.write(text, FOLDER, expanded.study.name, file)

    def publish(self, name: str, file: str, text: str) -> Path:
        """Write a page of the study, and return its local path."""
        self.root.write(text, FOLDER, name, file)
        path = self.folder(name) / file
        if not self.root.is_local:
            write_atomic(path, text)
        return path


def runs_of(runs: Runs, expanded: ExpandedStudy, variants: Sequence[VariantRun]) -> dict[str, RunRecord]:
    """Return the newest finished run of each variant's recipe, by the name of the variant's run."""
    by_digest = {variant.digest: variant for variant in variants}
    answers = {
        record.recipe_digest: record
        for record in runs.family(expanded.study.name)
        if record.recipe_digest in by_digest and answers_for(record, by_digest[record.recipe_digest].recipe)
    }
    return {variant.name: answers[variant.digest] for variant in variants if variant.digest in answers}


def answers_for(record: RunRecord, recipe: Recipe) -> bool:
    """Return whether a run of `recipe` finished and evaluated its last stage: it may have been stopped earlier."""
    return record.state == "finished" and f"evaluate-{recipe.stages[-1].name}" in record.steps
