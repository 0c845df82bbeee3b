"""Find a model by the names people use, and let it speak."""

from __future__ import annotations

from pathlib import Path

from storage.remote_store import open_store
from storage.root import Root
from tasks.runs import Runs, trained_stages


def model_folder(root: Root, name: str) -> Path:
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
    trained = trained_stages(recipe, record)
    if not trained:
        raise ValueError(f"run {name!r} has not finished a training stage; wait for it or choose another")
    return open_store(root).at(record.steps[trained[-1].name].artifact).part("model")


def _registered(root: Root, family: str, alias: str) -> Path:
    label = label_of_alias(root, family, alias)
    if label is None:
        raise ValueError(f"model {family}@{alias}: no version holds that alias; promote one, or name a run")
    return open_store(root).at(label).part("model")


def label_of_alias(root: Root, family: str, alias: str) -> str | None:
    """Return the label of the checkpoint that holds `alias` in the registry, or None.

    Raises MlflowException if MLflow does not answer.
    """
    from tasks.registry import Registry
    from tasks.tracking import Tracker

    version = Registry(Tracker(root, family)).holder(alias)
    return None if version is None else str(version.tags["herd.artifact"])


def generate_text(folder: Path, prompt: str, count: int, temperature: float, seed: int) -> str:
    """Return the model's continuation of `prompt`, at most `count` tokens."""
    from llama3.evaluate.generate import generate
    from llama3.model.files import load_model
    from llama3.tokens.tokenizer import Tokenizer

    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    return generate(model, tokenizer, prompt, count, temperature=temperature, seed=seed)
