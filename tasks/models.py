"""Find a model by the names people use, and let it speak."""

from __future__ import annotations

from pathlib import Path

from llama3.recipe.schedule import Schedule
from storage.artifact import Store
from tasks.runs import Runs


def model_folder(root: Path, name: str) -> Path:
    """Return the folder of a model: a run's last checkpoint, `FAMILY@ALIAS`, or a folder with config.json.

    Raises ValueError naming what exists.
    """
    if (Path(name) / "config.json").is_file():
        return Path(name)
    family, separator, alias = name.partition("@")
    if separator:
        return _registered(root, family, alias)
    runs = Runs(root)
    record, recipe = runs.find(name), runs.recipe(name)
    trained = [span.name for span in Schedule(recipe).trained if span.name in record.steps]
    if not trained:
        raise ValueError(f"run {name!r} has not finished a training stage; wait for it or choose another")
    return Store(root).at(record.steps[trained[-1]].artifact).path / "model"


def _registered(root: Path, family: str, alias: str) -> Path:
    from tasks.registry import Registry
    from tasks.tracking import Tracker

    version = Registry(Tracker(root, family)).holder(alias)
    if version is None:
        raise ValueError(f"model {family}@{alias}: no version holds that alias; promote one, or name a run")
    return Store(root).at(version.tags["herd.artifact"]).path / "model"


def generate_text(folder: Path, prompt: str, count: int, temperature: float, seed: int) -> str:
    """Return the model's continuation of `prompt`, at most `count` tokens."""
    from llama3.evaluate.generate import generate
    from llama3.model.files import load_model
    from llama3.tokens.tokenizer import Tokenizer

    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    return generate(model, tokenizer, prompt, count, temperature=temperature, seed=seed)
