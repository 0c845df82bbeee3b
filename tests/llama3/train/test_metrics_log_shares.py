from __future__ import annotations

from pathlib import Path

import pytest

from herd.llama3.tokens.stream import TokenStream
from herd.llama3.train.metrics_log import DataShares
from tests.llama3.tokens.token_samples import LENGTHS, recipe, stage, write_shards

MIX = {"base": {"general": "50%", "math": "25%", "code": "17%", "multilingual": "8%"}}


def test_shares_of_sources_add_up_to_those_of_their_domain(tmp_path: Path) -> None:
    asked = recipe([stage("main", 4000)], MIX)
    stream = TokenStream(write_shards(tmp_path, asked, LENGTHS, sources=("web a", "books")), asked)
    shares = DataShares(stream, 0)
    for position in range(400, 4001, 400):
        found = shares.metrics_at(position)
        assert {name for name in found if "general/" in name} == {
            "data/fraction/general/web-a", "data/fraction/general/books",
            "data/target_fraction/general/web-a", "data/target_fraction/general/books",
        }  # fmt: skip
        realized = stream.realized(position)
        for domain, tokens in realized.items():
            names = [name for name in found if name.startswith(f"data/fraction/{domain}/")]
            if names:
                assert sum(found[name] for name in names) * position == pytest.approx(tokens)
        assert found["data/target_fraction/general/web-a"] + found[
            "data/target_fraction/general/books"
        ] == pytest.approx(0.5)
    assert found["data/fraction/general/books"] == pytest.approx(found["data/target_fraction/general/books"], abs=0.02)


def test_weighted_sources_are_planned_by_their_weights(tmp_path: Path) -> None:
    asked = recipe([stage("main", 4000)], MIX, weights={"general": [3, 1]})
    stream = TokenStream(write_shards(tmp_path, asked, LENGTHS, sources=("one",)), asked)
    by_dataset = dict(zip([dataset.name for dataset in stream.datasets], stream.consumed(4000).tolist(), strict=True))
    assert (by_dataset["general-0"], by_dataset["general-1"]) == (1500, 500)
    assert stream.planned_sources(0, 4000)["general/one"] == 2000  # both datasets have a source of that name


def test_a_single_source_says_nothing_that_its_domain_does_not(tmp_path: Path) -> None:
    asked = recipe([stage("main", 400)], MIX)
    stream = TokenStream(write_shards(tmp_path, asked, LENGTHS), asked)
    assert {name.count("/") for name in DataShares(stream, 0).metrics_at(400)} == {
        2
    }  # no data/fraction/<domain>/<source>
