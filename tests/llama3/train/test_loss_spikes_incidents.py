"""What is written down of a bad step: its numbers, what follows, and every document of its batch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.stream import TokenStream
from herd.llama3.train.callbacks import StepDecision, StepResult
from herd.llama3.train.data_loader import Step, steps_from
from herd.llama3.train.journal import SkippedRange
from herd.llama3.train.loss_spikes import incident_line, write_incident
from tests.llama3.train.train_samples import STEP, recipe, write_tokens


@dataclass(frozen=True)
class Found(StepResult):
    grad_norm: float = 2.5
    score: float = 9.0
    skipped: bool = True


@pytest.fixture(scope="module")
def asked() -> Recipe:
    return recipe()


@pytest.fixture(scope="module")
def tokens(asked: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"), asked)


def fifth(asked: Recipe) -> Step:
    return list(steps_from(Schedule(asked).span("main"), 0))[4]


def test_every_document_of_the_batch_is_named(asked: Recipe, tokens: Path, tmp_path: Path) -> None:
    step = fifth(asked)
    path = write_incident(tmp_path, tokens, asked, step, Found(17.5), StepDecision("skipped", "a reason"))
    assert path == tmp_path / "incidents" / f"{4 * STEP:018}.json"
    incident = json.loads(path.read_text())
    numbers = [incident[key] for key in ("position", "end", "loss", "grad_norm", "score", "outcome", "reason", "skip")]
    assert numbers == [4 * STEP, 5 * STEP, 17.5, 2.5, 9.0, "skipped", "a reason", None]
    uses = TokenStream(tokens, asked).documents(4 * STEP, 5 * STEP)
    assert incident["documents"] == [use._asdict() for use in uses]
    assert incident["complete"]
    stretches = {use.document: 0 for use in uses}
    for use in uses:
        stretches[use.document] += use.last - use.first + 1
    assert sum(stretches.values()) == STEP
    assert sum(count["tokens"] for count in incident["sources"].values()) == STEP
    assert sum(count["documents"] for count in incident["domains"].values()) >= len(stretches)


def test_a_number_that_is_none_is_a_word(asked: Recipe, tokens: Path, tmp_path: Path) -> None:
    step = fifth(asked)
    for loss, word in ((float("nan"), "nan"), (float("-inf"), "-inf")):
        path = write_incident(tmp_path, tokens, asked, step, Found(loss), StepDecision("stop", ""))
        assert json.loads(path.read_text())["loss"] == word
    assert len(list(path.parent.iterdir())) == 1  # the same step again is the same file


def test_the_line_says_what_follows_and_names_the_file(asked: Recipe) -> None:
    step, file = fifth(asked), Path("work/incidents/1.json")
    lines = [
        incident_line(step, StepDecision("skipped", "why"), file),
        incident_line(step, StepDecision("stop", "why"), file),
    ]
    skip = SkippedRange(start=768, end=1536, spike=1024, reason="why")
    lines.append(incident_line(step, StepDecision("roll back", "why", skip), file))
    assert lines == [
        "position 1024: why; its batch changed nothing. Documents of the batch: work/incidents/1.json",
        "position 1024: why. Nothing of this step is kept. Look at its documents, or lower lr.peak. "
        "Documents of the batch: work/incidents/1.json",
        "position 1024: why; back to before 768, without the batches up to 1536. "
        "Documents of the batch: work/incidents/1.json",
    ]
