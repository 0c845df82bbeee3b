from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens import inspect as module
from herd.llama3.tokens.inspect import Inspection, inspect
from herd.llama3.tokens.shards import tokenize
from herd.llama3.tokens.stream import TokenStream
from herd.llama3.tokens.tokenizer import train_tokenizer
from tests.llama3.tokens.token_samples import LENGTHS, recipe, stage, write_documents, write_shards

pytestmark = pytest.mark.usefixtures("few")

ASKED = recipe([stage("a", 400), stage("b", 600, mix="anneal")], weights={"code": [2, 1]})


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), ASKED, LENGTHS, sources=("web", "books"))


def totals(found: Inspection, column: str) -> dict[str, tuple[int, int]]:
    """Return the totals by a column of the stretches that are listed, the slow way."""
    tokens: Counter[str] = Counter()
    documents: dict[str, set[tuple[str, int]]] = {}
    for use in found.documents:
        domain = use.dataset.split("-")[0]
        value = {"domain": domain, "source": f"{domain}/{use.source}"}.get(column) or getattr(use, column)
        tokens[value] += use.last - use.first + 1
        documents.setdefault(value, set()).add((use.document, use.epoch))
    return {value: (tokens[value], len(documents[value])) for value in tokens}


@pytest.mark.parametrize(("start", "stop"), [(0, 1000), (17, 430), (399, 402), (700, 701)])
def test_totals_are_those_of_the_documents_that_are_listed(shards: Path, start: int, stop: int) -> None:
    found = inspect(shards, ASKED, start, stop)
    assert found.complete
    columns = {
        "domain": found.domains,
        "source": found.sources,
        "language": found.languages,
        "license": found.licenses,
    }
    for column, counted in columns.items():
        assert counted == totals(found, column)
        assert sum(count.tokens for count in counted.values()) == stop - start
        assert list(counted.values()) == sorted(counted.values(), key=lambda count: -count.tokens)
    assert set(found.domains) <= set(DOMAINS)


def test_documents_are_the_stream_token_by_token(shards: Path) -> None:
    window = TokenStream(shards, ASKED).read(100, 900)
    found = inspect(shards, ASKED, 100, 900)
    position = 100
    for use in found.documents:
        assert use.position == position
        dataset = ["general", "math", "code-0", "code-1", "multilingual"].index(use.dataset)
        row = int(use.document.split(":")[1])
        begin = dataset * 1_000_000 + sum(LENGTHS[dataset % 4][:row])
        expected = list(range(begin + use.first, begin + use.last + 1))
        assert window.tokens[position - 100 : position - 100 + len(expected)].tolist() == expected
        assert (use.source, use.license) == (("web", "books")[row % 2], ("CC0", "MIT")[row // 2 % 2])
        position += len(expected)
    assert position == 900


def test_the_list_is_limited_and_says_so(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = inspect(shards, ASKED, 3, 1000)
    monkeypatch.setattr(module, "PIECE", 5)  # looked for in ever larger pieces
    for limit in (1, 7, 50, len(whole.documents) - 1):
        part = inspect(shards, ASKED, 3, 1000, limit=limit)
        assert part.documents == whole.documents[:limit]
        assert not part.complete
        assert part.licenses == whole.licenses
    assert inspect(shards, ASKED, 3, 1000, limit=len(whole.documents)) == whole
    assert inspect(shards, ASKED, 8, 8) == Inspection(8, 8, {}, {}, {}, {}, [], [], True)


def test_positions_outside_the_run_are_refused(shards: Path) -> None:
    with pytest.raises(ValueError, match="are not in the run of 1000 tokens"):
        inspect(shards, ASKED, 900, 1001)


def test_excerpts_are_the_text(tmp_path: Path) -> None:
    texts = {domain: [f"{domain} text number {number}, so it says" for number in range(9)] for domain in DOMAINS}
    rows = {domain: [{"text": text} for text in of_domain] for domain, of_domain in texts.items()}
    asked: Recipe = recipe([stage("a", 2048)], unit=256)
    tokenizer = train_tokenizer([text for of_domain in texts.values() for text in of_domain], 280)
    tokenizer.save(tmp_path / "tokenizer")
    tokenize(asked, write_documents(tmp_path / "curated", rows, files=2), tmp_path / "tokenizer", tmp_path / "tokens")
    found = inspect(tmp_path / "tokens", asked, 0, 2048, tokenizer=tokenizer, excerpt=6)
    long = inspect(tmp_path / "tokens", asked, 0, 2048, tokenizer=tokenizer, excerpt=10_000)
    whole = 0
    for use, short, full in zip(found.documents, found.excerpts, long.excerpts, strict=True):
        assert full.startswith(short)
        assert len(short) < 40
        assert any(full in text for text in texts[use.dataset])  # type: ignore[index]
        whole += full in texts[use.dataset]  # type: ignore[index]
    assert whole > 20
    assert inspect(tmp_path / "tokens", asked, 0, 2048).excerpts == []
