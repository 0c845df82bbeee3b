"""What the processes of test_ranks run."""

from __future__ import annotations

from typing import Any

import torch

from llama3.evaluate.distributed import EvalGroup, EvalRanks, SingleProcess
from llama3.evaluate.scoring import score_requests
from llama3.evaluate.task import Request
from llama3.model.init import build_model
from llama3.parallel.mesh import init_distributed
from llama3.recipe.sections import Model
from llama3.tokens.tokenizer import Tokenizer

SPEC = Model(layers=2, dim=32, ffn=64, heads=4, kv_heads=2, max_seq_len=512, tied_embeddings=True)


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


def scored(ranks: EvalRanks) -> list[tuple[float, int, bool | None]]:
    """Return what `ranks` find of `asked` together."""
    tokenizer = Tokenizer([bytes([byte]) for byte in range(256)])
    model = build_model(SPEC, tokenizer.rows, 3, torch.float32, torch.device("cpu")).eval()
    found = score_requests(model, tokenizer, asked(), SPEC.max_seq_len, greedy={"eval/sums"}, ranks=ranks)
    return [(item.nll, item.tokens, item.greedy) for item in found]


def scored_together() -> list[tuple[float, int, bool | None]]:
    with init_distributed("cpu", 240):
        return scored(EvalGroup())


def scored_alone() -> list[tuple[float, int, bool | None]]:
    return scored(SingleProcess())


def gathered() -> Any:
    """Return what is gathered of values of different lengths."""
    with init_distributed("cpu", 240):
        ranks = EvalGroup()
        mine = {"rank": ranks.rank, "text": "é" * 100 * ranks.rank, "numbers": [0.1, float("inf"), None, True]}
        return ranks.gather(mine), ranks.gather([]), (ranks.rank, ranks.size)
