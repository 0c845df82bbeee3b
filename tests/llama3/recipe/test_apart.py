"""What a recipe says so that arms of a study share data: seeds of documents, the tokenizer's mix, sources that stand
apart, helpings."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from llama3.recipe.frozen import check_past
from llama3.recipe.load import RecipeError, load_recipe, parse_recipe, resolved, to_yaml
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe

QUICKSTART = Path("recipes/quickstart.yaml")
NEW = {"uri": "installed", "limit": "1MB", "name": "gsm"}
ADD = 'stages.anneal.add={"gsm": "30%"}'


def quickstart(*overrides: str, math: list[dict[str, Any]] | None = None) -> Recipe:
    """Return the quickstart with `math` beside its own source of that domain."""
    data = resolved(load_recipe(QUICKSTART))
    data["sources"]["math"] += [NEW] if math is None else math
    return parse_recipe(data, "test", list(overrides))


def test_a_stage_has_what_it_adds_and_its_mix_the_rest() -> None:
    plain, added = (Schedule(quickstart(*words)).span("anneal").shares for words in ((), (ADD,)))
    assert sum(added.values()) == 1
    assert added["math"] == plain["math"] * Fraction(7, 10) + Fraction(3, 10)
    assert all(added[domain] == share * Fraction(7, 10) for domain, share in plain.items() if domain != "math")
    assert Schedule(quickstart(ADD)).span("main").shares == Schedule(quickstart()).span("main").shares


def test_a_domain_may_have_nothing_but_what_stages_add() -> None:
    mix = "{general: 75%, code: 25%}"
    words = (f"mix.base={mix}", f"mix.annealing={mix}", "sources.math=[{uri: installed, name: gsm}]", ADD)
    shares = Schedule(quickstart(*words)).span("anneal").shares
    assert shares == {"general": Fraction(525, 1000), "code": Fraction(175, 1000), "math": Fraction(3, 10)}


def test_additions_come_back_from_yaml(tmp_path: Path) -> None:
    recipe = quickstart(ADD, "stages.anneal.draw=2", "data_seed=7", "tokenizer.train.mix=annealing")
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert recipe.apart == {"gsm": "math"}
    assert (recipe.places_apart("math"), recipe.places_apart("code")) == ([1], [])


BAD: dict[str, tuple[list[str], list[dict[str, Any]] | None, str]] = {
    "unknown name": (['stages.anneal.add={"gms": "30%"}'], None,
                     r"stages\.anneal\.add: 'gms' is not a named source \(gsm\)"),
    "no names at all": ([ADD], [], r"'gsm' is not a named source \(none: give a source a name\)"),
    "nothing left": (['stages.anneal.add={"gsm": "100%"}'], None, r"100% leave nothing for the mix; keep .* below"),
    "a name twice": ([], [NEW, NEW], r"sources: the name 'gsm' is used twice"),
    "nothing to draw from": (["sources.math=[{uri: installed, name: gsm}]"], None,
                        r"mix\.base\.math: all of .* have a name"),
    "a weight": ([], [{**NEW, "weight": 2}], r"sources\.math\.1\.weight: 'gsm' has a name, .* leave the weight out"),
    "a bad name": ([], [{**NEW, "name": "a/b"}], r"sources\.math\.1\.name: 'a/b'"),
    "a helping before the first": (["stages.anneal.draw=-1"], None, r"stages\.\d\.draw: -1"),
    "unknown mix": (["tokenizer.train.mix=late"], None, r"tokenizer\.train\.mix: 'late' is not under mix \(base,"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "math", "message"), BAD.values(), ids=BAD)
def test_what_is_refused(words: list[str], math: list[dict[str, Any]] | None, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        quickstart(*words, math=math)


def test_weights_are_of_the_sources_that_the_mix_draws_from() -> None:
    weighted: list[dict[str, Any]] = [{"uri": "installed", "weight": 2}, NEW]
    assert quickstart("sources.math.0.weight=1", math=weighted).apart == {"gsm": "math"}
    with pytest.raises(RecipeError, match="give every source a weight, or none"):
        quickstart(math=weighted)


def test_seeds_of_documents_and_mix_of_the_tokenizer_follow_the_recipe_until_they_are_named() -> None:
    plain = load_recipe(QUICKSTART, ["seed=5"])
    assert (plain.documents_seed, plain.tokenizer_mix) == (5, plain.mix["base"])
    named = load_recipe(QUICKSTART, ["seed=5", "data_seed=0", "tokenizer.train.mix=annealing"])
    assert (named.documents_seed, named.tokenizer_mix) == (0, named.mix["annealing"])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ('stages.anneal.add={"gsm": "20%"}', "- stages.anneal.add.gsm: 30%\n+ stages.anneal.add.gsm: 20%"),
        ("stages.anneal.add={}", "- stages.anneal.add.gsm: 30%\n+ stages.anneal.add.gsm: (not there)"),
        ("stages.anneal.draw=2", "- stages.anneal.draw: 1\n+ stages.anneal.draw: 2"),
        ("stages.anneal.draw=0", "- stages.anneal.draw: 1\n+ stages.anneal.draw: 0"),
        ("stages.anneal.for=200K", "- stages.anneal.for: 100K\n+ stages.anneal.for: 200K"),
        ("data_seed=9", "- data_seed: 1\n+ data_seed: 9"),
    ],
)
def test_what_was_read_is_past(change: str, line: str) -> None:
    """The length of a stage decides where its helping begins, so it may not change once the stage has begun."""
    words = [ADD, "stages.anneal.draw=1", "stages.anneal.lr=constant", "stages.anneal.average=null"]
    before, now = quickstart(*words), quickstart(*words, change)
    begun = Schedule(before).span("anneal").start
    with pytest.raises(RecipeError) as caught:
        check_past(before, now, begun + 1)
    assert str(caught.value).endswith(line)
    if not change.startswith("data_seed"):
        check_past(before, now, begun)


def test_a_seed_of_documents_that_is_only_written_down_changes_nothing() -> None:
    check_past(load_recipe(QUICKSTART), load_recipe(QUICKSTART, ["data_seed=1"]), 1000)
