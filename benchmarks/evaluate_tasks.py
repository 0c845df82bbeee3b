"""Tasks as herd and lm-eval both know them: the same questions, prompts and rules, from the same files.

Of each task there is herd's form (`Task`) and lm-eval's (a YAML file and JSON lines). Prompts are those that lm-eval
ships for ARC, MMLU, LAMBADA and GSM8K; WikiText is read by the paragraph, because herd reads what is longer than its
window in overlapping windows and lm-eval in disjoint ones, which are different numbers by design.

Files, below the data folder: `multiple-choice/arc_easy.jsonl`, `multiple-choice/lambada_openai.jsonl`,
`mmlu/{dev,test}.jsonl`, `wikitext-2/test.txt`, `gsm8k/{train,test}.jsonl`. A task without its files is left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from herd.llama3.evaluate.generation_settings import GenerationSettings
from herd.llama3.evaluate.task import ChoiceKind, ClozeKind, GenerateKind, Prompt, Request, RollingKind, Task

Line = dict[str, Any]
LETTERS = "ABCD"
SUBJECTS = 4
"""Subjects of MMLU that the questions are shared among."""
SHOTS = {"mmlu": 5, "gsm8k": 2}
WRITING = GenerationSettings(
    max_tokens=48,
    until=("Question:", "\n\n"),
    extract=(r"(-?[0-9][0-9,]*)",),
    ignore=(",",),
)
MMLU = "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:"


@dataclass(frozen=True)
class TaskPair:
    """One task in both forms."""

    task: Task
    settings: Mapping[str, Any]
    """Of lm-eval's YAML file, but for the data."""
    rows: Sequence[Line]
    examples: Sequence[Line] = field(default_factory=tuple)


def pairs(data: Path, limit: int) -> list[TaskPair]:
    """Return the tasks whose files are in `data`, with at most `limit` questions each."""
    made: list[TaskPair] = []
    for files, make in _MAKERS.items():
        if all((data / name).is_file() for name in files):
            made += make(limit, *(_lines(data / name) for name in files))
    return made


def write_job(made: Sequence[TaskPair], folder: Path) -> None:
    """Write both forms of the tasks into the new folder `folder`: `tasks.json`, and what lm-eval reads."""
    folder.mkdir(parents=True)
    for pair in made:
        name = pair.task.key
        splits = {"test": pair.rows, **({"dev": pair.examples} if pair.examples else {})}
        for split, rows in splits.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.{split}.jsonl").write_text(text, encoding="utf-8")
        kwargs = {
            "data_files": {split: str(folder / f"{name}.{split}.jsonl") for split in splits},
            "cache_dir": str(folder / "cache"),
        }
        facts = {"task": name, "dataset_path": "json", "dataset_kwargs": kwargs, "test_split": "test", **pair.settings}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(facts, sort_keys=False), encoding="utf-8")
    (folder / "tasks.json").write_text(json.dumps([dataclasses.asdict(pair.task) for pair in made]), encoding="utf-8")


def read_job(folder: Path) -> list[Task]:
    """Return herd's form of the tasks in `folder`."""
    return [
        Task(
            **{
                **facts,
                "requests": tuple(Request(**one) for one in facts["requests"]),
                "prompts": tuple(Prompt(**{**one, "gold": tuple(one["gold"])}) for one in facts["prompts"]),
                "writing": WRITING,
            }
        )
        for facts in json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
    ]


def _arc(limit: int, rows: Sequence[Line]) -> Iterator[TaskPair]:
    """Whole answers to choose from; `acc` and `acc_norm` (nats per character)."""
    rows, key = rows[:limit], "arc_easy"
    asked = [
        Request(key, str(n), i, f"{row['query']}\nAnswer:", f" {choice}", row["gold"], joined=1)
        for n, row in enumerate(rows)
        for i, choice in enumerate(row["choices"])
    ]
    settings = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    yield TaskPair(Task(key, ChoiceKind.name, tuple(asked), normalize="characters"), settings, rows)


