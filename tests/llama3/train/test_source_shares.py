from __future__ import annotations

from pathlib import Path

import pytest

from llama3.tokens.stream import TokenStream
from llama3.train.metrics_log import SourceShares
from tests.llama3.tokens.token_samples import LENGTHS, recipe, stage, write_shards

MIX = {"base": {"general": "50%", "math": "25%", "code": "17%", "multilingual": "8%"}}


def test_shares_of_sources_add_up_to_those_of_their_domain(tmp_path: Path) -> None:
    asked = recipe([stage("main", 4000)], MIX)
    stream = TokenStream(write_shards(tmp_path, asked, LENGTHS, sources=("web a", "books")), asked)
    shares = SourceShares(stream, 0)
    for position in range(400, 4001, 400):
        found = shares.at(position)
        assert {name for name in found if "general" in name} == {
            "data/share/general/web-a", "data/share/general/books",
            "data/planned_share/general/web-a", "data/planned_share/general/books",
        }  # fmt: skip
        realised = stream.realised(position)
        for domain, tokens in realised.items():
            names = [name for name in found if name.startswith(f"data/share/{domain}/")]
            if names:
                assert sum(found[name] for name in names) * position == pytest.approx(tokens)
        assert found["data/planned_share/general/web-a"] + found["data/planned_share/general/books"] == pytest.approx(
            0.5
        )
    assert found["data/share/general/books"] == pytest.approx(found["data/planned_share/general/books"], abs=0.02)


def test_weighted_sources_are_planned_by_their_weights(tmp_path: Path) -> None:
    asked = recipe([stage("main", 4000)], MIX, weights={"general": [3, 1]})
    stream = TokenStream(write_shards(tmp_path, asked, LENGTHS, sources=("one",)), asked)
    by_leaf = dict(zip([leaf.name for leaf in stream.leaves], stream.consumed(4000).tolist(), strict=True))
    assert (by_leaf["general-0"], by_leaf["general-1"]) == (1500, 500)
    assert stream.planned_sources(0, 4000)["general/one"] == 2000  # both leaves have a source of that name


def test_a_single_source_says_nothing_that_its_domain_does_not(tmp_path: Path) -> None:
    asked = recipe([stage("main", 400)], MIX)
    stream = TokenStream(write_shards(tmp_path, asked, LENGTHS), asked)
    assert SourceShares(stream, 0).at(400) == {}
