"""Tasks as herd and lm-eval both know them: the same questions, prompts and rules, from the same files.

Of each task there is herd's form (`Task`) and lm-eval's (a YAML file and JSON lines). Prompts are those that lm-eval
ships for ARC, MMLU, LAMBADA, GSM8K and HumanEval, and lighteval's for MMLU by whole answers. WikiText is read by the
paragraph, because herd reads what is longer than its window in overlapping windows and lm-eval in disjoint ones, which
are different numbers by design.

Files, below the data folder: `multiple-choice/{arc_easy,arc_challenge,lambada_openai}.jsonl`, `mmlu/{dev,test}.jsonl`,
`wikitext-2/test.txt`, `gsm8k/{train,test}.jsonl`, `humaneval/HumanEval.jsonl.gz`. A task without its files is left out.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from herd.llama3.evaluate.generation_settings import GenerationSettings
from herd.llama3.evaluate.task import ChoiceKind, ClozeKind, CodeKind, GenerateKind, Prompt, Request, RollingKind, Task

Line = dict[str, Any]
LETTERS = "ABCD"
SUBJECTS = 4
"""Subjects of MMLU that the questions with letters are shared among."""
SHOTS = {"mmlu": 5, "gsm8k": 5}
WORKED = GenerationSettings(max_tokens=256, until=("Question:", "\n\n"), extract=(r"(-?[0-9][0-9,]*)",), ignore=(",",))
"""How GSM8K's answers are written and compared."""
PROGRAM = GenerationSettings(max_tokens=256, until=("\nclass", "\ndef", "\n#", "\nif", "\nprint"))
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
                "writing": TypeAdapter(GenerationSettings).validate_python(facts["writing"]),
            }
        )
        for facts in json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
    ]


def _arc(key: str, limit: int, rows: Sequence[Line]) -> Iterator[TaskPair]:
    asked = [{**row, "question": row["query"].strip()} for row in rows[:limit]]
    yield _answers(key, asked, "{{question}}\nAnswer:", lambda row: f"{row['question']}\nAnswer:")


def _mmlu_cloze(limit: int, rows: Sequence[Line]) -> Iterator[TaskPair]:
    """Questions of all subjects, as many of each as its size gives it."""
    chosen = [rows[n * len(rows) // limit] for n in range(limit)] if limit < len(rows) else rows
    asked = [
        {**row, "about": row["subject"].replace("_", " "), "gold": row["answer"], "question": row["question"].strip()}
        for row in chosen
    ]
    text = "The following are questions about {about}.\nQuestion: {question}\nAnswer:"
    jinja = text.replace("{", "{{").replace("}", "}}")
    yield _answers("mmlu_cloze", asked, jinja, lambda row: text.format(**row))


def _answers(key: str, rows: Sequence[Line], jinja: str, context: Callable[[Line], str]) -> TaskPair:
    """Whole answers to choose from; `acc` and `acc_norm` (nats per character)."""
    asked = [
        Request(key, str(n), i, context(row), f" {choice}", row["gold"], joined=1)
        for n, row in enumerate(rows)
        for i, choice in enumerate(row["choices"])
    ]
    settings = {
        "output_type": "multiple_choice",
        "doc_to_text": jinja,
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    return TaskPair(Task(key, ChoiceKind.name, tuple(asked), normalize="characters"), settings, rows)


def _mmlu(limit: int, examples: Sequence[Line], rows: Sequence[Line]) -> Iterator[TaskPair]:
    """Letters to choose from, after five solved examples of the subject."""
    for subject in sorted({row["subject"] for row in rows})[:SUBJECTS]:
        shown = [row for row in examples if row["subject"] == subject][: SHOTS["mmlu"]]
        asked = [row for row in rows if row["subject"] == subject][: max(1, limit // SUBJECTS)]
        yield _subject(subject, shown, asked)


def _subject(subject: str, shown: Sequence[Line], rows: Sequence[Line]) -> TaskPair:
    key = f"mmlu_letters_{subject}"
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
    """A worked answer whose last number counts, after five; greedy."""
    key, gold = "gsm8k", "answer.split('#### ')[-1].strip()"
    rows, shown = rows[:limit], examples[: SHOTS["gsm8k"]]
    few = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in shown)
    asked = [
        Prompt(
            key,
            str(n),
            f"{few}Question: {row['question']}\nAnswer:",
            (row["answer"].split("#### ")[-1].strip(),),
        )
        for n, row in enumerate(rows)
    ]
    taken = {"function": "regex", "regex_pattern": WORKED.extract[0], "group_select": -1}
    settings = {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": f"{{{{{gold}}}}}",
        "metric_list": [{"metric": "exact_match", "regexes_to_ignore": list(WORKED.ignore)}],
        "generation_kwargs": _greedy(WORKED),
        "filter_list": [{"name": "last", "filter": [taken, {"function": "take_first"}]}],
        **_shown(len(shown)),
    }
    settings["fewshot_config"]["doc_to_target"] = "{{answer}}"
    task = Task(key, GenerateKind.name, prompts=tuple(asked), shots=len(shown), writing=WORKED)
    yield TaskPair(task, settings, rows, shown)


def _humaneval(limit: int, rows: Sequence[Line]) -> Iterator[TaskPair]:
    """The body of a function; the texts are compared, and herd runs them: lm-eval has no sandbox."""
    rows, key = rows[:limit], "humaneval"
    asked = [
        Prompt(key, str(n), row["prompt"], (), f"{row['test']}\ncheck({row['entry_point']})\n", row["prompt"])
        for n, row in enumerate(rows)
    ]
    settings = {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{canonical_solution}}",
        "metric_list": [{"metric": "bypass", "aggregation": "bypass", "higher_is_better": True}],
        "generation_kwargs": _greedy(PROGRAM),
    }
    yield TaskPair(Task(key, CodeKind.name, prompts=tuple(asked), writing=PROGRAM), settings, rows)


def _greedy(writing: GenerationSettings) -> dict[str, Any]:
    return {"until": list(writing.until), "do_sample": False, "max_gen_toks": writing.max_tokens}


def _lines(path: Path) -> list[Line]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    lines = text.split("\n")
    if path.suffix == ".txt":
        return [{"text": line.strip()} for line in lines]
    return [json.loads(line) for line in lines if line.strip()]


_MAKERS: Mapping[tuple[str, ...], Callable[..., Iterator[TaskPair]]] = {
    ("multiple-choice/arc_easy.jsonl",): partial(_arc, "arc_easy"),
    ("multiple-choice/arc_challenge.jsonl",): partial(_arc, "arc_challenge"),
    ("mmlu/dev.jsonl", "mmlu/test.jsonl"): _mmlu,
    ("mmlu/test.jsonl",): _mmlu_cloze,
    ("multiple-choice/lambada_openai.jsonl",): _lambada,
    ("wikitext-2/test.txt",): _wikitext,
    ("gsm8k/train.jsonl", "gsm8k/test.jsonl"): _gsm8k,
    ("humaneval/HumanEval.jsonl.gz",): _humaneval,
}
