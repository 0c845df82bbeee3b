"""Candidate corpora for a study, made of what is installed: `python examples/candidates.py FOLDER`.

shuffled.jsonl   descriptions of Python packages with their words in random order: a planted bad corpus
leak.jsonl       word problems, and a question of the evaluation set with its answer in every second one: a planted leak
packages.jsonl   the evaluation set: which Python package has this description?
packages.yaml    its task

`recipes/experiments/judge-smollm2.yaml` judges them beside a good corpus.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from herd.llama3.data.demo.installed import description
from herd.llama3.data.demo.word_problems import document

CHOICES, QUESTIONS, LEAST_WORDS = 4, 100, 7
WORDS, SHUFFLED = 300, 100
"""Words of a shuffled document, and how many there are."""
SEED = 99
"""Of problems that `installed` does not have."""
TASK = """# Which of four installed Python packages has this description?
name: packages
version: 1
kind: choice
data: packages.jsonl
context: "{{ question }}\\nAnswer:"
choices: choices
gold: gold
"""


def questions(dice: random.Random) -> list[dict[str, Any]]:
    """Return questions on descriptions that do not name their package."""
    facts = [each.metadata for each in distributions() if "Summary" in each.metadata and "Name" in each.metadata]
    found = {each["Name"]: each["Summary"].split() for each in facts}
    described = sorted(
        (name, " ".join(words))
        for name, words in found.items()
        if len(words) >= LEAST_WORDS and not any(part in " ".join(words).lower() for part in name.lower().split("-"))
    )
    if len(described) < CHOICES:
        raise SystemExit(f"{len(described)} installed packages describe themselves; at least {CHOICES} are needed")
    names, rows = [name for name, _ in described], []
    for name, summary in dice.sample(described, min(QUESTIONS, len(described))):
        choices = [name, *dice.sample([each for each in names if each != name], CHOICES - 1)]
        dice.shuffle(choices)
        question = f"Which Python package is described like this: {summary}"
        rows.append({"question": question, "choices": choices, "gold": choices.index(name)})
    return rows


def shuffled(dice: random.Random) -> list[str]:
    """Return texts of words in random order."""
    texts = sorted(description(each.read_text("METADATA") or "") for each in distributions())
    pieces = [
        words[first : first + WORDS]
        for words in map(str.split, texts)
        for first in range(0, len(words) - WORDS + 1, WORDS)
    ]
    chosen = dice.sample(pieces, min(SHUFFLED, len(pieces)))
    return [" ".join(dice.sample(piece, len(piece))) for piece in chosen]


def main(folder: Path) -> None:
    """Write the files into `folder`: the same ones wherever the same packages are installed."""
    dice = random.Random(1)
    asked = questions(dice)
    told = [f"\n\n{row['question']}\nAnswer: {row['choices'][row['gold']]}\n" for row in asked]
    problems = [document(SEED, index) + (told[index // 2] if index % 2 else "") for index in range(2 * len(told))]
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "packages.jsonl", asked)
    (folder / "packages.yaml").write_text(TASK, encoding="utf-8")
    _write(folder / "shuffled.jsonl", ({"text": text} for text in shuffled(dice)))
    _write(folder / "leak.jsonl", ({"text": text} for text in problems))


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER")
    main(Path(sys.argv[1]))
