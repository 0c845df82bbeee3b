"""A whole evaluation of small models on small documents, through the files that the other rooms write."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from herd.llama3.data.demo.word_problems import document
from herd.llama3.evaluate.compare import compare
from herd.llama3.evaluate.evaluate import evaluate
from herd.llama3.evaluate.gate import decide
from herd.llama3.evaluate.requests import question_requests
from herd.llama3.evaluate.scores import read_scores, samples
from herd.llama3.evaluate.task import Likelihood, Task
from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.gates import GateRule
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schema import Recipe
from herd.llama3.statistics.estimates import proportion
from herd.llama3.statistics.significance import Z
from herd.llama3.tokens.tokenizer import Tokenizer, train_tokenizer

DOCUMENTS, QUESTIONS = 5, 60
WINDOW = 320
"""Positions of the models; the recipe's longest sequence is shorter."""
LONGEST = 256
CUT = 2 * LONGEST
KEYS = [
    "eval/arithmetic",
    "eval/bpb",
    "eval/bpb/code",
    "eval/bpb/math",
    "eval/bpb_macro",
    "eval/bpb_macro/code",
    "eval/bpb_macro/math",
    "eval/continuation",
    "eval/core",
    "eval/gold_nll/arithmetic",
    "eval/gold_nll/continuation",
    "eval/gold_nll/trivia",
    "eval/trivia",
]


@dataclass(frozen=True)
class Workspace:
    root: Path
    recipe: Recipe
    tokenizer: Tokenizer

    def model(self, name: str, seed: int = 0, uniform: bool = False) -> Path:
        """Write a model with random weights, or with none, which gives every token the same probability."""
        made = build_model(self.recipe.model, self.tokenizer.vocab_size, seed, torch.float32, torch.device("cpu"))
        if uniform:
            torch.nn.init.zeros_(made.embedding.weight)
        shape = self.recipe.model.model_copy(update={"max_seq_len": WINDOW})
        save_model(self.root / name, shape, self.tokenizer.vocab_size, made.state_dict())
        return self.root / name

    def evaluate(self, model: Path, folder: str) -> dict[str, Any]:
        return evaluate(
            self.recipe, model, self.root / "tokenizer", self.root / "curated", self.root / folder, threads=1
        )


