"""What decides collected documents, tokenizers and shards: what recipes say about studies does not, unless it must."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama3.recipe.load import digest, load_recipe
from tasks.stages.data import dealt_by, learnt_by, read_from

TINY = Path("tests/e2e/tiny.yaml")
NEW = "sources.math=[{uri: installed, limit: 500kB, system: false}, {uri: installed, limit: 1MB%s}]"
KNOWN = {
    TINY: ("8604bc60d4ed5419", "aa860c0a078f2cd8"),
    Path("recipes/domain-adaptation.yaml"): ("4f98e38660466b5b", "b46896f80e71acdf"),
    Path("recipes/quickstart.yaml"): ("2068a01009d59492", "e5232a36ae1fbb71"),
    Path("recipes/llama3-405b.yaml"): ("2c2ce76d3f0beab7", "cf5d19e02d4bf7e1"),
}
"""From before sources had names and tokenizers a mix: other digests would make every artifact there is again."""


@pytest.mark.parametrize("path", KNOWN, ids=lambda path: path.stem)
def test_what_recipes_without_studies_decide_is_what_it_always_was(path: Path) -> None:
    recipe = load_recipe(path)
    assert (digest(read_from(recipe))[:16], digest(learnt_by(recipe))[:16]) == KNOWN[path]
    assert set(dealt_by(recipe)) == {"dtype", "weights"}


def test_a_name_decides_the_shards_and_not_what_is_read() -> None:
    without, one, other = (load_recipe(TINY, [NEW % name]) for name in ("", ", name: gsm", ", name: apps"))
    assert read_from(without) == read_from(one) == read_from(other)
    assert len({digest(dealt_by(recipe)) for recipe in (without, one, other)}) == 3


def test_equal_shares_learn_one_tokenizer_whatever_their_mix_is_called() -> None:
    changed = ["mix.base={general: 40%, math: 35%, code: 17%, multilingual: 8%}"]
    first = ["mix.first={general: 50%, math: 25%, code: 17%, multilingual: 8%}", "tokenizer.train.mix=first"]
    plain, other, same = (load_recipe(TINY, words) for words in ([], changed, [*changed, *first]))
    assert learnt_by(plain) == learnt_by(same)
    assert learnt_by(plain) != learnt_by(other)
