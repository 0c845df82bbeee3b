"""Small task files and their data, as tests write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from herd.llama3.evaluate.render import Rendered, render
from herd.llama3.evaluate.task_yaml import DataPaths, parse_task

CHOICE: dict[str, Any] = {
    "name": "quiz",
    "kind": "choice",
    "data": "quiz.jsonl",
    "context": "Question: {{ question }}",
    "choices": "choices",
    "gold": "answer",
    "before_answer": "\nAnswer: ",
}


def quiz(count: int, subjects: int = 1) -> list[dict[str, Any]]:
    """Return questions with three choices each, subjects in turn."""
    return [
        {
            "question": f"What is {n} plus one?",
            "choices": [str(n), str(n + 1), "none of them"],
            "answer": n % 3,
            "subject": f"s{n % subjects}",
        }
        for n in range(count)
    ]


def write_lines(path: Path, rows: Sequence[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    return path


def rendered(folder: Path, rows: Sequence[object], most: int | None = None, **fields: object) -> Rendered:
    """Return the task CHOICE with `fields` changed (None: left out) over `rows`."""
    write_lines(folder / "quiz.jsonl", rows)
    made = {name: value for name, value in {**CHOICE, **fields}.items() if value is not None}
    return render(parse_task(made, "quiz.yaml"), DataPaths(str(folder)), most)
