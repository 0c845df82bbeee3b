"""Comparisons of evaluation folders: which samples are paired, and the means over domains and tasks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from herd.llama3.evaluate.compare import compare
from herd.llama3.evaluate.scores import SAMPLES_FILE, TASKS_FILE, Better, Sample, Score, write_scores
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schema import Recipe
from herd.llama3.statistics.estimates import mean, normal, ratio
from herd.llama3.statistics.significance import DOCUMENTS, PAIRED, QUESTIONS, mcnemar


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(Path("recipes/quickstart.yaml"), [])


@dataclass
class Folder:
    """An evaluation to be written."""

    samples: list[Sample] = field(default_factory=list)
    tasks: list[dict[str, object]] = field(default_factory=list)
    requests: str = "asked"
    baselines: str = "core 1"

    def bits(self, key: str, bits: Sequence[float], sizes: Sequence[float], first: int = 0) -> Folder:
        rows = enumerate(zip(bits, sizes, strict=True), first)
        self.samples += [Sample(key, f"{place}", bit, size, 1, None, None, "") for place, (bit, size) in rows]
        return self

    def answers(
        self, key: str, right: Sequence[float], groups: Sequence[str] = (), baseline: float | None = None
    ) -> Folder:
        named = groups or [""] * len(right)
        self.samples += [
            Sample(key, f"{place}", value, 1.0, 1, 0, 0, group)
            for place, (value, group) in enumerate(zip(right, named, strict=True))
        ]
        average = "groups" if groups else "items"
        self.tasks.append({"key": key, "kind": "choice", "average": average, "baseline": baseline})
        return self

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        keys = {sample.key for sample in self.samples}
        scores = {key: self._score(key) for key in keys}
        write_scores(scores, folder)
        pq.write_table(pa.Table.from_pylist([dataclasses.asdict(s) for s in self.samples]), folder / SAMPLES_FILE)
        (folder / TASKS_FILE).write_text(json.dumps({"tasks": self.tasks, "baselines": self.baselines}))
        return folder

    def _score(self, key: str) -> Score:
        mine = [sample for sample in self.samples if sample.key == key]
        better: Better = "lower" if "bpb" in key else "higher"
        value = ratio([one.numerator for one in mine], [one.denominator for one in mine]).value
        unit = "bits per byte" if better == "lower" else "accuracy"
        if "gold" in key:
            unit, better = "nats", "lower"
        return Score.from_estimate(key, normal(value, 0.1, len(mine)), unit, better, self.requests, None)


def test_bits_per_byte_are_paired_and_averaged_by_the_mix(recipe: Recipe, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    ours, theirs = Folder(), Folder()
    for domain, change in (("general", 0.02), ("code", -0.05)):
        sizes = random.integers(200, 900, 60).astype(float)
        champion = sizes * (2.5 + 0.4 * random.standard_normal(60))
        candidate = champion + sizes * (change + 0.02 * random.standard_normal(60))
        for key, per in (("eval/bpb", sizes), ("eval/bpb_macro", np.ones(60))):
            scale = per / sizes
            ours.bits(f"{key}/{domain}", (candidate * scale).tolist(), per.tolist())
            theirs.bits(f"{key}/{domain}", (champion * scale).tolist(), per.tolist())
    found = compare(recipe, ours.write(tmp_path / "ours"), theirs.write(tmp_path / "theirs"))
    assert sorted(found) == sorted(
        f"{key}{part}" for key in ("eval/bpb", "eval/bpb_macro") for part in ("", "/code", "/general")
    )
    assert {one.method for one in found.values()} == {DOCUMENTS}
    assert {one.p_holm for one in found.values()} == {None}
    general, code, both = (found[f"eval/bpb{part}"] for part in ("/general", "/code", ""))
    assert 0 < general.low < 0.02 < general.high
    assert code.high < 0
    assert (general.n, code.n, both.n) == (60, 60, 120)
    shares = recipe.mix[recipe.stages[0].mix]
    weights = [float(shares[domain]) for domain in ("general", "code")]
    expected = (weights[0] * general.value + weights[1] * code.value) / sum(weights)
    assert both.value == pytest.approx(expected)
    assert both.low < expected < both.high
    assert both.high - both.low < general.high - general.low


def test_answers_are_tested_by_mcnemar_and_corrected_together(recipe: Recipe, tmp_path: Path) -> None:
    base = [1.0, 0.0] * 50
    worse = [0.0] * 20 + base[20:]
    ours = Folder().answers("eval/a", worse, baseline=0.5).answers("eval/b", base, baseline=0.25)
    theirs = Folder().answers("eval/a", base, baseline=0.5).answers("eval/b", base, baseline=0.25)
    found = compare(recipe, ours.write(tmp_path / "ours"), theirs.write(tmp_path / "theirs"))
    assert sorted(found) == ["eval/a", "eval/b", "eval/core"]
    assert (found["eval/a"].value, found["eval/a"].method, found["eval/a"].p) == (-0.1, QUESTIONS, mcnemar(0, 10))
    assert (found["eval/b"].value, found["eval/b"].p) == (0.0, 1.0)
    assert found["eval/b"].low < 0 < found["eval/b"].high, "100 equal answers are no proof"
    assert found["eval/core"].value == pytest.approx(-0.1 / 0.5 / 2)
    assert found["eval/core"].method == PAIRED
    ranked = sorted(found, key=lambda key: found[key].p)
    first = found[ranked[0]]
    assert first.p_holm == pytest.approx(3 * first.p)


def test_a_mean_of_groups_is_compared_as_one(recipe: Recipe, tmp_path: Path) -> None:
    groups = ["law"] * 90 + ["art"] * 10
    base = [1.0, 0.0] * 50
    change = [0.0] * 95 + [1.0] * 5
    better = [max(value, new) for value, new in zip(base, change, strict=True)]
    ours, theirs = Folder().answers("eval/m", better, groups), Folder().answers("eval/m", base, groups)
    (found,) = compare(recipe, ours.write(tmp_path / "ours"), theirs.write(tmp_path / "theirs")).values()
    assert found.value == pytest.approx(mean(better, groups).value - mean(base, groups).value)
    assert found.method == PAIRED
    assert found.value == pytest.approx((0 / 90 + 3 / 10) / 2)


def test_shares_of_several_answers_have_no_mcnemar(recipe: Recipe, tmp_path: Path) -> None:
    ours, theirs = (
        Folder().answers("eval/code", [0.2, 0.4, 1.0] * 9),
        Folder().answers("eval/code", [0.0, 0.4, 1.0] * 9),
    )
    (found,) = compare(recipe, ours.write(tmp_path / "ours"), theirs.write(tmp_path / "theirs")).values()
    assert found.method == PAIRED
    assert found.value == pytest.approx(0.2 / 3)
    assert found.p < 0.05


def test_the_loss_of_answers_has_a_normal_interval_and_is_better_low(recipe: Recipe, tmp_path: Path) -> None:
    random = np.random.default_rng(6)
    champion = 3 + random.standard_normal(200)
    candidate = champion - 0.1 + 0.2 * random.standard_normal(200)
    ours = Folder().bits("eval/gold_nll/a", candidate.tolist(), [1.0] * 200)
    theirs = Folder().bits("eval/gold_nll/a", champion.tolist(), [1.0] * 200)
    (found,) = compare(recipe, ours.write(tmp_path / "ours"), theirs.write(tmp_path / "theirs")).values()
    assert (found.method, found.better, found.p_holm) == (PAIRED, "lower", None)
    assert found.low < -0.1 < found.high < 0
    assert found.p < 0.001


def test_only_common_texts_count_and_other_words_are_not_compared(recipe: Recipe, tmp_path: Path) -> None:
    ours = Folder(requests="new").bits("eval/bpb/math", [10.0] * 8, [5.0] * 8).answers("eval/a", [1.0] * 8)
    theirs = (
        Folder(requests="old")
        .bits("eval/bpb/math", [11.0] * 8, [5.0] * 7 + [6.0], first=2)
        .answers("eval/a", [0.0] * 8)
    )
    ours.bits("eval/bpb_macro/math", [2.0] * 8, [1.0] * 8)
    theirs.bits("eval/bpb_macro/math", [2.2] * 8, [1.0] * 8)
    found = compare(recipe, ours.write(tmp_path / "ours"), theirs.write(tmp_path / "theirs"))
    assert sorted(found) == ["eval/bpb", "eval/bpb/math"]
    assert found["eval/bpb/math"].n == 6
    assert found["eval/bpb/math"].value == pytest.approx(-0.2)


def test_another_table_of_baselines_gives_no_core(recipe: Recipe, tmp_path: Path) -> None:
    ours = Folder(baselines="core 2").answers("eval/a", [1.0, 0.0] * 9, baseline=0.5)
    theirs = Folder(baselines="core 1").answers("eval/a", [1.0, 0.0] * 9, baseline=0.25)
    found = compare(recipe, ours.write(tmp_path / "ours"), theirs.write(tmp_path / "theirs"))
    assert sorted(found) == ["eval/a"]


def test_a_folder_without_an_evaluation_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no scores"):
        compare(recipe, tmp_path, tmp_path)


def test_documents_of_one_site_and_questions_on_one_passage_are_one(recipe: Recipe, tmp_path: Path) -> None:
    """Ten sites of eight documents each; the candidate is better or worse on whole sites."""
    random = np.random.default_rng(3)
    sizes = random.integers(200, 900, 80).astype(float)
    site = np.repeat(np.arange(10), 8)
    champion = 3 * sizes
    candidate = champion * (1 + 0.02 * random.standard_normal(10)[site])
    right = np.where(site == 6, 1.0, np.where(np.isin(site, [1, 4]), 0.0, random.random(80) < 0.5))
    flipped = np.where(np.isin(site, [1, 4, 6]), 1 - right, right)
    folders = {}
    for name, bits, answers in (("candidate", candidate, flipped), ("champion", champion, right)):
        folder = Folder().bits("eval/bpb/math", bits, sizes).answers("eval/copa", answers)
        folders[name] = folder.write(tmp_path / f"{name}-alone")
        named = [f"site-{site[int(sample.id)]}" for sample in folder.samples]
        pairs = zip(folder.samples, named, strict=True)
        folder.samples = [dataclasses.replace(sample, cluster=cluster) for sample, cluster in pairs]
        folders[f"{name}-sites"] = folder.write(tmp_path / name)
    alone = compare(recipe, folders["candidate"], folders["champion"])
    sites = compare(recipe, folders["candidate-sites"], folders["champion-sites"])
    for key in ("eval/bpb", "eval/bpb/math", "eval/copa"):
        assert (alone[key].clusters, alone[key].design) == (0, 1.0)
        assert sites[key].clusters == 10
        assert sites[key].design > 3
        assert sites[key].value == alone[key].value
        assert sites[key].high - sites[key].low > 1.7 * (alone[key].high - alone[key].low)
        assert sites[key].p > alone[key].p
