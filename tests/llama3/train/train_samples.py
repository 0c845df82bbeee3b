"""A tiny recipe, its token shards, and what a test runs in a process of its own."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.load import load_recipe, to_yaml
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.mix import mix_datasets
from herd.llama3.tokens.shards import write_index, write_shard
from herd.llama3.train.job import TrainJob
from herd.llama3.train.journal import Record, read_journal
from tests.llama3.tokens.token_samples import documents

VOCAB_SIZE, BEGIN, END = 512, 256, 257
STEP = 256
"""Tokens of a step."""


def recipe(**changes: Any) -> Recipe:
    """Two stages of 12 and 8 steps, the second with two sequence lengths, linear decay and an average."""
    shares = {"general": "50%", "math": "25%", "code": "17%", "multilingual": "8%"}
    data: dict[str, Any] = {
        "name": "tiny",
        "seed": 3,
        "precision": "fp64",
        "sources": {domain: [{"uri": "x"}] for domain in DOMAINS},
        "tokenizer": {"train": {"vocab": VOCAB_SIZE - 256}},
        "tokens": {"max_epochs": 1e6},
        "mix": {"base": shares},
        "model": {
            "layers": 2,
            "dim": 32,
            "ffn": 64,
            "heads": 4,
            "kv_heads": 2,
            "max_seq_len": 64,
            "tied_embeddings": True,
        },
        "lr": {"peak": 1e-2, "warmup": "4 steps", "cosine": {"to": 1e-3, "over": "20 steps"}},
        "stages": [
            {"name": "main", "for": f"{12 * STEP} tokens", "seq_len": 16, "batch": f"{STEP} tokens", "mix": "base"},
            {"name": "anneal", "for": f"{8 * STEP} tokens", "seq_len": [16, 32], "mix": "base", "lr": "linear to 0"},
        ],
        "optimizer": {"decay_embeddings": True},  # as when the golden losses were recorded
        "checkpoint": {"every": f"{3 * STEP} tokens", "keep": {"last": 2}},
    }
    data["stages"][1]["weight_averaging"] = "last 3"
    return Recipe.model_validate(data | changes)


def stages(steps: int) -> list[dict[str, Any]]:
    """One stage of so many steps."""
    return [{"name": "main", "for": f"{steps * STEP} tokens", "seq_len": 16, "batch": f"{STEP} tokens", "mix": "base"}]


def write_tokens(folder: Path, asked: Recipe) -> Path:
    """Write shards of documents that count up in strides, so that there is something to learn."""
    for number, dataset in enumerate(mix_datasets(asked)):
        texts = []
        for row in range(40):
            length, stride = 5 + (row * 7 + number) % 33, 1 + (row + number) % 5
            text = [(row * 11 + number * 50 + stride * place) % 256 for place in range(length)]
            texts.append(np.array([BEGIN, *text, END], np.uint16))
        lengths = np.array([len(text) for text in texts])
        write_shard(folder / dataset.name, 0, texts, lengths, documents(dataset, range(40)))
    vocabulary = {"vocab_size": VOCAB_SIZE, "begin": BEGIN, "end": END, "tokenizer": "none"}
    write_index(folder, {dataset.name: dataset.domain for dataset in mix_datasets(asked)}, "uint16", vocabulary)
    return folder


def job(folder: Path, asked: Recipe | None = None, stage: str = "main", name: str = "work", **more: Any) -> Path:
    """Write recipe, tokens and job file into `folder`; return the job file."""
    asked = asked or recipe()
    tokens = folder / "tokens"
    if not tokens.exists():
        tokens.mkdir(parents=True)
        write_tokens(tokens, asked)
    (folder / f"{name}.yaml").write_text(to_yaml(asked))
    path = folder / f"{name}.json"
    fields = {"recipe": folder / f"{name}.yaml", "stage": stage, "tokens": tokens, "work": folder / name}
    path.write_text(TrainJob(**{"micro_batch": 6, "device": "cpu", **fields, **more}).model_dump_json())
    return path


def train(path: Path) -> int:
    """Run the trainer in this process, made for it; return the exit status. What it prints goes to a file."""
    from herd.llama3.train.main import main

    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    return main([str(path)])


def initial_digest(path: Path) -> str:
    """Return a digest of the weights that all processes together start with."""
    import torch

    from herd.llama3.parallel.mesh import full_tensor, init_distributed
    from herd.llama3.train.state import Precision, TrainState

    asked = load_recipe(TrainJob.model_validate_json(path.read_text()).recipe)
    with init_distributed("cpu", 30) as world:
        state = TrainState(asked, VOCAB_SIZE, Precision(torch.float32), world, 0)
        state.reset(asked, 0, world)
        weights = {name: full_tensor(parameter.detach()) for name, parameter in state.parameters.items()}
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()


def output(path: Path) -> str:
    """Return what the trainers of the job file `path` printed."""
    return path.with_suffix(".log").read_text()


def train_until_signal(
    path: Path, number: int, target: str, calls: int, after: bool, ready: Callable[[], object] = lambda: None
) -> int:
    """Train, and get signal `number` at call number `calls` of `target` (`module:name`), before or `after` it.

    `ready` is called first and may wait for something that happens in another thread.
    """
    module_name, name = target.split(":")
    module = importlib.import_module(module_name)
    owner: Any = module
    *parents, last = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, count = getattr(owner, last), 0

    def deadly(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        if count == calls and not after:
            end()
        value = original(*arguments, **keywords)
        if count == calls and after:
            end()
        return value

    def end() -> None:
        ready()
        os.kill(os.getpid(), number)

    setattr(owner, last, deadly)
    return train(path)


def losses(path: Path) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm by position from the journal of the job file `path`."""
    return {r.position: (r.metrics["train/loss"], r.metrics["train/grad_norm"]) for r in records(path)}


def records(path: Path) -> list[Record]:
    return read_journal(work(path) / "journal.jsonl")


def work(path: Path) -> Path:
    return TrainJob.model_validate_json(path.read_text()).work


def weights(path: Path) -> dict[str, str]:
    """Return a digest of each tensor of the stage's result: what differs shows at a glance."""
    tensors = deserialize((work(path) / "result" / "model" / "model.safetensors").read_bytes())
    return {name: hashlib.sha256(tensor["data"]).hexdigest()[:16] for name, tensor in tensors}
