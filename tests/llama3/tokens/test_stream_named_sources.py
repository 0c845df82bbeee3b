"""Sources that stand apart: datasets of their own, from which only stages that add them read."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.recipe.load import resolved
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.mix import dataset_shares, mix_datasets
from herd.llama3.tokens.shards import tokenize
from herd.llama3.tokens.stream import TokenStream
from herd.llama3.tokens.tokenizer import Tokenizer, make_tokenizer
from tests.llama3.tokens.token_samples import recipe, stage, write_documents, write_shards

pytestmark = pytest.mark.usefixtures("few")
POOLED: list[dict[str, Any]] = [{"uri": "x"}, {"uri": "new", "name": "gsm"}, {"uri": "y"}]
WEIGHTED: list[dict[str, Any]] = [{"uri": "x", "weight": 2}, {"uri": "new", "name": "gsm"}, {"uri": "y", "weight": 1}]
LONG = [[3, 11, 2, 8, 7, 5] * 80]


def asked(stages: list[dict[str, Any]], math: list[dict[str, Any]] | None = None, **more: Any) -> Recipe:
    """Return a recipe of `stages` whose domain math has the sources `math`, and code a source `apps` apart."""
    plain = resolved(recipe([stage("a", 80)], **more))
    code = [*plain["sources"]["code"], {"uri": "new", "name": "apps"}]
    sources = {**plain["sources"], "math": math or POOLED, "code": code}
    return Recipe.model_validate({**plain, "sources": sources, "stages": stages})


def adding(name: str, tokens: int, **shares: str) -> dict[str, Any]:
    return {**stage(name, tokens), "extra_sources": shares}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), asked([stage("a", 80)]), LONG, cuts=200)


@pytest.mark.parametrize(
    ("math", "names"),
    [
        (POOLED, ["general", "math", "math.gsm", "code", "code.apps", "multilingual"]),
        (WEIGHTED, ["general", "math-0", "math-2", "math.gsm", "code", "code.apps", "multilingual"]),
    ],
)
def test_a_named_source_is_a_leaf_of_its_own(math: list[dict[str, Any]], names: list[str]) -> None:
    datasets = mix_datasets(asked([stage("a", 80)], math))
    assert [dataset.name for dataset in datasets] == names
    assert sum(dataset.weight for dataset in datasets if dataset.domain == "math" and not dataset.source_name) == 1


@given(
    parts=st.lists(st.integers(0, 50), min_size=4, max_size=4).filter(any),
    added=st.tuples(st.integers(0, 4999), st.integers(0, 4999)),
    math=st.sampled_from([POOLED, WEIGHTED]),
)
def test_shares_are_exact_and_whole(parts: list[int], added: tuple[int, int], math: list[dict[str, Any]]) -> None:
    datasets = mix_datasets(asked([stage("a", 80)], math))
    domains = list(dict.fromkeys(dataset.domain for dataset in datasets))
    mix = {domain: Fraction(part, sum(parts)) for domain, part in zip(domains, parts, strict=True)}
    extra = {name: Fraction(part, 10_000) for name, part in zip(("gsm", "apps"), added, strict=True)}
    found = dict(zip(datasets, dataset_shares(datasets, mix, extra), strict=True))
    assert sum(found.values()) == 1
    assert {dataset.source_name: share for dataset, share in found.items() if dataset.source_name} == extra
    for domain in domains:
        rest = sum(share for dataset, share in found.items() if dataset.domain == domain and not dataset.source_name)
        assert rest == mix[domain] * (1 - sum(extra.values()))


@given(tokens=st.integers(1, 60), unit=st.sampled_from([None, 5, 32]), share=st.sampled_from(["30%", "12.5%", "0.1%"]))
def test_only_stages_that_add_a_source_read_it_and_as_much_as_they_say(
    shards: Path, tokens: int, unit: int | None, share: str
) -> None:
    stages = [stage("a", 8 * tokens), adding("b", 8 * tokens, gsm=share), stage("c", 8 * tokens)]
    run = TokenStream(shards, asked(stages, unit=unit))
    window, number = run.read(0, run.tokens), [dataset.name for dataset in run.datasets].index("math.gsm")
    fresh = window.tokens // 1_000_000 == number
    whole = Fraction(share.rstrip("%")) / 100 * 8 * tokens
    begin, end = 8 * tokens, 16 * tokens
    assert not fresh[:begin].any()
    assert not fresh[end:].any()
    assert abs(int(fresh.sum()) - whole) < 1
    assert run.planned(begin, end)["math"] == whole + (8 * tokens - whole) / 4
    assert run.planned_sources(begin, end)["math/s"] == run.planned(begin, end)["math"]
    assert run.realized(run.tokens)["math"] == int((window.domains == 1).sum())
    phase = run.phases[1]
    for dataset, planned in enumerate(phase.interleaver.shares):
        read = int((window.tokens[phase.start : phase.end] // 1_000_000 == dataset).sum())
        assert abs(read - planned * phase.interleaver.tokens) < 1


def test_arms_that_add_different_sources_share_the_stage_before(shards: Path) -> None:
    """All variants of an annealing study read offsets from 1 on, so that the control too begins a phase of its own."""
    offset = {**stage("b", 120), "data_offset": 1}
    variants = [
        TokenStream(shards, asked([stage("a", 200), {**offset, "extra_sources": add}]))
        for add in ({}, {"gsm": "30%"}, {"apps": "30%"})
    ]
    assert len({str(run.identity(0, 200)) for run in variants}) == 1
    assert len({str(run.identity(200, 320)) for run in variants}) == 3
    assert len({str(run.read(0, 200).tokens.tolist()) for run in variants}) == 1


def test_nothing_added_is_no_addition(shards: Path) -> None:
    one, other = (TokenStream(shards, asked([stage("a", 200), adding("b", 120, **add)])) for add in ({}, {"gsm": "0%"}))
    assert one.identity(0, 320) == other.identity(0, 320)
    assert np.array_equal(one.read(0, 320).tokens, other.read(0, 320).tokens)


def test_too_much_of_a_named_source_is_refused(tmp_path: Path) -> None:
    stages = [stage("a", 200), adding("b", 400, gsm="30%")]
    few = [[100], [100], [2, 5], [100], [100], [100]]
    folder = write_shards(tmp_path, asked(stages), few)
    with pytest.raises(ValueError, match=r"tokens from sources\.math\.1, which holds 7: .* share in extra_sources"):
        TokenStream(folder, asked(stages, tokens={"max_epochs": 4})).check()
    none = write_shards(tmp_path / "none", asked(stages), [[100], [100], [], [100], [100], [100]])
    with pytest.raises(ValueError, match=r"extra_sources\.gsm: the run needs 120 tokens of math\.gsm"):
        TokenStream(none, asked(stages))


@pytest.mark.parametrize("math", [POOLED, WEIGHTED])
def test_documents_of_a_named_source_get_shards_of_their_own(tmp_path: Path, math: list[dict[str, Any]]) -> None:
    texts = {domain: [{"text": f"{domain} text"}] for domain in ("general", "code", "multilingual")}
    lines = [{"text": f"{place} squared is {place**2}", "source_index": place % 3} for place in range(60)]
    documents = write_documents(tmp_path / "curated", {**texts, "math": lines})
    Tokenizer([bytes([byte]) for byte in range(256)]).save(tmp_path / "tokenizer")
    facts = tokenize(asked([stage("a", 80)], math), documents, tmp_path / "tokenizer", tmp_path / "tokens")
    expected = {"math": {0, 2}, "math.gsm": {1}} if math is POOLED else {"math-0": {0}, "math-2": {2}, "math.gsm": {1}}
    for dataset, places in expected.items():
        rows = [row for file in sorted((tmp_path / "tokens" / dataset).glob("*.parquet")) for row in _rows(file)]
        assert {row["source_index"] for row in rows} == places
        assert facts["datasets"][dataset]["documents"] == len(rows) == 20 * len(places)
    assert facts["datasets"]["code.apps"]["documents"] == 0
    assert facts["documents"]["math"] == 60


def _rows(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def test_a_tokenizer_learns_nothing_from_sources_that_stand_apart(tmp_path: Path) -> None:
    domains = ("general", "math", "code", "multilingual")
    plain: dict[str, list[dict[str, Any]]] = {
        domain: [{"text": f"{domain} {number:03} " * 20} for number in range(60)] for domain in domains
    }
    fresh = [{"text": f"qqqqzzzz {number:03} " * 20, "source_index": 1} for number in range(60)]
    found = []
    for name, rows in (("without", plain), ("with", {**plain, "math": [*plain["math"], *fresh]})):
        documents = write_documents(tmp_path / name, rows)
        sampled = asked([stage("a", 80)], tokenizer={"train": {"vocab": 320, "sample": "40kB"}})
        found.append(make_tokenizer(sampled, documents, tmp_path / f"{name}-tokenizer")["digest"])
    assert found[0] == found[1]
    named = Tokenizer.load(tmp_path / "with-tokenizer")
    assert not any(b"qq" in token for token in named.base)