def write_documents(folder: Path, domain: str, texts: list[str]) -> None:
    """Write documents as curation does; every third is for training."""
    rows = [
        {
            "id": hashlib.sha256(text.encode()).hexdigest(),
            "text": text,
            "domain": domain,
            "source": "test",
            "language": "en",
            "url": "",
            "license": "unknown",
            "split": "train" if place % 3 == 0 else "held_out",
        }
        for place, text in enumerate(texts)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(sorted(rows, key=lambda row: row["id"]))
    pq.write_table(table, folder / f"{domain}-00000.parquet")


def code(place: int) -> str:
    return "\n".join(
        f"def function_{place}_{line}(value):\n    return value + {place * line}" for line in range(6 + 2 * place)
    )


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Workspace:
    root = tmp_path_factory.mktemp("evaluate")
    texts = {
        "math": [document(7, place) for place in range(12)],
        "code": [*(code(place) for place in range(11)), "été 日本 " * 400],
    }
    for domain, items in texts.items():
        write_documents(root / "curated" / "documents", domain, items)
    tokenizer = train_tokenizer([*texts["math"], *texts["code"]], 320)
    tokenizer.save(root / "tokenizer")
    lines = [
        {"query": f"Which is {n}?", "choices": [str(n), "x", f"{n} y"][: 2 + n % 2], "gold": n % 2} for n in range(20)
    ]
    (root / "trivia.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recipe = load_recipe(
        checkout / "recipes/quickstart.yaml",
        [
            "model={preset: tiny, max_seq_len: 4096}",
            "stages.main.seq_len=64",
            "stages.ramp-1.seq_len=64",
            "stages.ramp-2.seq_len=64",
            f"stages.anneal.seq_len={LONGEST}",
            f"evaluate.documents={DOCUMENTS}",
            f"evaluate.questions={QUESTIONS}",
            f"evaluate.tasks=[{root / 'trivia.jsonl'}]",
        ],
    )
    return Workspace(root, recipe, tokenizer)


@pytest.fixture(scope="module")
def facts(workspace: Workspace) -> dict[str, Any]:
    """Evaluate a random model into the folder `random-scores`, which several tests read."""
    return workspace.evaluate(workspace.model("random"), "random-scores")


def rows_of(workspace: Workspace, folder: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(workspace.root / folder / "samples.parquet").to_pylist()
    return rows


def test_scores_samples_and_facts_agree(workspace: Workspace, facts: dict[str, Any]) -> None:
    scores = read_scores(workspace.root / "random-scores")
    assert sorted(scores) == KEYS
    assert {key: facts[key] for key in KEYS} == {key: score.value for key, score in scores.items()}
    assert (facts["window"], facts["document_bytes"]) == (WINDOW, CUT)
    assert facts["documents"] == 2 * DOCUMENTS
    rows = rows_of(workspace, "random-scores")
    for key in (key for key in KEYS if key not in ("eval/bpb", "eval/bpb_macro", "eval/core")):
        mine = [row for row in rows if row["key"] == key]
        assert scores[key].n == len(mine)
        value = math.fsum(row["numerator"] for row in mine) / math.fsum(row["denominator"] for row in mine)
        assert scores[key].value == pytest.approx(value)
        assert scores[key].low < scores[key].value < scores[key].high
    falling = {key for key in scores if "bpb" in key or "nll" in key}
    assert falling == {key for key, score in scores.items() if score.better == "lower"}
    assert (
        facts["questions"]
        == sum(row["gold"] is not None and row["denominator"] == 1 for row in rows)
        == QUESTIONS + 2 * DOCUMENTS + 20
    )


@pytest.mark.usefixtures("facts")
def test_means_are_those_that_the_recipe_and_chance_give(workspace: Workspace) -> None:
    scores = read_scores(workspace.root / "random-scores")
    weights = {"math": 25 / 42, "code": 17 / 42}  # of the base mix, the two domains that have documents
    mean = sum(weight * scores[f"eval/bpb/{domain}"].value for domain, weight in weights.items())
    assert scores["eval/bpb"].value == pytest.approx(mean)
    stderr = math.hypot(*(weight * scores[f"eval/bpb/{domain}"].stderr for domain, weight in weights.items()))
    assert scores["eval/bpb"].stderr == pytest.approx(stderr)
    chances = {"eval/arithmetic": 1 / 4, "eval/continuation": 1 / 4, "eval/trivia": 5 / 12}
    for key, chance in chances.items():
        assert scores[key].chance == pytest.approx(chance)
    above = [(scores[key].value - chance) / (1 - chance) for key, chance in chances.items()]
    assert scores["eval/core"].value == pytest.approx(sum(above) / 3)


def test_equal_inputs_give_equal_bytes(workspace: Workspace, facts: dict[str, Any]) -> None:
    assert workspace.evaluate(workspace.model("random"), "again") == facts
    for name in ("scores.parquet", "samples.parquet", "generations.json"):
        assert (workspace.root / "random-scores" / name).read_bytes() == (workspace.root / "again" / name).read_bytes()


@pytest.fixture(scope="module")
def uniform(workspace: Workspace) -> None:
    workspace.evaluate(workspace.model("uniform", uniform=True), "uniform-scores")


@pytest.mark.usefixtures("uniform")
def test_a_uniform_model_has_the_bits_of_its_vocabulary(workspace: Workspace) -> None:
    """Every token costs log2(rows) bits, so bits per byte is that times tokens over bytes, document by document."""
    rows = {row["id"]: row for row in rows_of(workspace, "uniform-scores") if row["key"].startswith("eval/bpb/")}
    sizes = []
    for domain in ("math", "code"):
        table = pq.read_table(workspace.root / "curated" / "documents" / f"{domain}-00000.parquet").to_pylist()
        held_out = [row for row in table if row["split"] == "held_out"]
        for held in sorted(held_out, key=lambda row: row["id"])[:DOCUMENTS]:
            text = held["text"].encode()[:CUT].decode(errors="ignore")
            row = rows.pop(held["id"])
            sizes.append(row["denominator"])
            assert row["denominator"] == len(text.encode())
            assert row["tokens"] == len(workspace.tokenizer.encode(text))
            assert row["numerator"] == pytest.approx(
                math.log2(workspace.tokenizer.vocab_size) * row["tokens"], rel=1e-5
            )
    assert not rows
    assert max(sizes) > CUT - 4 > min(sizes), "some documents must be cut and some not"


@pytest.mark.slow
def test_a_random_model_answers_at_chance(workspace: Workspace) -> None:
    """Three random models, 60 questions each: the pooled accuracy lies in its own interval around one in four."""
    right = 0
    for seed in (1, 2, 3):
        workspace.evaluate(workspace.model(f"random-{seed}", seed), f"chance-{seed}")
        rows = [row for row in rows_of(workspace, f"chance-{seed}") if row["key"] == "eval/arithmetic"]
        assert len({row["picked"] for row in rows}) == 4
        right += sum(row["numerator"] == 1 for row in rows)
    pooled = proportion(right, 3 * QUESTIONS)
    assert pooled.low <= 0.25 <= pooled.high


@pytest.mark.usefixtures("facts")
def test_generations_show_each_domain_and_a_question(workspace: Workspace) -> None:
    shown = json.loads((workspace.root / "random-scores" / "generations.json").read_text())
    assert [item["of"] for item in shown] == ["code", "math", "eval/arithmetic"]
    assert shown[2]["prompt"].endswith("Answer:")
    assert all(item["text"] and "<|" not in item["text"] for item in shown)


def test_held_out_conversations_are_answered_first(workspace: Workspace, facts: dict[str, Any]) -> None:
    asked = [("system", "Be brief."), ("user", "What is two?"), ("assistant", "One and one."), ("user", "So?")]
    rows = [{"id": f"{n}", "messages": [{"role": role, "content": text} for role, text in asked]} for n in range(3)]
    file = workspace.root / "held-out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    places = (workspace.root / name for name in ("random", "tokenizer", "curated", "with-conversations"))
    again = evaluate(workspace.recipe, *places, conversations=file, threads=1)
    shown = json.loads((workspace.root / "with-conversations" / "generations.json").read_text())
    assert [(item["of"], item["id"]) for item in shown[:2]] == [("conversation", "0"), ("conversation", "1")]
    assert [item["of"] for item in shown[2:]] == ["code", "math", "eval/arithmetic"]
    assert shown[0]["prompt"] == "What is two?"
    assert shown[0]["text"] == shown[1]["text"]
    assert "<|" not in shown[0]["text"]
    assert {key: value for key, value in again.items() if key in facts} == facts


def test_the_answer_has_the_fewest_nats_per_byte() -> None:
    """More nats in all, yet fewer per byte of the scored text, wins."""
    question = question_requests("t", [type("Q", (), {"query": "q", "choices": ("ab", "abcdefg"), "gold": 1})()])
    task = Task("t", "choice", tuple(question))
    (sample,) = samples(task, [Likelihood(3.0, 1), Likelihood(7.0, 4)])
    assert (sample.picked, sample.gold, sample.numerator, sample.tokens) == (1, 1, 1.0, 5)
    (sample,) = samples(task, [Likelihood(3.0, 1), Likelihood(8.1, 4)])
    assert (sample.picked, sample.numerator) == (0, 0.0)


@pytest.mark.usefixtures("facts", "uniform")
def test_a_champion_is_compared_sample_by_sample(workspace: Workspace) -> None:
    """Two models without knowledge differ little on any document: the paired interval is far narrower than theirs."""
    random, uniform = workspace.root / "random-scores", workspace.root / "uniform-scores"
    same = compare(workspace.recipe, random, random)
    assert all(difference.value == 0 for difference in same.values())
    differences, champion, candidate = (
        compare(workspace.recipe, uniform, random),
        read_scores(random),
        read_scores(uniform),
    )
    assert sorted(differences) == KEYS
    for key, difference in differences.items():
        assert difference.value == pytest.approx(candidate[key].value - champion[key].value, abs=1e-9)
        assert difference.low <= difference.value <= difference.high
    found = differences["eval/bpb"]
    assert found.high - found.low < 0.25 * 2 * Z * candidate["eval/bpb"].stderr


@pytest.mark.usefixtures("facts")
def test_the_gate_reads_what_was_written(workspace: Workspace) -> None:
    scores = read_scores(workspace.root / "random-scores")
    rules = {
        key: GateRule.parse(text) for key, text in {"eval/bpb": "no worse than 0.5%", "eval/core": "better"}.items()
    }
    decision = decide(rules, scores, scores)
    assert [row.passed for row in decision.rows] == [True, True, False]
    assert decide(rules, scores, None).accepted


def test_a_model_of_nan_is_refused_by_the_gate(workspace: Workspace) -> None:
    broken = build_model(workspace.recipe.model, workspace.tokenizer.vocab_size, 0, torch.float32, torch.device("cpu"))
    torch.nn.init.constant_(broken.norm.weight, math.nan)
    save_model(workspace.root / "nan", workspace.recipe.model, workspace.tokenizer.vocab_size, broken.state_dict())
    workspace.evaluate(workspace.root / "nan", "nan-scores")
    decision = decide({}, read_scores(workspace.root / "nan-scores"), None)
    assert not decision.accepted
    assert "eval/bpb is nan" in decision.refusals[0]


def test_a_tokenizer_of_another_model_is_refused(workspace: Workspace) -> None:
    train_tokenizer([document(7, place) for place in range(4)], 300).save(workspace.root / "other")
    model = workspace.model("random")
    with pytest.raises(ValueError, match=r"vocab_size 576, tokenizer .* 556: give the tokenizer"):
        evaluate(workspace.recipe, model, workspace.root / "other", workspace.root / "curated", workspace.root / "no")
    assert not (workspace.root / "no").exists()


def test_curated_folders_without_held_out_documents_are_refused(workspace: Workspace, tmp_path: Path) -> None:
    model = workspace.model("random")
    write_documents(tmp_path / "documents", "math", ["only this, which is for training"])
    with pytest.raises(ValueError, match=r"no document with split 'held_out'; raise curate\.validation_fraction"):
        evaluate(workspace.recipe, model, workspace.root / "tokenizer", tmp_path, tmp_path / "out")


@pytest.mark.parametrize(("name", "why"), [("core", "taken"), ("Trivia 2", "not a metric name")])
def test_task_files_need_a_name_of_their_own(workspace: Workspace, tmp_path: Path, name: str, why: str) -> None:
    path = Path(shutil.copy(workspace.root / "trivia.jsonl", tmp_path / f"{name}.jsonl"))
    section = workspace.recipe.evaluate.model_copy(update={"tasks": [str(path)]})
    recipe = workspace.recipe.model_copy(update={"evaluate": section})
    with pytest.raises(ValueError, match=rf"evaluate\.tasks: .*{name}' .*is {why}"):
        evaluate(
            recipe,
            workspace.model("random"),
            workspace.root / "tokenizer",
            workspace.root / "curated",
            tmp_path / "out",
        )
