"""Fields that let the variants of a study share data: document seed, tokenizer mix, named sources, data offset."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.recipe.frozen import check_frozen_fields
from herd.llama3.recipe.load import RecipeError, load_recipe, parse_recipe, resolved, to_yaml
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe

QUICKSTART = Path("recipes/quickstart.yaml")
NEW = {"uri": "installed", "limit": "1MB", "name": "gsm"}
ADD = 'stages.anneal.extra_sources={"gsm": "30%"}'


def quickstart(*overrides: str, math: list[dict[str, Any]] | None = None) -> Recipe:
    """Return the quickstart with `math` beside its own source of that domain."""
    data = resolved(load_recipe(QUICKSTART))
    data["sources"]["math"] += [NEW] if math is None else math
    return parse_recipe(data, "test", list(overrides))


def test_extra_sources_get_their_share_and_the_mix_the_rest() -> None:
    plain, added = (Schedule(quickstart(*words)).span("anneal").shares for words in ((), (ADD,)))
    assert sum(added.values()) == 1
    assert added["math"] == plain["math"] * Fraction(7, 10) + Fraction(3, 10)
    assert all(added[domain] == share * Fraction(7, 10) for domain, share in plain.items() if domain != "math")
    assert Schedule(quickstart(ADD)).span("main").shares == Schedule(quickstart()).span("main").shares


def test_a_domain_may_have_only_named_sources() -> None:
    mix = "{general: 75%, code: 25%}"
    words = (f"mix.base={mix}", f"mix.annealing={mix}", "sources.math=[{uri: installed, name: gsm}]", ADD)
    shares = Schedule(quickstart(*words)).span("anneal").shares
    assert shares == {"general": Fraction(525, 1000), "code": Fraction(175, 1000), "math": Fraction(3, 10)}


def test_extra_sources_survive_yaml(tmp_path: Path) -> None:
    recipe = quickstart(ADD, "stages.anneal.data_offset=2", "data_seed=7", "tokenizer.train.mix=annealing")
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert recipe.named_sources == {"gsm": "math"}
    assert (recipe.places_apart("math"), recipe.places_apart("code")) == ([1], [])


BAD: dict[str, tuple[list[str], list[dict[str, Any]] | None, str]] = {
    "unknown name": (['stages.anneal.extra_sources={"gms": "30%"}'], None,
                     r"stages\.anneal\.extra_sources: 'gms' is not a named source \(gsm\)"),
    "no names at all": ([ADD], [], r"'gsm' is not a named source \(none: give a source a name\)"),
    "nothing left": (['stages.anneal.extra_sources={"gsm": "100%"}'], None, r"100% leave nothing for the mix; keep .* "
    "below"),
    "a name twice": ([], [NEW, NEW], r"sources: the name 'gsm' is used twice"),
    "nothing to draw from": (["sources.math=[{uri: installed, name: gsm}]"], None,
                        r"mix\.base\.math: all of .* have a name"),
    "a weight": ([], [{**NEW, "weight": 2}], r"sources\.math\.1\.weight: 'gsm' has a name, .* leave the weight out"),
    "a bad name": ([], [{**NEW, "name": "a/b"}], r"sources\.math\.1\.name: 'a/b'"),
    "a negative offset": (["stages.anneal.data_offset=-1"], None, r"stages\.\d\.data_offset: -1"),
    "unknown mix": (["tokenizer.train.mix=late"], None, r"tokenizer\.train\.mix: 'late' is not in mix \(base,"),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "math", "message"), BAD.values(), ids=BAD)
def test_invalid_extra_sources_are_refused(
    overrides: list[str], math: list[dict[str, Any]] | None, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        quickstart(*overrides, math=math)


def test_weights_are_for_unnamed_sources_only() -> None:
    weighted: list[dict[str, Any]] = [{"uri": "installed", "weight": 2}, NEW]
    assert quickstart("sources.math.0.weight=1", math=weighted).named_sources == {"gsm": "math"}
    with pytest.raises(RecipeError, match="give every source a weight, or none"):
        quickstart(math=weighted)


def test_defaults_of_data_seed_and_tokenizer_mix() -> None:
    plain = load_recipe(QUICKSTART, ["seed=5"])
    assert (plain.documents_seed, plain.tokenizer_mix) == (5, plain.mix["base"])
    named = load_recipe(QUICKSTART, ["seed=5", "data_seed=0", "tokenizer.train.mix=annealing"])
    assert (named.documents_seed, named.tokenizer_mix) == (0, named.mix["annealing"])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            'stages.anneal.extra_sources={"gsm": "20%"}',
            "- stages.anneal.extra_sources.gsm: 30%\n+ stages.anneal.extra_sources.gsm: 20%",
        ),
        (
            "stages.anneal.extra_sources={}",
            "- stages.anneal.extra_sources.gsm: 30%\n+ stages.anneal.extra_sources.gsm: (missing)",
        ),
        ("stages.anneal.data_offset=2", "- stages.anneal.data_offset: 1\n+ stages.anneal.data_offset: 2"),
        ("stages.anneal.data_offset=0", "- stages.anneal.data_offset: 1\n+ stages.anneal.data_offset: 0"),
        ("stages.anneal.for=200K", "- stages.anneal.for: 240K\n+ stages.anneal.for: 200K"),
        ("data_seed=9", "- data_seed: 1\n+ data_seed: 9"),
    ],
)
def test_data_of_a_started_stage_cannot_change(change: str, line: str) -> None:
    """The length of a stage decides its data offset, so it cannot change after the stage has started."""
    words = [ADD, "stages.anneal.data_offset=1", "stages.anneal.lr=constant", "stages.anneal.weight_averaging=null"]
    before, now = quickstart(*words), quickstart(*words, change)
    start = Schedule(before).span("anneal").start
    with pytest.raises(RecipeError) as caught:
        check_frozen_fields(before, now, start + 1)
    assert str(caught.value).endswith(line)
    if not change.startswith("data_seed"):
        check_frozen_fields(before, now, start)


def test_an_explicit_default_data_seed_changes_nothing() -> None:
    check_frozen_fields(load_recipe(QUICKSTART), load_recipe(QUICKSTART, ["data_seed=1"]), 1000)
