"""A model's card from a run: shares are counted from the stream, scores are this checkpoint's, the curve is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from herd.llama3.recipe.base import DOMAINS
from herd.llama3.tokens.inspect import inspect
from herd.tasks.models.card import _short_card, data_mix_digest, make_card
from herd.tasks.models.export import export_model
from tests.llama3.train.train_samples import recipe
from tests.tasks.trained_run import SCORE, TrainedRun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return TrainedRun(tmp_path_factory.mktemp("root"))


def test_the_card_counts_what_was_trained_on(run: TrainedRun, tmp_path: Path) -> None:
    card = make_card(run.root, "tiny-1", run.model, tmp_path, "hf", "bf16", "")
    training = card.training
    assert training is not None
    assert (training.run, training.tokens) == ("tiny-1", 20 * 256)
    shards = run.store.load(run.record.steps["tokenize"].artifact).path
    seen = inspect(shards, run.recipe, 0, 20 * 256)
    assert {line.domain: line.tokens for line in training.mix} == {
        domain: count.tokens for domain, count in seen.domains.items()
    }
    assert sum(line.tokens for line in training.mix) == sum(line.tokens for line in training.licenses) == 20 * 256
    assert {line.domain: line.planned for line in training.mix} == pytest.approx(
        {"general": 0.5, "math": 0.25, "code": 0.17, "multilingual": 0.08}
    )
    assert [line.name for line in training.stages] == ["main", "anneal"]
    assert training.scores == {SCORE.key: SCORE}
    assert (tmp_path / training.curve).read_bytes().startswith(b"\x89PNG")
    assert card.digests["code commit"] == "c0de"
    assert card.digests["recipe"] == run.record.recipe_digest


def test_an_earlier_stage_is_described_up_to_its_end(run: TrainedRun, tmp_path: Path) -> None:
    main = run.store.load(run.record.steps["main"].artifact)
    card = make_card(run.root, str(main.path_of("model")), main.path_of("model"), tmp_path, "hf", "bf16", "")
    assert card.training is not None
    assert (card.training.tokens, [line.name for line in card.training.stages]) == (12 * 256, ["main"])
    assert card.training.scores == {}


def test_a_card_does_without_scores_that_were_deleted(tmp_path: Path) -> None:
    run = TrainedRun(tmp_path / "root")
    run.store.delete(run.record.steps["evaluate-anneal"].artifact)
    card = make_card(run.root, "tiny-1", run.model, tmp_path, "hf", "bf16", "")
    assert card.training is not None
    assert (card.training.tokens, card.training.scores) == (20 * 256, {})


def test_mlflow_s_card_leaves_out_what_belongs_to_an_exported_folder(run: TrainedRun, tmp_path: Path) -> None:
    text = _short_card(run.root, "tiny-1", run.checkpoint, tmp_path)
    assert text.startswith("No license was given for the weights.")
    assert all(words in text for words in ("## Model", "## Data", "| bpb | 2.500 |"))
    assert not any(words in text for words in ("training-loss.png", "SHA256SUMS", "This folder", "---\n"))


def test_a_folder_that_is_not_of_the_root_has_no_history(run: TrainedRun, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in run.model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    card = make_card(run.root, str(copy), copy, tmp_path, "hf", "bf16", "mit")
    assert (card.name, card.training, dict(card.digests)) == ("copy", None, {})


def test_the_mix_digest_follows_what_decides_the_tokens() -> None:
    base, end = data_mix_digest(recipe(), "k", 5120), 20 * 256
    assert end == 5120
    assert data_mix_digest(recipe(), "k", end) == base
    shares = {"base": {"general": "40%", "math": "35%", "code": "17%", "multilingual": "8%"}}
    different = {
        data_mix_digest(recipe(), "other", end),
        data_mix_digest(recipe(seed=4), "k", end),
        data_mix_digest(recipe(mix=shares), "k", end),
        data_mix_digest(recipe(), "k", 12 * 256),
    }
    assert len(different - {base}) == 4
    sources = {**{domain: [{"uri": "x"}] for domain in DOMAINS}, "math": [{"uri": "x"}, {"uri": "y", "name": "new"}]}
    main, anneal = recipe().model_dump(mode="json", by_alias=True)["stages"]
    told = {
        data_mix_digest(recipe(sources=sources, stages=[main, {**anneal, **more}]), "k", end)
        for more in (
            {},
            {"data_offset": 1},
            {"data_offset": 2},
            {"extra_sources": {"new": "20%"}},
            {"extra_sources": {"new": "30%"}},
        )
    }
    assert len(told) == 5
    assert data_mix_digest(recipe(z_loss=1e-4), "k", end) == base


@pytest.mark.parametrize("form", ["hf", "meta", "mlflow"])
def test_a_run_is_exported_with_its_card(run: TrainedRun, tmp_path: Path, form: str) -> None:
    target = tmp_path / "out"
    export_model(run.root, "tiny-1", target, form, license="mit")  # type: ignore[arg-type]
    assert "license: mit" in (target / "README.md").read_text()
    manifest = json.loads((target / "manifest.json").read_text())
    assert (manifest["run"], manifest["format"], manifest["tokens"]) == ("tiny-1", form, 5120)
    assert str(run.root.local) not in (target / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ValueError, match="out: exists already; name a new folder"):
        export_model(run.root, "tiny-1", target, form)  # type: ignore[arg-type]


def test_an_object_store_is_no_target(run: TrainedRun) -> None:
    with pytest.raises(ValueError, match=r"s3:/bucket/x: is not a local folder; export to one"):
        export_model(run.root, "tiny-1", Path("s3://bucket/x"))
