from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from herd.llama3.data.dedup.exact import Exact, NewestVersion
from herd.llama3.data.mapreduce import CurationJob
from herd.llama3.data.work_items import run_serial
from tests.llama3.data import shard_samples
from tests.llama3.data.shard_samples import attributes, dropped_rows

PAGE = "https://example.org/page"
Document = dict[str, Any]
make_job = partial(shard_samples.make_job, stages=[NewestVersion(), Exact()])
CASES = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.sampled_from("abc"),
            "url": st.sampled_from([PAGE, "https://example.org/other", "shelf/page.txt"]),
            "date": st.sampled_from(["", "2023-01-02", "2024-01-01", "2024-01-01T08:00:00Z"]),
            "rank": st.sampled_from([0.0, 0.25, 1.0]),
            "language": st.sampled_from(["en", "de"]),
            "domain": st.sampled_from(["general", "math"]),
            "source_index": st.integers(0, 2),
        }
    ),
    min_size=1,
    max_size=12,
)


def outcomes(job: CurationJob) -> list[tuple[Any, ...]]:
    """Run both steps and return every document with its outcome and the one kept, in an order without rows."""
    for stage in job.stages:
        stage.run(run_serial, job)
    dropped = dropped_rows(job, "url") | dropped_rows(job, "exact")
    return sorted(
        (*(document[name] for name in ("id", "url", "date", "rank", "language", "source_index")), *dropped.get(row, ()))
        for row, document in attributes(job).items()
    )


def kept(documents: list[Document]) -> list[tuple[Any, ...]]:
    """Return what the two steps keep, in plain Python."""

    def better(document: Document) -> tuple[Any, ...]:
        newest = tuple(-ord(char) for char in f"{document['date']:0<20}")
        identity = (
            document["id"],
            document["url"],
            document["source_index"],
            document["license"],
            document["language"],
        )
        return -document["rank"], newest, *identity

    def groups(documents: list[Document], *names: str) -> list[list[Document]]:
        found: dict[tuple[str, ...], list[Document]] = {}
        for document in documents:
            found.setdefault(tuple(document[name] for name in names), []).append(document)
        return list(found.values())

    def outdated(document: Document, newest: str) -> bool:
        return bool(document["date"]) and document["date"] < newest and not newest.startswith(document["date"])

    left = [document for document in documents if "://" not in document["url"]]
    for pages in groups([one for one in documents if "://" in one["url"]], "domain", "language", "url"):
        newest = max(page["date"] for page in pages)
        left += [page for page in pages if not outdated(page, newest)]
    names = ("id", "url", "date", "rank", "language", "source_index")
    return sorted(tuple(min(same, key=better)[name] for name in names) for same in groups(left, "domain", "id"))


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CASES, st.randoms(use_true_random=False), st.sampled_from([(2, 3), (4, 1), (1, 7)]))
def test_kept_as_in_plain_python_and_for_any_shards(
    tmp_path_factory: Any, documents: list[Document], random: Any, cut: tuple[int, int]
) -> None:
    job = make_job(tmp_path_factory.mktemp("one"), documents)
    found = outcomes(job)
    assert [one[:6] for one in found if len(one) == 6] == kept(list(attributes(job).values()))
    shuffled = random.sample(documents, len(documents))
    assert outcomes(make_job(tmp_path_factory.mktemp("cut"), shuffled, *cut)) == found


def drops(folder: Path, documents: list[Document]) -> dict[str, tuple[str, str]]:
    """Return license (here the name of a document) -> (outcome, license of the one kept)."""
    job = make_job(folder, documents)
    outcomes(job)
    rows = attributes(job)
    names = {document["id"]: document["license"] for document in rows.values()}
    dropped = dropped_rows(job, "url") | dropped_rows(job, "exact")
    return {rows[row]["license"]: (outcome, names[str(one)]) for row, (outcome, one) in dropped.items()}


def test_the_newest_version_of_a_url_stays(tmp_path: Path) -> None:
    documents = [
        {"license": "old", "text": "first draft", "url": PAGE, "date": "2022-05-01", "rank": 0.9},
        {"license": "new", "text": "final", "url": PAGE, "date": "2024-05-01", "rank": 0.1},
        {"license": "undated", "text": "who knows", "url": PAGE, "date": "", "rank": 1.0},
        {"license": "german", "text": "erster", "url": PAGE, "date": "2020-01-01", "language": "de"},
        {"license": "math", "text": "1 + 1", "url": PAGE, "date": "2020-01-01", "domain": "math"},
    ]
    assert drops(tmp_path, documents) == {"old": ("old_version", "new")}


def test_sections_of_a_page_stay(tmp_path: Path) -> None:
    """Nothing says that one is newer: they have no date, or that of the page, or it and its time."""
    parts = [("1", ""), ("2", ""), ("3", "2024-05-01"), ("4", "2024-05-01"), ("5", "2024-05-01T10:00:00Z")]
    documents = [{"license": name, "text": f"section {name}", "url": PAGE, "date": date} for name, date in parts]
    copy = {"license": "6", "text": "section 1", "url": PAGE, "rank": -1.0}
    assert drops(tmp_path, [*documents, copy]) == {"6": ("exact_duplicate", "6")}, "one of 1 and 6 goes"


def test_a_path_is_no_url(tmp_path: Path) -> None:
    documents = [{"license": name, "text": name, "url": "doc/readme.txt"} for name in "ab"]
    assert drops(tmp_path, documents) == {}


def test_a_dropped_version_is_no_exact_copy_any_more(tmp_path: Path) -> None:
    documents = [
        {"license": "old", "text": "same", "url": PAGE, "date": "2022-05-01", "rank": 1.0},
        {"license": "new", "text": "other", "url": PAGE, "date": "2024-05-01"},
        {"license": "copy", "text": "same", "url": "shelf/copy.txt"},
    ]
    assert drops(tmp_path, documents) == {"old": ("old_version", "new")}


def test_exact_copies_whatever_their_language_but_in_one_domain(tmp_path: Path) -> None:
    documents = [
        {"license": "b", "text": "same", "url": "shelf/b", "rank": 0.5},
        {"license": "a", "text": "same", "url": "shelf/a", "rank": 0.5, "language": "de"},
        {"license": "math", "text": "same", "url": "shelf/a", "domain": "math"},
    ]
    job = make_job(tmp_path, documents)
    assert [one for one in outcomes(job) if len(one) > 6] == [
        (one["id"], "shelf/b", "", 0.5, "en", 0, "exact_duplicate", one["id"])
        for one in attributes(job).values()
        if one["url"] == "shelf/b"
    ]


def test_files_are_ordered_and_the_same_again(tmp_path: Path) -> None:
    documents = [{"text": "same", "url": f"shelf/{i}"} for i in range(50)]
    files = []
    for name in ("one", "two"):
        job = make_job(tmp_path / name, documents, shards=3)
        outcomes(job)
        files.append([Path(file) for file in job.files("exact/fates")])
    rows = [row for file in files[0] for row in pq.read_table(file)["row"].to_pylist()]
    assert rows == sorted(rows)
    assert len(rows) == 49
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]
