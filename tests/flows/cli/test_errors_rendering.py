from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import typer
import yaml
from typer.testing import CliRunner

from herd.flows import run_lifecycle
from herd.flows.cli import errors
from herd.flows.cli.errors import mistakes, with_retries
from herd.flows.cli.main import app
from herd.llama3.evaluate.requests import read_requests
from herd.storage.artifact import DamagedArtifact
from herd.tasks.errors import GateFailed, TrainingFailed
from tests.llama3.evaluate.task_samples import CHOICE, quiz, write_lines


def workspace(folder: Path) -> Path:
    write_lines(folder / "data/quiz.jsonl", quiz(30))
    (folder / "quiz.yaml").write_text(yaml.safe_dump({**CHOICE, "shots": 2}))
    (folder / "suite.yaml").write_text(yaml.safe_dump({"tasks": ["quiz.yaml", "mmlu"]}))
    return folder


def ask(*arguments: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["eval", "render", *map(str, arguments)])
    return found.exit_code, found.output


def test_a_suite_is_rendered_and_what_is_missing_is_said(tmp_path: Path) -> None:
    place = workspace(tmp_path)
    code, text = ask(place / "suite.yaml", place / "out", "--data", place / "data", "--limit", 5)
    task = read_requests(place / "out/quiz").task
    assert code == 0
    assert task.questions == 5
    assert text.split()[:6] == ["task", "kind", "n", "shots", "chance", "digest"]
    assert text.split()[6:12] == ["quiz", "choice", "5", "2", "0.333", task.digest[:12]]
    assert "left out  mmlu: " in text
    assert [path.name for path in (place / "out").iterdir()] == ["quiz"]


def test_mistakes_are_lines_and_status_2(tmp_path: Path) -> None:
    place = workspace(tmp_path)
    for arguments, message in (
        (("nothing", place / "out"), "'nothing' is not a task of the library"),
        (("quick", place / "out"), "quick needs no data files"),
        (("mmlu", place / "out"), "nothing was rendered; give the folder of the files with --data"),
        ((place / "none.yaml", place / "out"), "cannot be read"),
    ):
        code, text = ask(*arguments)
        assert code == 2
        assert message in text
    assert ask(place / "quiz.yaml", place / "out", "--data", place / "data")[0] == 0
    assert "holds a task already" in ask(place / "quiz.yaml", place / "out", "--data", place / "data")[1]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("stages: none"), 2),
        (DamagedArtifact("a.txt changed"), 1),
        (TrainingFailed("rank 1 died"), 1),
        (GateFailed("the gate refused it"), 3),
        (OSError(errno.ENOSPC, "disk full"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_kind_of_end_has_its_exit_status(error: BaseException, status: int) -> None:
    with pytest.raises(typer.Exit) as left, mistakes():
        raise error
    assert left.value.exit_code == status


def test_a_busy_server_is_asked_again_and_a_refusal_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(run_lifecycle, "BEGUN", threading.Event())
    for answers, asked in (([503, 429, 0], 3), ([404, 0], 1)):
        given = iter(answers)

        def call(given: Iterator[int] = given) -> str:
            if status := next(given):
                answer = httpx.Response(status, request=httpx.Request("GET", "http://127.0.0.1"))
                answer.raise_for_status()
            return "done"

        with suppress(httpx.HTTPStatusError):
            assert with_retries(call) == "done"
        assert len(answers) - len(list(given)) == asked
