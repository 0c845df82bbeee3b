"""Goal E6 on a real, tiny Llama: bits per byte tell two checkpoints 40 steps apart, answers to questions do not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from herd.llama3.data.demo.word_problems import document
from herd.llama3.evaluate.compare import compare
from herd.llama3.evaluate.evaluate import evaluate
from herd.llama3.evaluate.gate import decide
from herd.llama3.evaluate.scores import read_scores
from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schema import Recipe
from herd.llama3.statistics.significance import DOCUMENTS, QUESTIONS, Difference
from herd.llama3.tokens.tokenizer import Tokenizer, train_tokenizer

SEQ, BATCH = 64, 8
CHECKPOINTS = (60, 100)
"""Optimizer steps."""


pytestmark = pytest.mark.slow


class Workspace:
    def __init__(self, root: Path, recipe: Recipe) -> None:
        self.root, self.recipe = root, recipe
        texts = [document(3, place) for place in range(200)]
        rows = [
            {
                "id": hashlib.sha256(text.encode()).hexdigest(),
                "text": text,
                "domain": "math",
                "language": "en",
                "url": "",
                "split": "held_out" if place % 3 == 0 else "train",
            }
            for place, text in enumerate(texts)
        ]
        (root / "documents").mkdir()
        table = pa.Table.from_pylist(sorted(rows, key=lambda row: row["id"]))
        pq.write_table(table, root / "documents" / "math-00000.parquet")
        training = [text for place, text in enumerate(texts) if place % 3]
        self.tokenizer = train_tokenizer(training, 320)
        self.tokenizer.save(root / "tokenizer")
        self._train(training)
        for step in CHECKPOINTS:
            evaluate(recipe, root / f"step-{step}", root / "tokenizer", root, root / f"scores-{step}", threads=1)

    def _train(self, texts: list[str]) -> None:
        """Train with AdamW on windows of all texts, and keep the weights after some steps."""
        tokens = torch.tensor([token for text in texts for token in _ids(self.tokenizer, text)])
        model = build_model(self.recipe.model, self.tokenizer.vocab_size, 0, torch.float32, torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        draws = torch.Generator().manual_seed(0)
        for step in range(1, max(CHECKPOINTS) + 1):
            starts = torch.randint(len(tokens) - SEQ - 1, (BATCH, 1), generator=draws)
            windows = tokens[starts + torch.arange(SEQ + 1)]
            logits = model(windows[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step in CHECKPOINTS:
                save_model(
                    self.root / f"step-{step}", self.recipe.final_model, self.tokenizer.vocab_size, model.state_dict()
                )

    def compare(self) -> dict[str, Difference]:
        return compare(self.recipe, *(self.root / f"scores-{step}" for step in reversed(CHECKPOINTS)))


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Workspace:
    shape = "model={layers: 1, dim: 32, ffn: 64, heads: 2, kv_heads: 1, max_seq_len: 512, tied_embeddings: true}"
    stages = [f"stages.{name}.seq_len=128" for name in ("ramp-1", "ramp-2", "main", "anneal")]
    recipe = load_recipe(checkout / "recipes/quickstart.yaml", [shape, *stages, "evaluate.documents=60"])
    return Workspace(tmp_path_factory.mktemp("checkpoints"), recipe)


def test_bits_per_byte_separate_what_answers_do_not(workspace: Workspace) -> None:
    found = workspace.compare()
    bits, answers = found["eval/bpb/math"], found["eval/arithmetic"]
    assert (bits.method, answers.method) == (DOCUMENTS, QUESTIONS)
    assert bits.high < 0
    assert -bits.value > 5 * (bits.high - bits.low) / 4, "more than five standard errors"
    assert answers.low < 0 < answers.high
    assert answers.p > 0.05


def test_the_later_checkpoint_is_promoted_over_the_earlier_and_not_the_other_way(workspace: Workspace) -> None:
    later, earlier = (read_scores(workspace.root / f"scores-{step}") for step in reversed(CHECKPOINTS))
    differences = workspace.compare()
    rules = workspace.recipe.promote.when
    assert decide(rules, later, earlier, differences).accepted
    back = compare(workspace.recipe, *(workspace.root / f"scores-{step}" for step in CHECKPOINTS))
    refused = decide(rules, earlier, later, back)
    assert {row.metric for row in refused.rows if not row.passed} >= {"eval/bpb", "eval/bpb/math"}
