from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.evaluate.render import Rendered
from herd.llama3.evaluate.requests import read_requests, write_requests
from tests.llama3.evaluate.task_samples import quiz, rendered

CODE: dict[str, Any] = {"kind": "code", "choices": None, "gold": None, "tests": "assert {{ answer }}"}
GENERATE: dict[str, Any] = {"kind": "generate", "choices": None, "gold": "choices", "writing": {"until": ["\n"]}}


def task(folder: Path, **fields: object) -> Rendered:
    return rendered(folder, quiz(9, subjects=3), group="{{ subject }}", **fields)


@pytest.mark.parametrize("fields", [{"shots": 2, "average": "groups"}, {"kind": "letters"}, CODE, GENERATE])
def test_a_task_comes_back_as_it_was_written(tmp_path: Path, fields: dict[str, Any]) -> None:
    made = task(tmp_path, **fields)
    write_requests(made, tmp_path / "out")
    assert read_requests(tmp_path / "out") == made
    facts = json.loads((tmp_path / "out/task.json").read_text())
    assert (facts["digest"], facts["sources"]) == (made.task.digest, made.sources)
    lines = gzip.decompress((tmp_path / "out/requests.jsonl.gz").read_bytes()).splitlines()
    assert len(lines) == len(made.task.requests or made.task.prompts)


def test_equal_tasks_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_requests(task(tmp_path), tmp_path / name)
    for name in ("task.json", "requests.jsonl.gz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "a/requests.jsonl.gz").read_bytes()[4:8] == bytes(4), "the header holds no time"


def test_a_folder_with_a_task_is_not_written_over(tmp_path: Path) -> None:
    write_requests(task(tmp_path), tmp_path / "out")
    with pytest.raises(ValueError, match="out: holds a task already; name another folder"):
        write_requests(task(tmp_path), tmp_path / "out")


@pytest.mark.parametrize(
    ("old", "new"), [("What is 3", "What is 4"), ('"gold":0', '"gold":1'), ('"group":"s0"', '"group":"s1"')]
)
def test_changed_requests_are_refused(tmp_path: Path, old: str, new: str) -> None:
    write_requests(task(tmp_path), tmp_path / "out")
    path = tmp_path / "out/requests.jsonl.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    assert old in text
    path.write_bytes(gzip.compress(text.replace(old, new, 1).encode()))
    with pytest.raises(ValueError, match=r"out: the digest of its requests is [0-9a-f]{64}, task\.json says .*changed"):
        read_requests(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "value"), [("version", 2), ("normalize", "none"), ("shots", 5), ("average", "groups")]
)
def test_changed_rules_are_refused(tmp_path: Path, name: str, value: object) -> None:
    write_requests(task(tmp_path), tmp_path / "out")
    path = tmp_path / "out/task.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(ValueError, match="the digest of its requests is"):
        read_requests(tmp_path / "out")


def test_damaged_folders_are_refused_by_file(tmp_path: Path) -> None:
    write_requests(task(tmp_path), tmp_path / "out")
    requests, facts = tmp_path / "out/requests.jsonl.gz", tmp_path / "out/task.json"
    whole = requests.read_bytes()
    for damaged in (whole[:-20], b"", gzip.compress(b'{"document": "a"}\n'), gzip.compress(b"no json\n")):
        requests.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"requests\.jsonl\.gz: is damaged|the digest of its requests"):
            read_requests(tmp_path / "out")
    requests.unlink()
    with pytest.raises(ValueError, match=r"requests\.jsonl\.gz: cannot be read"):
        read_requests(tmp_path / "out")
    for text, message in (("{}", "lacks key, kind"), ("no", "is not JSON")):
        facts.write_text(text)
        with pytest.raises(ValueError, match=rf"task\.json: {message}"):
            read_requests(tmp_path / "out")
    facts.unlink()
    with pytest.raises(ValueError, match=r"task\.json: cannot be read"):
        read_requests(tmp_path / "out")
