"""A suite with every kind of task on a small model, and what the processes of test_evaluate_suite run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from herd.llama3.data.demo.word_problems import document
from herd.llama3.evaluate.distributed import EvalRanks
from herd.llama3.evaluate.evaluate import evaluate
from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import build_model
from herd.llama3.parallel.mesh import init_distributed
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.tokenizer import Tokenizer
from tests.llama3.evaluate.task_samples import CHOICE, quiz, write_lines
from tests.llama3.evaluate.test_evaluate import code, write_documents

WORDS = {"data": "words.jsonl", "choices": None, "gold": None, "before_answer": None, "group": None}
TASKS: dict[str, dict[str, Any]] = {
    "choice": {"normalize": "tokens", "shots": 1},
    "letters": {"kind": "letters", "average": "groups", "shots": {"count": 2, "same_group": True}, "version": 4},
    "schema": {
        **WORDS, "kind": "schema", "context": None, "contexts": "options", "continuation": "{{ word }}", "gold": "0",
    },
    "cloze": {**WORDS, "kind": "cloze", "context": "{{ options[0] }}", "continuation": "{{ word }}"},
    "rolling": {**WORDS, "kind": "rolling", "context": None, "text": "{{ options | join(' ') }}"},
    "written": {"kind": "generate", "choices": None, "gold": "choices", "writing": {"max_tokens": 8, "until": ["\n"]}},
    "program": {
        **WORDS, "kind": "code", "context": "x = 1  # {{ word }}", "tests": "assert x == 1",
        "writing": {"max_tokens": 4, "until": ["\n", "\r", "\x0c"], "seconds": 2},
    },
}  # fmt: skip
BASELINES = {"choice": 0.3, "letters": 0.25, "cloze": 0.0, "written": 0.0}


def make(root: Path, checkout: Path) -> Recipe:
    """Write documents, data, tasks, suite, model and tokenizer below `root`; return the recipe."""
    texts = {"math": [document(7, place) for place in range(9)], "code": [code(place) for place in range(9)]}
    for domain, items in texts.items():
        write_documents(root / "curated/documents", domain, items)
    write_lines(root / "data/quiz.jsonl", quiz(12, subjects=3))
    words = [{"options": [f"The {n} bells", f"A {n} bell"], "word": f"ring {n} times"} for n in range(6)]
    write_lines(root / "data/words.jsonl", words)
    for name, fields in TASKS.items():
        task = {**CHOICE, "group": "{{ subject }}", **fields, "name": name}
        (root / f"{name}.yaml").write_text(yaml.safe_dump({k: v for k, v in task.items() if v is not None}))
    (root / "table.yaml").write_text(yaml.safe_dump({"version": 3, "baselines": BASELINES}))
    tasks = [*(f"{name}.yaml" for name in TASKS), "boolq"]
    suite = {"built_in": ["bits", "arithmetic"], "tasks": tasks, "core": "table.yaml"}
    (root / "suite.yaml").write_text(yaml.safe_dump(suite))
    recipe = recipe_of(root, checkout)
    tokenizer = Tokenizer([bytes([n]) for n in range(256)])
    tokenizer.save(root / "model")
    weights = build_model(recipe.model, tokenizer.vocab_size, 0, torch.float32, torch.device("cpu")).state_dict()
    save_model(root / "model", recipe.final_model, tokenizer.vocab_size, weights)
    return recipe


def recipe_of(root: Path, checkout: Path, *more: str) -> Recipe:
    lengths = [f"stages.{stage}.seq_len=128" for stage in ("ramp-1", "ramp-2", "main", "anneal")]
    section = [
        f"suite={root / 'suite.yaml'}",
        f"data={root / 'data'}",
        "on_missing_data=skip",
        "documents=4",
        "questions=9",
    ]
    fields = ["model={preset: tiny, max_seq_len: 4096}", *lengths, *(f"evaluate.{field}" for field in section)]
    return load_recipe(checkout / "recipes/quickstart.yaml", [*fields, *more])


def evaluated(root: Path, recipe: Recipe, name: str) -> dict[str, Any]:
    model = root / "model"
    return evaluate(recipe, model, model, root / "curated", root / name, threads=1)


def evaluated_together(root: Path, checkout: Path, name: str) -> dict[str, Any]:
    with init_distributed("cpu", 240) as world:
        model = root / "model"
        (root / "done").mkdir(exist_ok=True)
        ranks = EvalRanks(world, root / "done")
        recipe = recipe_of(root, checkout)
        return evaluate(recipe, model, model, root / "curated", root / name, threads=1, ranks=ranks)