def _mmlu(limit: int, examples: Sequence[Line], rows: Sequence[Line]) -> Iterator[TaskPair]:
    """Letters to choose from, after five solved examples of the subject."""
    for subject in sorted({row["subject"] for row in rows})[:SUBJECTS]:
        shown = [row for row in examples if row["subject"] == subject][: SHOTS["mmlu"]]
        asked = [row for row in rows if row["subject"] == subject][: max(1, limit // SUBJECTS)]
        yield _subject(subject, shown, asked)


def _subject(subject: str, shown: Sequence[Line], rows: Sequence[Line]) -> TaskPair:
    key = f"mmlu_{subject}"
    about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
    few = about + "".join(f"{_question(row)} {LETTERS[row['answer']]}\n\n" for row in shown)
    asked = [
        Request(key, str(n), i, few + _question(row), f" {letter}", row["answer"])
        for n, row in enumerate(rows)
        for i, letter in enumerate(LETTERS)
    ]
    settings = {
        "output_type": "multiple_choice",
        "description": about,
        "doc_to_text": MMLU,
        "doc_to_choice": list(LETTERS),
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
        **_shown(len(shown)),
    }
    return TaskPair(Task(key, ChoiceKind.name, tuple(asked), shots=len(shown), normalize="none"), settings, rows, shown)


def _question(row: Line) -> str:
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=True))
    return f"{row['question'].strip()}\n{choices}\nAnswer:"


def _shown(count: int) -> dict[str, Any]:
    return {"num_fewshot": count, "fewshot_split": "dev", "fewshot_config": {"sampler": "first_n"}}


def _lambada(limit: int, rows: Sequence[Line]) -> Iterator[TaskPair]:
    """The last word of a passage, right if every token of it is the likeliest."""
    rows, key = rows[:limit], "lambada_openai"
    asked = [Request(key, str(n), 0, row["context"], f" {row['continuation']}", 0) for n, row in enumerate(rows)]
    settings = {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{' ' + continuation}}",
        "metric_list": [{"metric": "acc"}],
    }
    yield TaskPair(Task(key, ClozeKind.name, tuple(asked)), settings, rows)


def _wikitext(limit: int, rows: Sequence[Line]) -> Iterator[TaskPair]:
    """Bits per byte of whole paragraphs; titles and empty lines are left out."""
    rows, key = [row for row in rows if len(row["text"]) > 100][:limit], "wikitext"
    asked = [Request(key, str(n), 0, "", row["text"], 0) for n, row in enumerate(rows)]
    settings = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    yield TaskPair(Task(key, RollingKind.name, tuple(asked)), settings, rows)


def _gsm8k(limit: int, examples: Sequence[Line], rows: Sequence[Line]) -> Iterator[TaskPair]:
    """A written answer whose last number counts, after two solved examples; greedy."""
    shown, key = examples[: SHOTS["gsm8k"]], "gsm8k"
    rows = [{**row, "gold": row["answer"].split("#### ")[-1].strip()} for row in rows[:limit]]
    shown = [{**row, "gold": row["answer"].split("#### ")[-1].strip()} for row in shown]
    few = "".join(f"Question: {row['question']}\nAnswer: {row['gold']}\n\n" for row in shown)
    asked = [
        Prompt(key, str(n), f"{few}Question: {row['question']}\nAnswer:", (row["gold"],)) for n, row in enumerate(rows)
    ]
    taken = {"function": "regex", "regex_pattern": WRITING.extract[0], "group_select": -1}
    settings = {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "exact_match", "regexes_to_ignore": list(WRITING.ignore)}],
        "generation_kwargs": {"until": list(WRITING.until), "do_sample": False, "max_gen_toks": WRITING.max_tokens},
        "filter_list": [{"name": "last", "filter": [taken, {"function": "take_first"}]}],
        **_shown(len(shown)),
    }
    yield TaskPair(
        Task(key, GenerateKind.name, prompts=tuple(asked), shots=len(shown), writing=WRITING), settings, rows, shown
    )


def _lines(path: Path) -> list[Line]:
    lines = path.read_text(encoding="utf-8").split("\n")
    if path.suffix == ".txt":
        return [{"text": line.strip()} for line in lines]
    return [json.loads(line) for line in lines if line.strip()]


_MAKERS: Mapping[tuple[str, ...], Callable[..., Iterator[TaskPair]]] = {
    ("multiple-choice/arc_easy.jsonl",): _arc,
    ("mmlu/dev.jsonl", "mmlu/test.jsonl"): _mmlu,
    ("multiple-choice/lambada_openai.jsonl",): _lambada,
    ("wikitext-2/test.txt",): _wikitext,
    ("gsm8k/train.jsonl", "gsm8k/test.jsonl"): _gsm8k,
}
