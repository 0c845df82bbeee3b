from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.evaluate.held_out import (
    ValidationDocument,
    _ngram_bits,
    ngram_bits_per_byte,
    read_validation_documents,
)
from herd.llama3.evaluate.requests import document_requests
from herd.llama3.evaluate.scores import Sample, score_table
from herd.llama3.evaluate.task import Task
from herd.llama3.recipe.load import load_recipe

LANGUAGES = ["de", "fr", "es", "it", "pt", "ja", "zh", "hi", "th"]


def write(folder: Path, domain: str, languages: list[str]) -> None:
    texts = [f"{language} {place}" for place, language in enumerate(languages)]
    rows = [
        {
            "id": hashlib.sha256(text.encode()).hexdigest(),
            "text": text,
            "language": text.split()[0],
            "split": "held_out",
            "url": "",
        }
        for text in texts
    ]
    (folder / "documents").mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(sorted(rows, key=lambda row: row["id"]))
    pq.write_table(table, folder / "documents" / f"{domain}-00000.parquet")


def test_languages_of_the_multilingual_domain_take_turns(tmp_path: Path) -> None:
    """Nine documents of 200 are in rare languages; twenty chosen ones hold them all."""
    write(tmp_path, "multilingual", ["de"] * 200 + LANGUAGES)
    chosen = read_validation_documents(tmp_path, 20, 99)
    counts = {language: sum(document.language == language for document in chosen) for language in LANGUAGES}
    assert counts == {**dict.fromkeys(LANGUAGES, 1), "de": 12}
    assert [document.id for document in chosen] == sorted(document.id for document in chosen)
    assert read_validation_documents(tmp_path, 20, 99) == chosen


def test_other_domains_take_their_first_documents(tmp_path: Path) -> None:
    write(tmp_path, "general", ["en"] * 30 + ["de"] * 30)
    chosen = read_validation_documents(tmp_path, 10, 99)
    table = pq.read_table(tmp_path / "documents/general-00000.parquet").to_pylist()
    assert [document.id for document in chosen] == [row["id"] for row in table[:10]]


@given(
    found=st.lists(st.tuples(st.sampled_from(LANGUAGES), st.floats(1, 99), st.integers(1, 99)), min_size=1, max_size=20)
)
def test_languages_and_documents_are_averaged_as_said(checkout: Path, found: list[tuple[str, float, int]]) -> None:
    recipe = load_recipe(checkout / "recipes/quickstart.yaml")
    key = "eval/bpb/multilingual"
    documents = [
        ValidationDocument(f"{n:02}", "multilingual", "x" * size, name) for n, (name, _, size) in enumerate(found)
    ]
    task = Task(key, "rolling", tuple(document_requests(key, documents)))
    items = [
        Sample(key, d.id, bits, size, 1, None, None, d.language)
        for d, (_, bits, size) in zip(documents, found, strict=True)
    ]
    scores, rows = score_table(recipe, [task], [items], {})
    assert abs(scores["eval/bpb_macro"].value - sum(bits / size for _, bits, size in found) / len(found)) < 1e-9
    for language in {name for name, _, _ in found}:
        mine = [(bits, size) for name, bits, size in found if name == language]
        score = scores[f"eval/bpb_language/{language}"]
        assert abs(score.value - sum(bits for bits, _ in mine) / sum(size for _, size in mine)) < 1e-9
        assert score.n == len(mine) == sum(row.key == score.key for row in rows)
    assert len(rows) == 3 * len(found)


def test_text_of_no_known_language_has_no_score_of_its_own(checkout: Path) -> None:
    recipe, key = load_recipe(checkout / "recipes/quickstart.yaml"), "eval/bpb/multilingual"
    documents = [ValidationDocument(name, "multilingual", "x", name) for name in ("de", "und", "")]
    task = Task(key, "rolling", tuple(document_requests(key, documents)))
    items = [Sample(key, each.id, 1.0, 1.0, 1, None, None, each.language) for each in documents]
    scores, _ = score_table(recipe, [task], [items], {})
    assert [name for name in scores if "bpb_language" in name] == ["eval/bpb_language/de"]


def plainly(counted: bytes, before: bytes, byte: int) -> float:
    """Return the probability of `byte` after `before`, counted one by one."""
    probability = 1 / 256
    for size in range(len(before) + 1):
        context = before[len(before) - size :]
        after = [counted[at + size] for at in range(len(counted) - size) if counted[at : at + size] == context]
        if after:
            kinds = len(set(after))
            probability = (after.count(byte) + kinds * probability) / (len(after) + kinds)
    return probability


@given(st.binary(max_size=60).map(lambda data: bytes(byte % 3 for byte in data)), st.binary(min_size=1, max_size=12))
def test_the_5_gram_is_that_of_plain_counting_and_adds_up_to_1(counted: bytes, data: bytes) -> None:
    scored = bytes(byte % 4 for byte in data)
    bits = _ngram_bits(np.frombuffer(counted, np.uint8), np.frombuffer(scored, np.uint8))
    for at, byte in enumerate(scored):
        assert 2 ** -bits[at] == pytest.approx(plainly(counted, scored[max(0, at - 4) : at], byte), rel=1e-9)
    assert sum(plainly(counted, scored[-4:], byte) for byte in range(256)) == pytest.approx(1)


def test_the_baseline_is_told_by_domain_and_knows_what_it_has_counted(tmp_path: Path) -> None:
    rows = [
        {"id": "1", "text": "the cat sat on the mat. " * 200, "source_index": 0, "language": "en", "split": "train"}
    ]
    (tmp_path / "documents").mkdir()
    for domain in ("general", "code"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "documents" / f"{domain}-00000.parquet")
    documents = [
        ValidationDocument("a", "general", "the cat sat on the mat. " * 20),
        ValidationDocument("b", "code", "".join(map(chr, range(33, 127)))),
    ]
    found = ngram_bits_per_byte(tmp_path, {"general": 0.5, "code": 0.5}, documents)
    assert list(found) == ["general", "code"]
    assert found["general"] < 0.2
    assert found["code"] > 6
