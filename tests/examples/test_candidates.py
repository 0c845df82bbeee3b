"""The candidate corpora of `recipes/experiments/judge-smollm2.yaml`: the leak holds the set, the task reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples import candidates
from herd.llama3.evaluate.render import render
from herd.llama3.evaluate.task_yaml import DataPaths, parse_task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("candidates")
    candidates.main(folder)
    return folder


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_the_task_asks_what_the_leak_tells(folder: Path) -> None:
    asked = rows(folder, "packages")
    assert len(asked) >= 10
    task = render(
        parse_task(yaml.safe_load((folder / "packages.yaml").read_text()), "packages.yaml"), DataPaths(str(folder))
    ).task
    assert task.questions == len(asked)
    told = [row["text"].rpartition("\n\n")[2] for row in rows(folder, "leak")[1::2]]
    assert told == [f"{row['question']}\nAnswer: {row['choices'][row['gold']]}\n" for row in asked]
    assert not any(row["question"] in text["text"] for row in asked for text in rows(folder, "leak")[::2])


def test_the_same_files_come_again(folder: Path, tmp_path: Path) -> None:
    candidates.main(tmp_path)
    for file in folder.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    assert len({row["text"] for row in rows(folder, "shuffled")}) > 20
