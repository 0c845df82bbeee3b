"""The forecast of a report: made-up evaluations, stored as runs store theirs, give back the laws they were made by."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from herd.llama3.evaluate.scores import Score, gold_key, write_scores
from herd.llama3.model.files import CONFIG
from herd.llama3.model.flops import flops_per_token, trained_flops
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.statistics.estimates import normal, proportion
from herd.storage.artifact import Artifact, ArtifactSpec
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.html import render
from herd.tasks.report.run import FILTERS, FURTHER, evaluated_checkpoints, forecast_section
from herd.tasks.runs.records import Runs, StepRecord
from tests.llama3.train.train_samples import VOCAB_SIZE, recipe

KEY = "eval/animals"
CHANCE, QUESTIONS = 0.25, 2000
WIDTHS = (16, 32, 64, 128, 256)
Law = Callable[[float], float]


def nll_at(flops: float) -> float:
    return 1.9 - 0.3 * (math.log10(flops) - 8)


def accuracy_at(nll: float) -> float:
    return CHANCE + (1 - CHANCE) / (1 + math.exp(6 * (nll - 1.2)))


def sized(dim: int, **changes: Any) -> Recipe:
    shape = {"layers": 2, "dim": dim, "ffn": 2 * dim, "heads": 4, "kv_heads": 2, "max_seq_len": 64}
    return recipe(model=shape, **changes)


class Study:
    """Runs under one root, with the artifacts that a forecast reads."""

    def __init__(self, folder: Path) -> None:
        self.root = Root.parse(folder)
        self.runs, self.store = Runs(self.root), open_store(self.root)
        self.dice = np.random.default_rng(5)

    def add(self, asked: Recipe, requests: str = "the same", scatter: float = 0.01) -> str:
        """Add a finished run that was evaluated after both of its stages, and return its name."""
        record = self.runs.begin(asked, "c0de")
        own = scatter * self.dice.standard_normal()
        for span, late in zip(Schedule(asked).spans, (0.03, 0.0), strict=True):
            position = span.end
            nll = nll_at(trained_flops(asked, asked.model, VOCAB_SIZE, position)) + late + own
            checkpoint = self.checkpoint(record.name, asked, span.name, position)
            evaluation = self.evaluation(record.name, checkpoint, self.scores(nll, requests))
            record.steps[span.name] = StepRecord(artifact=checkpoint.label, outcome="created")
            record.steps[f"evaluate-{span.name}"] = StepRecord(artifact=evaluation.label, outcome="created")
        self.runs.save(record)
        return record.name

    def scores(self, nll: float, requests: str) -> dict[str, Score]:
        right = proportion(int(self.dice.binomial(QUESTIONS, accuracy_at(nll))), QUESTIONS)
        gold = gold_key(KEY)
        return {
            KEY: Score.from_estimate(KEY, right, "accuracy", "higher", requests, CHANCE),
            gold: Score.from_estimate(gold, normal(nll, 0.01, QUESTIONS), "nats per byte", "lower", requests, None),
            "eval/bpb": Score.from_estimate("eval/bpb", normal(nll, 0.01, 9), "bits per byte", "lower", requests, None),
        }

    def checkpoint(self, run: str, asked: Recipe, stage: str, position: int) -> Artifact:
        with self.store.staging() as folder:
            (folder / "model").mkdir()
            config = {"model": asked.model.model_dump(mode="json"), "vocab_size": VOCAB_SIZE}
            (folder / "model" / CONFIG).write_text(json.dumps(config))
            design = ArtifactSpec("checkpoint", f"tiny-{stage}", 1, {"run": run}, {})
            return self.store.commit(design, folder, {"end": position}, run, "c0de", 1.0)

    def evaluation(self, run: str, checkpoint: Artifact, scores: dict[str, Score]) -> Artifact:
        with self.store.staging() as folder:
            write_scores(scores, folder)
            design = ArtifactSpec("evaluation", checkpoint.manifest.name, 1, {}, {"checkpoint": checkpoint.key})
            return self.store.commit(design, folder, {}, run, "c0de", 1.0)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(tmp_path / "root")


def test_operations_are_those_of_the_segments_up_to_the_position() -> None:
    asked = sized(32)
    short, long = (flops_per_token(asked.model, VOCAB_SIZE, seq_len).causal for seq_len in (16, 32))
    first, second, third = Schedule(asked).segments
    assert [part.seq_len for part in (first, second, third)] == [16, 16, 32]
    assert trained_flops(asked, asked.model, VOCAB_SIZE, 0) == 0
    assert trained_flops(asked, asked.model, VOCAB_SIZE, first.end // 2) == first.end // 2 * short
    assert trained_flops(asked, asked.model, VOCAB_SIZE, third.end) == second.end * short + third.tokens * long


def test_the_section_forecasts_a_larger_run_and_checks_itself_on_this_one(study: Study) -> None:
    *_, last = [study.add(sized(dim)) for dim in WIDTHS]
    section = forecast_section(study.root, last)
    assert section is not None
    further, check = section.rows
    assert (further.task, further.runs, further.points, further.measured) == ("animals", 5, 10, None)
    assert further.forecast.beyond == pytest.approx(FURTHER)
    true = accuracy_at(nll_at(further.forecast.flops))
    assert further.forecast.accuracy.low <= true <= further.forecast.accuracy.high
    assert check.of == f"{last}, from smaller runs"
    assert (check.runs, check.points) == (4, 8)
    assert check.forecast.beyond > 1
    assert check.measured is not None
    assert check.forecast.accuracy.low <= check.measured <= check.forecast.accuracy.high
    ((title, note, svg),) = section.figures
    assert (title, section.lacking) == ("Forecast: animals", {})
    assert "eval/gold_nll/animals" in note
    assert svg.startswith("<svg")
    assert forecast_section(study.root, last) == section


def test_there_is_no_section_before_there_are_enough_runs(study: Study) -> None:
    for dim in WIDTHS[:3]:
        last = study.add(sized(dim))
        assert forecast_section(study.root, last) is None
    last = study.add(sized(WIDTHS[3]))
    section = forecast_section(study.root, last)
    assert section is not None
    assert len(section.rows) == 1


@pytest.mark.slow
def test_runs_that_were_asked_other_questions_or_began_elsewhere_are_no_points(study: Study) -> None:
    for dim in WIDTHS[:4]:
        last = study.add(sized(dim))
    study.add(sized(8), requests="others")
    study.add(sized(512, init_from={"path": "somewhere"}, tokenizer={"use": "somewhere/tokenizer.model"}))
    section = forecast_section(study.root, last)
    assert section is not None
    assert section.rows[0].runs == 4
    assert {one.run for one in evaluated_checkpoints(study.root)} == {f"tiny-{number}" for number in range(1, 6)}


@pytest.mark.slow
def test_what_was_deleted_is_left_out_and_a_run_not_evaluated_has_none(study: Study) -> None:
    for dim in WIDTHS:
        last = study.add(sized(dim))
    study.store.delete(study.runs.find("tiny-1").steps["evaluate-main"].artifact)
    section = forecast_section(study.root, last)
    assert section is not None
    assert section.rows[0].points == 9
    fresh = study.runs.begin(sized(64), "c0de").name
    assert forecast_section(study.root, fresh) is None
    with pytest.raises(ValueError, match="run 'nobody' does not exist"):
        forecast_section(study.root, "nobody")


@pytest.mark.slow
def test_a_rerun_that_reuses_an_evaluation_adds_no_point(study: Study) -> None:
    for dim in WIDTHS:
        last = study.add(sized(dim))
    again = study.runs.begin(sized(WIDTHS[-1]), "c0de", rerun_of=last)
    again.steps = study.runs.find(last).steps
    study.runs.save(again)
    section, before = forecast_section(study.root, again.name), forecast_section(study.root, last)
    assert section is not None
    assert section == before


def test_the_section_is_written_as_a_table_with_what_lacks(study: Study) -> None:
    for dim in WIDTHS:
        last = study.add(sized(dim))
    section = forecast_section(study.root, last)
    assert section is not None
    section = dataclasses.replace(section, lacking={"eval/plants": "too few <runs>"})
    rows = {name: render(name, FILTERS, forecast=section) for name in ("forecast.html", "forecast.md")}
    further, check = section.rows
    assert f"{further.forecast.accuracy.value:.4g}" in rows["forecast.html"]
    assert "too few &lt;runs&gt;" in rows["forecast.html"]
    assert rows["forecast.html"].count("<svg") == 1
    assert f"| {check.of} |" in rows["forecast.md"]
    assert "\n\neval/plants: too few <runs>\n" in rows["forecast.md"]
