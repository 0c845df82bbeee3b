"""What errs together: pages of a site, files of a repository, records of a file, questions about a passage."""

from __future__ import annotations

import pytest

from herd.llama3.evaluate.held_out import clusters_of
from herd.llama3.evaluate.render import passages


@pytest.mark.parametrize(
    ("urls", "clusters"),
    [
        (
            ["https://www.Site.org/a", "http://site.org:80/b?c", "https://other.org", "https://me@other.org/x"],
            ["site.org", "site.org", "other.org", "other.org"],
        ),
        (
            [
                "https://github.com/one/two/blob/main/a.py",
                "https://github.com/one/three",
                "https://gitlab.com/one/two/-/b",
            ],
            ["github.com/one/two", "github.com/one/three", "gitlab.com/one/two"],
        ),
        (
            ["s3://bucket/a.jsonl:17", "s3://bucket/a.jsonl:18", "/data/b.parquet:3"],
            ["s3://bucket/a.jsonl"] * 2 + ["/data/b.parquet"],
        ),
        (
            ["/data/code/one/src/a.py", "/data/code/one/b.py", "/data/code/two/a.py"],
            ["/data/code/one", "/data/code/one", "/data/code/two"],
        ),
        (
            ["/data/books/emma.txt", "/data/books/persuasion.txt"],
            ["/data/books/emma.txt", "/data/books/persuasion.txt"],
        ),
        (["s3://b/repos/one/a.c", "s3://b/repos/two/a.c"], ["s3://b/repos/one", "s3://b/repos/two"]),
        (
            ["packages/numpy/core/a.py", "packages/numpy/b.py#3", "stdlib/json/c.py", "problems/0/17", ""],
            ["packages/numpy", "packages/numpy", "stdlib/json", "", ""],
        ),
        (["/alone/a.txt"], ["/alone/a.txt"]),
        ([], []),
    ],
)
def test_the_cluster_of_a_document_follows_from_its_address(urls: list[str], clusters: list[str]) -> None:
    assert clusters_of(urls) == clusters


PASSAGE = "A long passage about the history of the town and of the river, which has many bends, told at length by {}. "


def test_questions_about_one_passage_are_one_cluster() -> None:
    asked = {
        f"{writer}-{number}": f"Passage: {PASSAGE.format(writer)}\nQuestion: number {number}?"
        for writer in (f"writer {letter}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")
        for number in range(3)
    }
    found = passages(asked)
    assert found.keys() == set()  # they share their beginning with all others
    asked = {name: text.replace("A long passage", f"{name[:9]} tells a long story") for name, text in asked.items()}
    found = passages(asked)
    assert found.keys() == asked.keys()
    assert len(set(found.values())) == 26
    assert all(found[name][:9] == name[:9] for name in asked)


def test_instructions_that_all_questions_share_are_no_passage() -> None:
    rules = "Follow these rules with care and answer with one word, which has to be among those that are given. " * 3
    assert passages({f"{number}": f"{rules}{number} is what?" for number in range(50)}) == {}
    assert passages({}) == passages({"a": "x" * 500}) == passages({"a": "x" * 500, "b": "x" * 500}) == {}


def test_short_questions_are_their_own() -> None:
    assert passages({f"{number}": f"What is {number} + {number}?" for number in range(200)}) == {}
