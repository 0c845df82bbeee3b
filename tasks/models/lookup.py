"""Find a model by the names people use, and let it speak."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from storage.object_artifact import open_store
from storage.root import Root
from tasks.runs.records import Runs, trained_stages

if TYPE_CHECKING:
    from llama3.evaluate.evaluate import EvaluationResult
    from llama3.evaluate.suite import LoadedSuite


def model_folder(root: Root, name: str) -> Path:
    """Return the folder of a model: a run's last checkpoint, `FAMILY@ALIAS`, or a folder of weights.

    Raises ValueError naming what exists.
    """
    if any((Path(name) / file).is_file() for file in ("config.json", "params.json")):
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
    """Return the label of the checkpoint that holds `alias`, or None.

    The promotion log decides; the registry is asked for an alias that somebody gave by hand. Raises MlflowException if
    it does not answer then.
    """
    from tasks.promotion.log import ALIASES, label_held

    label = label_held(root, family, alias)
    if label or alias in ALIASES:
        return label or None
    from tasks.tracking.mlflow import Tracker
    from tasks.tracking.registry import Registry

    version = Registry(Tracker(root, family)).holder(alias)
    return None if version is None else str(version.tags["herd.artifact"])


def evaluate_folder(
    folder: Path, asked: LoadedSuite, tables: Path | None, threads: int, device: str
) -> EvaluationResult:
    """Put the model in `folder`, of our format, Hugging Face's or Meta's, to the tasks of `asked`.

    Weights are read as fp32, so that a score measures the model and not the number format of the machine. `device` is
    `cpu`, `cuda` or `auto`. Raises ValueError if the folder holds no Llama 3 with its tokenizer.
    """
    import torch

    from llama3.evaluate.evaluate import evaluate_tasks
    from llama3.export.convert import load_any

    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    network, tokenizer = load_any(folder, torch.float32, place)
    return evaluate_tasks(network, tokenizer, asked, tables, threads=threads, device=place)


@dataclass
class Written:
    """What writing a text took; counted while it is written."""

    tokens: int = 0
    """Steps, the one that chose the end included."""
    first_s: float = 0.0
    """Seconds from the read model to the first token: the reading of the prompt."""
    seconds: float = 0.0
    """Seconds from the read model to the last token."""

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first token; 0 if there was but one."""
        return (self.tokens - 1) / (self.seconds - self.first_s) if self.tokens > 1 else 0.0


def generate_text(
    folder: Path,
    prompt: str,
    count: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    until: Sequence[str] = (),
) -> tuple[Iterator[str], Written]:
    """Return the model's continuation of `prompt` in pieces as they are written, and what that takes.

    On a GPU if there is one. Raises ValueError, before anything is written, if a setting has no meaning or the
    folder's tokenizer is not the model's.
    """
    import torch

    from llama3.evaluate.generate import stream
    from llama3.model.files import load_model
    from llama3.tokens.tokenizer import Tokenizer

    model = load_model(folder, device="cuda" if torch.cuda.is_available() else "cpu")
    pieces = stream(model, Tokenizer.load(folder), prompt, count, temperature, top_p, seed, until)
    written = Written()
    return _counted(pieces, written), written


def _counted(pieces: Iterator[str], written: Written) -> Iterator[str]:
    began = time.perf_counter()
    for piece in pieces:
        written.tokens += 1
        written.seconds = time.perf_counter() - began
        written.first_s = written.first_s or written.seconds
        yield piece
        began = time.perf_counter() - written.seconds  # what the taker of a piece does is not counted
