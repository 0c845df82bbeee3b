"""What the processes of test_distributed_ranks run."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from herd.llama3.evaluate.distributed import EvalRanks
from herd.llama3.evaluate.generate import generate, generate_batch
from herd.llama3.evaluate.generation_settings import GenerationSettings
from herd.llama3.evaluate.scoring import score_requests, score_sequences
from herd.llama3.evaluate.task import Prompt, Request
from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import build_model, initial_value
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.mesh import init_distributed
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.sections import Model
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.llama3.train.checkpoint.dcp import save_state
from herd.llama3.train.state import Precision, TrainState

SPEC = Model(layers=2, dim=32, ffn=64, heads=4, kv_heads=2, max_seq_len=512, tied_embeddings=True)
UNTIED = SPEC.model_copy(update={"tied_embeddings": False, "layers": 3})
TOKENIZER = Tokenizer([bytes([byte]) for byte in range(256)])
Scored = list[tuple[float, int, bool | None]]


def asked() -> list[Request]:
    """Return questions with examples, questions without, and documents."""
    examples = "".join(f"Question {n}: what is {n} + {n}? Answer: {2 * n}\n" for n in range(12))
    questions = [
        Request("eval/sums", f"{few}{n}", choice, f"{few}Question {n}: what is {n} + 1? Answer:", f" {n + choice}", 1)
        for few in (examples, "")
        for n in range(20)
        for choice in range(3)
    ]
    return [*questions, *(Request("eval/bpb", str(n), 0, "", "Round and round. " * 7 * n, 0) for n in range(1, 9))]


def scored(ranks: EvalRanks) -> Scored:
    """Return what `ranks` find of `asked` together."""
    model = build_model(SPEC, TOKENIZER.vocab_size, 3, torch.float32, torch.device("cpu")).eval()
    found = score_requests(model, TOKENIZER, asked(), SPEC.max_seq_len, greedy={"eval/sums"}, ranks=ranks)
    return [(item.nll, item.tokens, item.greedy) for item in found]


def scored_together() -> Scored:
    with init_distributed("cpu", 240) as world:
        return scored(EvalRanks(world))


def scored_alone() -> Scored:
    return scored(EvalRanks())


def write_model(folder: Path) -> None:
    """Write a model whose greedy choices are far from ties."""
    model = build_model(UNTIED, TOKENIZER.vocab_size, 3, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.0)
    save_model(folder, UNTIED, TOKENIZER.vocab_size, model.state_dict())


def evaluated(folder: Path, layout: Layout | None) -> tuple[Scored, list[tuple[str, ...]], str]:
    """Return scores, answers in batches, and one text, of the model in `folder`; one process if `layout` is None."""

    def work(ranks: EvalRanks) -> tuple[Scored, list[tuple[str, ...]], str]:
        model = ranks.load(folder, torch.float32, "cpu")
        found = score_requests(model, TOKENIZER, asked(), 200, greedy={"eval/sums"}, ranks=ranks)
        contexts = [
            [TOKENIZER.begin, *TOKENIZER.encode(text)] for text in ("Round", "and", "round", "about", "it", "is")
        ]
        ends = [([*tokens, end], len(tokens)) for tokens in contexts for end in range(TOKENIZER.vocab_size)]
        found += score_sequences(model, ends, 64, greedy=range(len(ends)), ranks=ranks)  # one of each is the likeliest
        scores = [(item.nll, item.tokens, item.greedy) for item in found]
        prompts = [Prompt("eval/sums", str(n), "Round and round. " * (1 + n), ("",)) for n in range(5)]
        answers = generate_batch(model, TOKENIZER, prompts, GenerationSettings(max_tokens=12), 0)
        answers += generate_batch(
            model, TOKENIZER, prompts, GenerationSettings(max_tokens=12, temperature=1.0, samples=2), 0
        )
        return scores, answers, generate(model, TOKENIZER, "Round", 16)

    if layout is None:
        return work(EvalRanks())
    with init_distributed("cpu", 240, layout) as world:
        return work(EvalRanks(world))


def gathered() -> Any:
    """Return what is gathered of values of different lengths."""
    with init_distributed("cpu", 240) as world:
        ranks = EvalRanks(world)
        mine = {"rank": ranks.rank, "text": "é" * 100 * ranks.rank, "numbers": [0.1, float("inf"), None, True]}
        return ranks.gather(lambda: mine), ranks.gather(list), (ranks.rank, ranks.size)


def write_checkpoint(folder: Path, seed: int = 3) -> None:
    """Save the model of `write_model` as two data-parallel processes save a stage in progress."""
    recipe = load_recipe(Path("recipes/quickstart.yaml"))
    recipe = recipe.model_copy(update={"model": UNTIED})
    with init_distributed("cpu", 240) as world:
        state = TrainState(recipe, TOKENIZER.vocab_size, Precision(torch.float32), world, 0)
        state.fill(
            lambda name, shape: initial_value(UNTIED, seed, name, shape) * (8.0 if len(shape) > 1 else 1.0), world
        )
        save_state(folder, state, "main", world)


def evaluated_within(folder: Path, layout: Layout | None, spare: int) -> str:
    """Return "fits" if each of several processes scores and writes with `spare` bytes besides the mapped file.

    One process without a layout must not.
    """
    requests = [Request("eval/bpb", "0", 0, "", "Round and round. ", 0)]

    def work(ranks: EvalRanks) -> str:
        before = psutil.Process().memory_info().data  # what RLIMIT_DATA counts: with the stacks of gloo's threads
        limit = before + (folder / "model.safetensors").stat().st_size + spare
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        model = ranks.load(folder, torch.float32, "cpu")
        (found,) = score_requests(model, TOKENIZER, requests, 64, ranks=ranks)
        assert found.nll > 0
        assert generate(model, TOKENIZER, "Round", 2) is not None
        return "fits"

    if layout is None:
        with pytest.raises((MemoryError, RuntimeError), match=r"memory|^$"):
            work(EvalRanks())
        return "does not fit"
    with init_distributed("cpu", 240, layout) as world:
        return work(EvalRanks(world))
