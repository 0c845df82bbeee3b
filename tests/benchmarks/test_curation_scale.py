"""Rows about growth: the corpus has what they need, and their counters see work that grows too fast."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import curation_scale
from benchmarks.corpus import Page
from benchmarks.curation_15t import BUSY, TEXT, estimate, page
from benchmarks.curation_near import NearJob, near_pages
from benchmarks.curation_scale import (
    FILE_BYTES,
    KILL_BYTES,
    METHODS,
    Counts,
    exponent,
    requests_of,
    scale_down,
    write_corpus,
)
from benchmarks.measure import Cost
from benchmarks.pairs import near_pairs


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
    assert exponent([20, 40, 80, 160], reads) == pytest.approx(
        2, abs=0.15
    )  # the kernel counts what other threads of this process read, too


VICTIM = """
import sys
from pathlib import Path
from benchmarks.curation_scale import Killed
def work(job, item): job.write_bytes(b"x" * 1000)
Killed(work, 1, Path(sys.argv[2]))(Path(sys.argv[1]), int(sys.argv[3]))
"""


@pytest.mark.slow
def test_a_victim_ends_in_the_middle_of_a_file_and_once(tmp_path: Path, checkout: Path) -> None:
    def end(name: str, item: int) -> tuple[int, int]:
        words = [sys.executable, "-c", VICTIM, str(tmp_path / name), str(tmp_path / "killed"), str(item)]
        return subprocess.run(words, cwd=checkout, check=False).returncode, (tmp_path / name).stat().st_size

    assert end("other", 0) == (0, 1000)
    assert end("first", 1) == (-signal.SIGXFSZ, KILL_BYTES)
    assert end("again", 1) == (0, 1000)


def test_an_engine_with_other_constants_is_not_measured_by_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curation_scale, "CONSTANTS", {"herd.llama3.data.collect": {"NO_SUCH_BYTES": 1}})
    scale_down.cache_clear()
    with pytest.raises(AttributeError, match="NO_SUCH_BYTES"):
        scale_down()


def test_requests_are_counted_by_folder_of_the_root_and_method() -> None:
    log = """127.0.0.1 - - [x] "PUT /b/p/x1/corpus/text/0.jsonl HTTP/1.1" 200 -
127.0.0.1 - - [x] "GET /b?list-type=2&prefix=p/x1/curated/&delimiter=/ HTTP/1.1" 200 -
127.0.0.1 - - [x] "HEAD /b/p/x1/curated/a%20b HTTP/1.1" 404 -
127.0.0.1 - - [x] "GET /b/p/x10/curated/a HTTP/1.1" 200 -
127.0.0.1 - - [x] "POST /b/p/x1/curated/a?uploads HTTP/1.1" 200 -
"""
    none = dict.fromkeys(METHODS, 0)
    assert requests_of(log, "s3://b/p/x1") == {
        "corpus": {**none, "PUT": 1},
        "curated": {**none, "LIST": 1, "HEAD": 1, "POST": 1},
    }


def sizes(power: float) -> list[dict[str, Any]]:
    """Four corpora whose processor time grows with this power of the bytes."""
    return [{"mb": 10 * n, "files": 10 * n, "cpu_s": 20 * n**power} for n in (1, 2, 4, 8)]


WHOLE = {"mb": 80, "cpu_s": 100.0, "peak_mb": 1000.0}
COUNT = {"tasks": 1e6, "files": 2e6, "reads": 3e6, "writes": 4e6, "read_bytes": 6e14, "written_bytes": 2e14,
         "usd": 50.0, "shards": 8000.0}  # fmt: skip


def test_15t_is_the_measured_processor_time_of_the_text_and_what_is_counted() -> None:
    made = estimate(sizes(1), WHOLE, COUNT)
    assert [made["tasks"], made["files"], made["reading_requests"], made["writing_requests"]] == [1e6, 2e6, 3e6, 4e6]
    assert made["core_h"] == pytest.approx(100 / 80 * TEXT / 1e6 / 3600)
    assert made["task_gib"] == pytest.approx(1e9 / 2**30)
    by_name = {machine["name"]: machine for machine in made["machines"]}
    assert by_name["c7i.48xlarge"]["tasks_at_once"] == 192
    assert by_name["c7i.48xlarge"]["machine_h"] == pytest.approx(made["core_h"] / BUSY / 192)
    assert by_name["c7i.48xlarge"]["network_h"] == pytest.approx(8e14 / 6.25e9 / 3600)
    more = estimate(sizes(1), {**WHOLE, "peak_mb": 4 * 1024**3 / 1e6}, COUNT)
    assert {machine["name"]: machine["tasks_at_once"] for machine in more["machines"]}["c7i.48xlarge"] == 96
    assert more["usd"] > made["usd"], "memory that a task needs costs machines"


def test_15t_of_an_engine_that_reads_every_shard_in_every_item_is_not_estimated_as_if_it_did_not() -> None:
    linear, quadratic = (estimate(sizes(power), WHOLE, COUNT) for power in (1, 2))
    assert quadratic["core_h"] / linear["core_h"] == pytest.approx(8000 / 80, rel=1e-6)


def test_the_page_has_both_engines_beside_each_other() -> None:
    row = {"name": "scale/cpu", "value": 1.5, "unit": "power", "target": "<= 1.05", "detail": {}}
    text = page([{"rows": [row]}, {"rows": [{**row, "value": 1.01}]}])
    assert "| scale/cpu | 1.5 | 1.01 | power | <= 1.05 |" in text


def test_recall_and_precision_are_of_documents_and_their_true_pairs() -> None:
    pages = [Page("", str(place)) for place in range(5)]
    pairs = {(0, 1): 0.9, (1, 2): 0.85, (3, 4): 0.6}

    def job(*kept: int) -> NearJob:
        return NearJob(pages, pairs, {"ours": Cost(1, 1, 1, {"kept": [str(place) for place in kept]})})

    assert (job(1, 3, 4).recall("ours"), job(1, 3, 4).precision("ours")) == (1.0, 1.0)
    assert job(0, 1, 3, 4).recall("ours") == 0.5
    assert job(1, 3).precision("ours") == pytest.approx(2 / 3), "documents 3 and 4 differ"


def test_planted_copies_are_alike_and_variants_are_not() -> None:
    words = [f"w{n}x" for n in range(60_000)]
    prose = ["\n\n".join(" ".join(words[at : at + 60]) for at in range(0, len(words), 60))]
    pages = near_pages(prose, 1_000_000)
    pairs = near_pairs([page.text for page in pages], 5, least=0.2)
    assert len({page.url for page in pages}) == len(pages)
    assert any(score == 1 for score in pairs.values())
    assert not any(0.66 < score < 0.75 for score in pairs.values()), "nothing is planted near the bound of 0.7"
