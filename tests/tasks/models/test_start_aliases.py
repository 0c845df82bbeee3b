"""Models by path or alias, where a recipe starts from one: short forms, and the shape that the weights give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from herd.llama3.export.convert import convert
from herd.llama3.recipe import keys
from herd.llama3.recipe.load import RecipeError, load_recipe
from herd.llama3.recipe.sections import InitFrom, Model
from herd.llama3.tokens.tokenizer import train_tokenizer
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.models import start
from herd.tasks.models.start import alias_label, with_local_models
from herd.tasks.operate.preflight import check_run
from tests.llama3.export.export_samples import TEXTS, herd_folder, shape, tokenizer

CHAT = Path("recipes/quickstart-chat.yaml")


def test_an_alias_that_no_model_holds_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"init_from.path: no model of .* holds quickstart@champion; promote one"):
        with_local_models(Root.parse(tmp_path), load_recipe(CHAT))


def test_a_path_is_no_alias(tmp_path: Path) -> None:
    root = Root.parse(tmp_path)
    (tmp_path / "me@champion").mkdir()
    for name in ("models/8b", "s3://me@host/bucket", "Me@Champion/x", str(tmp_path / "me@champion")):
        assert alias_label(root, name) is None
    plain = load_recipe(Path("recipes/domain-adaptation.yaml"))
    assert with_local_models(root, plain) == plain


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with one model in each format."""
    folder = tmp_path_factory.mktemp("models")
    herd_folder(folder / "herd", shape(rope_theta=10_000.0, max_seq_len=2048), coder=tokenizer())
    for form in ("hf", "meta", "gguf"):
        convert(folder / "herd", "herd", folder / form, form)
    return folder


def written(folder: Path, **changes: Any) -> Path:
    """Write the chat recipe without `model`, with `changes`."""
    plain = yaml.safe_load(Path("recipes/domain-adaptation.yaml").read_text())
    plain.pop("model")
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**plain, **changes}))
    return folder / "recipe.yaml"


@pytest.mark.parametrize("form", ["herd", "hf", "meta", "gguf"])
def test_a_recipe_without_a_model_has_the_shape_of_its_weights(tmp_path: Path, models: Path, form: str) -> None:
    root, asked = Root.parse(tmp_path), written(tmp_path, init_from=str(models / form), stages=STAGES)
    loaded = start.load_recipe(root, asked)
    longest = 8192 if form == "meta" else 2048  # a params.json does not say it
    assert loaded.model == shape(rope_theta=10_000.0, max_seq_len=longest)
    assert with_local_models(root, loaded).init_from == InitFrom(path=str(models / form), format=form)
    changed = start.load_recipe(root, asked, ["model.preset=from_weights", "model.max_seq_len=128"])
    assert changed.model == shape(rope_theta=10_000.0, max_seq_len=128)
    with pytest.raises(RecipeError, match=r"model: is missing"):
        load_recipe(asked)
    with pytest.raises(RecipeError, match=r"preset 'from_weights' needs init_from with weights on this machine"):
        load_recipe(asked, "model.preset=from_weights")


STAGES = [{"name": "main", "until": "1Mi", "seq_len": 128, "batch": "64Ki", "mix": "base"}]


def test_a_model_that_is_given_is_not_read(tmp_path: Path) -> None:
    asked = written(tmp_path, init_from="nowhere", model={"preset": "tiny"}, stages=STAGES)
    assert start.load_recipe(Root.parse(tmp_path), asked).model == Model(preset="tiny")


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        ("nowhere", "init_from.path: nowhere: has neither config.json nor params.json nor a .gguf file"),
        ("me@champion", "init_from.path: no model of .* holds me@champion"),
        ("s3://models/8b", "model: is missing, and s3://models/8b is not on this machine"),
        ({"path": "nowhere", "form": "hf"}, "init_from.form: unknown key; did you mean 'format'"),
    ],
)
def test_a_shape_that_cannot_be_read_is_said(tmp_path: Path, origin: Any, message: str) -> None:
    asked = written(tmp_path, init_from=origin if isinstance(origin, dict) else {"path": origin, "format": "auto"})
    if str(origin).startswith("s3"):
        asked = written(tmp_path, init_from={"path": origin, "format": "hf"})
    with pytest.raises(RecipeError, match=message):
        start.load_recipe(Root.parse(tmp_path), asked)


def test_the_spelling_of_a_start_does_not_change_the_key_of_its_weights(tmp_path: Path, models: Path) -> None:
    root = Root.parse(tmp_path)
    spelled = [
        str(models / "gguf"),
        {"path": str(models / "gguf/model.gguf")},
        {"path": str(models / "gguf"), "format": "gguf"},
    ]
    loaded = [start.load_recipe(root, written(tmp_path, init_from=origin, stages=STAGES)) for origin in spelled]
    parameters = [keys.weights(with_local_models(root, recipe), "the files", 99) for recipe in loaded]
    assert parameters[0] == parameters[1] == parameters[2]
    assert parameters[0]["init_from"] == {"format": "gguf"}


def test_weights_of_another_vocabulary_are_refused_before_any_work(tmp_path: Path, models: Path) -> None:
    train_tokenizer(TEXTS, 256).save(tmp_path)
    chat = {"name": "chat", "kind": "sft", "for": "64Ki", "seq_len": 128, "batch": "64Ki", "mix": "base"}
    asked = written(
        tmp_path,
        init_from=str(models / "gguf"),
        tokenizer={"use": str(tmp_path / "tokenizer.model")},
        sources={"general": [{"uri": "installed", "limit": "100kB"}]},
        mix={"base": {"general": "100%"}},
        stages=[*STAGES, chat],
        conversations=[{"uri": "problems", "limit": 100}],
    )
    root = Root.parse(tmp_path / "root")
    with pytest.raises(RecipeError, match=r"init_from.path: .*/gguf has vocab_size 546, the recipe's tokenizer 512; "):
        check_run(start.load_recipe(root, asked), Cluster(threads=1), root)


def test_weights_and_tokenizer_come_from_a_package(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package := tmp_path / "weights_of_test").mkdir()
    (package / "__init__.py").touch()
    (package / "model.gguf").symlink_to(next((models / "gguf").glob("*.gguf")))
    monkeypatch.syspath_prepend(tmp_path)
    uri = "package://weights_of_test/model.gguf"
    root, asked = Root.parse(tmp_path), written(tmp_path, init_from=uri, tokenizer={"use": uri}, stages=STAGES)
    local = with_local_models(root, start.load_recipe(root, asked))
    assert local.init_from is not None
    assert (local.init_from.path, local.tokenizer.use) == (str(package / "model.gguf"),) * 2
    absent = written(tmp_path, init_from="package://no_such_package/x.gguf", tokenizer={"use": uri}, stages=STAGES)
    with pytest.raises(RecipeError, match=r"init_from.path: package://.*: there is no package 'no_such_package' in"):
        start.load_recipe(root, absent)
