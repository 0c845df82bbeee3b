"""Rows about growth: the corpus has what they need, and their counters see work that grows too fast."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import curation_scale
from benchmarks.curation_scale import FILE_BYTES, Counts, exponent, scale_down, write_corpus


def texts() -> list[str]:
    return ["\n\n".join(f"Paragraph {n} of text {text} has words {n * text} {n + text}." * 9 for n in range(40))
            for text in range(30)]  # fmt: skip


def documents(folder: Path) -> list[list[dict[str, str]]]:
    return [[json.loads(line) for line in path.open()] for path in sorted((folder / "text").iterdir())]


def test_a_larger_corpus_has_more_files_of_the_same_size_and_the_same_share_of_copies(tmp_path: Path) -> None:
    shares = []
    for factor in (1, 4):
        folder = tmp_path / str(factor)
        size = write_corpus(folder, texts(), 2 * factor * FILE_BYTES)
        files = documents(folder)
        assert size == sum(len(document["text"].encode()) for file in files for document in file)
        assert size == pytest.approx(2 * factor * FILE_BYTES, rel=0.15)
        assert all(FILE_BYTES <= sum(len(line["text"].encode()) for line in file) < FILE_BYTES + 30_000
                   for file in files[:-1])  # fmt: skip
        counts = Counter(document["text"] for file in files for document in file)
        shares.append(sum(count - 1 for count in counts.values()) / sum(counts.values()))
        first = {document["text"] for document in files[0]}
        assert any(document["text"] in first for document in files[1]), "copies lie in other files"
        questions = [json.loads(line)["question"] for line in (folder / "questions.jsonl").open()]
        assert any(text.endswith(tuple(questions)) for text in counts)
    assert shares[1] == pytest.approx(shares[0], rel=0.3)


def test_reads_of_every_file_for_every_item_have_the_exponent_2(tmp_path: Path) -> None:
    def work(job: list[Path], item: int) -> None:
        for path in job:
            path.read_bytes()

    reads = []
    for count in (20, 40, 80, 160):
        files = [tmp_path / str(n) for n in range(count)]
        for file in files:
            file.write_bytes(b"x" * 100)
        counts = Counts()
        counts.runner(files, "step", work, range(count))
        assert counts.steps["step"]["items"] == count
        reads.append(counts.steps["step"]["reads"])
    assert exponent([20, 40, 80, 160], reads) == pytest.approx(2, abs=0.05)


def test_an_engine_with_other_constants_is_not_measured_by_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curation_scale, "CONSTANTS", {"llama3.data.collect": ("NO_SUCH_BYTES",)})
    with pytest.raises(AttributeError, match="NO_SUCH_BYTES"):
        scale_down()
