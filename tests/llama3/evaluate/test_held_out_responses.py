"""Held-out answers: what is scored is what the model was trained to write, and nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from herd.llama3.evaluate.checks import check_rules
from herd.llama3.evaluate.distributed import EvalRanks
from herd.llama3.evaluate.evaluate import score_responses
from herd.llama3.evaluate.suite import RESPONSES
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model
from herd.llama3.tokens.chat import encode_conversation
from herd.llama3.tokens.tokenizer import Tokenizer
from tests.llama3.tokens.token_samples import recipe, stage

CODER = Tokenizer([bytes([value]) for value in range(256)])
CHATS = [
    [("user", "hello"), ("assistant", "héllo ")],
    [("system", "be brief"), ("user", "1 + 1?"), ("assistant", "2"), ("user", "sure?"), ("assistant", "yes")],
    [("user", "last"), ("assistant", "not counted")],
]


def write(folder: Path, chats: list[list[tuple[str, str]]]) -> Path:
    rows = [{"id": str(n), "messages": [{"role": r, "content": c} for r, c in chat]} for n, chat in enumerate(chats)]
    (folder / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    return folder / "held-out.jsonl"


def test_the_score_is_bits_of_the_targets_over_bytes_of_the_answers(tmp_path: Path) -> None:
    config = Model(layers=2, dim=32, ffn=64, heads=4, kv_heads=2, max_seq_len=256)
    model = build_model(config, CODER.vocab_size, 0, torch.float32, torch.device("cpu"))
    scores, samples = score_responses(model, CODER, write(tmp_path, CHATS), 2, 256, "cpu", EvalRanks())
    bits, sizes = [], [len("héllo".encode()), len("2yes")]
    for chat in CHATS[:2]:
        ids, mask = encode_conversation(CODER, [{"role": role, "content": content} for role, content in chat])
        targets = torch.tensor([ids[1:]]).masked_fill(~torch.tensor([mask[1:]]), -100)
        with torch.no_grad():
            bits.append(model(torch.tensor([ids[:-1]]), None, targets).sum().item() / math.log(2))
    assert [sample.numerator for sample in samples] == pytest.approx(bits, rel=1e-5)
    assert [sample.denominator for sample in samples] == sizes
    assert [sample.tokens for sample in samples] == [size + turns for size, turns in zip(sizes, (1, 2), strict=True)]
    score = scores[RESPONSES]
    assert score.value == pytest.approx(sum(bits) / sum(sizes), rel=1e-5)
    assert (score.n, score.better, score.unit) == (2, "lower", "bits per byte")


def test_no_held_out_conversation_is_no_score(tmp_path: Path) -> None:
    assert score_responses(None, CODER, write(tmp_path, []), 2, 256, "cpu", EvalRanks()) == ({}, [])  # type: ignore[arg-type]


def test_a_gate_may_name_the_score_if_the_recipe_has_conversations() -> None:
    tuned: dict[str, Any] = stage("chat", 80) | {"kind": "sft"}
    policy = {"promote": {"when": {RESPONSES: "better"}}}
    check_rules(recipe([tuned], conversations=[{"uri": "problems", "limit": 9}], **policy))
    with pytest.raises(ValueError, match=f"promote.when: {RESPONSES} is not among the scores"):
        check_rules(recipe([stage("main", 80)], **policy))
