"""Sample by sample what lm-eval finds with its own `hf` model on our export of the same weights, without a network.

Five kinds of task: whole answers to choose from (per text and per character), letters after five examples, the last
word, rolling likelihood of whole texts, and written answers with stop texts and extraction.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llama3.bench.evaluate_tasks import Pair, pairs, write_job
from llama3.bench.ours.evaluate import work
from llama3.export.convert import convert
from llama3.model.files import save_model
from llama3.model.initial import build
from llama3.recipe.schema import Model
from llama3.tokens.tokenizer import train_tokenizer
from tests.llama3.evaluate.tiny_data import write_data

pytest.importorskip("lm_eval", reason="needs the extra: pip install 'herd[crosscheck]'")

SPEC = Model(layers=2, dim=64, ffn=128, heads=4, kv_heads=2, max_seq=4096)
QUESTIONS = 48
STEPS = 100
RUN = """
import json, sys
from pathlib import Path
from llama3.bench.peers.lm_eval_tasks import work
found = work(Path(sys.argv[1]), Path(sys.argv[2]), model=sys.argv[3], batch=16)
Path(sys.argv[4]).write_text(json.dumps(found["samples"]))
"""
Samples = dict[str, dict[str, dict[str, Any]]]


def model(folder: Path, made: list[Pair]) -> Path:
    """Write a model that has read the questions with their answers a few times, and its tokenizer.

    So that some of its answers are right, it writes where to stop, and never a special token.
    """
    texts = [f"{asked.context}{asked.continuation}\n\n" for pair in made for asked in pair.task.requests]
    texts += [f"{prompt.context} {prompt.gold[0]}\n\n" for pair in made for prompt in pair.task.prompts] * 30
    tokenizer = train_tokenizer(sorted(texts), 400)
    network = build(SPEC, tokenizer.rows, 3, torch.float32, torch.device("cpu"))
    tokens = torch.tensor([token for text in texts for token in (tokenizer.begin, *tokenizer.encode(text))])
    optimizer, dice = torch.optim.AdamW(network.parameters(), 5e-3), torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(0, len(tokens) - 129, (8, 1), generator=dice)
        batch = tokens[starts + torch.arange(129)]
        network(batch[:, :-1], None, batch[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_model(folder, SPEC, tokenizer.rows, network.state_dict().items())
    tokenizer.save(folder)
    return folder


def both(folder: Path, made: list[Pair]) -> tuple[Samples, Samples]:
    """Return herd's samples and lm-eval's."""
    ours, theirs, job, found = model(folder / "model", made), folder / "hf", folder / "job", folder / "found.json"
    convert(ours, "herd", theirs, "hf")
    write_job(made, job)
    paths = map(str, (job, folder, theirs, found))
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run([sys.executable, "-c", RUN, *paths], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return work(job, folder, str(ours))["samples"], json.loads(found.read_text())


def check(made: list[Pair], ours: Samples, theirs: Samples) -> None:
    assert ours.keys() == theirs.keys() == {pair.task.key for pair in made}
    for pair in made:
        mine, other = ours[pair.task.key], theirs[pair.task.key]
        assert list(mine) == list(other) == [str(n) for n in range(len(pair.rows))]
        for name, sample in mine.items():
            assert sample.get("text") == other[name].get("text"), (pair.task.key, name)
            assert sample["decided"] == other[name]["decided"], (pair.task.key, name, sample, other[name])
            assert sample.get("nats", []) == pytest.approx(other[name].get("nats", []), rel=1e-5)


def decided(samples: Samples, rule: str) -> set[float]:
    return {
        sample["decided"][rule]
        for answers in samples.values()
        for sample in answers.values()
        if rule in sample["decided"]
    }


def kinds(made: list[Pair]) -> set[tuple[str, str]]:
    return {(pair.task.kind, pair.task.normalise if pair.task.kind == "choice" else "") for pair in made}


ALL = {("choice", "characters"), ("choice", "none"), ("cloze", ""), ("bits", ""), ("generate", "")}


def test_made_up_questions(tmp_path: Path) -> None:
    made = pairs(write_data(tmp_path / "data"), QUESTIONS)
    assert kinds(made) == ALL
    ours, theirs = both(tmp_path, made)
    check(made, ours, theirs)
    for rule in ("acc", "acc_norm", "exact_match"):
        assert decided(ours, rule) == {0, 1}
    assert decided({"": ours["lambada_openai"]}, "acc") == {0, 1}
    assert any(len(sample["text"]) < 10 for sample in ours["gsm8k"].values()), "some end at a stop text"


@pytest.mark.slow
def test_published_questions(tmp_path: Path, shared: Path) -> None:
    made = pairs(shared / "eval", QUESTIONS)
    if kinds(made) != ALL:
        pytest.skip(f"{shared / 'eval'} lacks files of some kind of task")
    ours, theirs = both(tmp_path, made)
    check(made, ours, theirs)
    assert sum(map(len, ours.values())) >= 5 * QUESTIONS - 3


def test_a_task_without_its_files_is_left_out(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    (data / "mmlu" / "dev.jsonl").unlink()
    assert {pair.task.key for pair in pairs(data, 2)} == {"arc_easy", "lambada_openai", "wikitext", "gsm8k"}
