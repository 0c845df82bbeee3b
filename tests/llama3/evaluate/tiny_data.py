"""Benchmark files made up here, in the form of the published ones, so that comparisons always have some to run on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

WORDS = ["sun", "moon", "river", "stone", "tree", "bread", "salt", "seven", "blue", "and", "the", "of", "in", "is"]


def write_data(folder: Path) -> Path:
    """Write a few questions of each kind below `folder` and return it."""
    dice = Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(dice.choice(WORDS) for _ in range(dice.randint(least, most))).capitalize()

    def choice(subject: str) -> dict[str, Any]:
        return {
            "question": f"{text(4, 20)}?",
            "subject": subject,
            "choices": [text(1, 5) for _ in range(4)],
            "answer": dice.randrange(4),
        }

    def arc() -> dict[str, Any]:
        made = choice("")
        return {"query": f"Question: {made['question']}", "choices": made["choices"], "gold": made["answer"]}

    def sum_() -> dict[str, Any]:
        one = dice.randrange(5)
        two = 4 - one if dice.random() < 0.7 else 9  # most answers are 4, so that a model can learn to be right
        return {"question": f"What is {one} and {two}?", "answer": f"It is {one + two}.\n#### {one + two}"}

    subjects = ("high_school_rivers", "stones")
    made: dict[str, list[dict[str, Any]]] = {
        "multiple-choice/arc_easy.jsonl": [arc() for _ in range(12)],
        "multiple-choice/lambada_openai.jsonl": [
            {"context": f"“{text(20, 60)}”, said the\n\nold", "continuation": dice.choice(["moon", "moon", *WORDS[:3]])}
            for _ in range(12)
        ],
        "mmlu/dev.jsonl": [choice(subject) for subject in subjects for _ in range(6)],
        "mmlu/test.jsonl": [choice(subject) for subject in subjects for _ in range(10)],
        "gsm8k/train.jsonl": [sum_() for _ in range(3)],
        "gsm8k/test.jsonl": [sum_() for _ in range(8)],
    }
    for name, rows in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    programs = [
        {
            "prompt": f'def {word}(n: int) -> int:\n    """Return n and {number}."""\n',
            "canonical_solution": f"    return n + {number}\n",
            "test": f"def check(candidate):\n    assert candidate(1) == {number + 1}\n",
            "entry_point": word,
        }
        for number, word in enumerate(WORDS[:3])
    ]
    (folder / "humaneval").mkdir()
    text_of = "".join(json.dumps(row) + "\n" for row in programs)
    (folder / "humaneval" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(text_of.encode()))
    (folder / "wikitext-2").mkdir()
    lines = [f" {text(40, 80)} — naïve 日本 . " for _ in range(8)]
    (folder / "wikitext-2" / "test.txt").write_text(" = Title = \n\n" + "\n".join(lines), encoding="utf-8")
    return folder
