"""Verdicts of studies in a recipe: required, shown, and without effect on artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from herd.llama3.recipe.frozen import check_frozen_fields, frozen_fields
from herd.llama3.recipe.load import RecipeError, digest, load_recipe, parse_recipe, resolved, to_yaml
from herd.llama3.recipe.schema import Recipe

QUICKSTART = Path("recipes/quickstart.yaml")
FOUND = {
    "study": "judge-cpu",
    "digest": "1a2b3c4d5e6f",
    "says": "helps",
    "score": "eval/bpb/math",
    "gain": 0.012,
    "low": 0.008,
    "high": 0.016,
}
STUDIED = [{"study": "mix-cpu", "digest": "0123456789ab", "changed": ["mix.base.math"]}]


def with_gsm(judged: dict[str, Any] | None, level: str | None = None, add: bool = True) -> Recipe:
    """Return the quickstart with a source that its last stage adds, and its verdict."""
    data = yaml.safe_load(QUICKSTART.read_text())
    data["sources"]["math"].append(
        {"uri": "gsm.jsonl", "name": "gsm", **({"annealing_verdict": judged} if judged else {})}
    )
    if add:
        data["stages"][-1]["extra_sources"] = {"gsm": "30%"}
    return parse_recipe(data | ({"require_annealing_verdict": level} if level else {}), "r.yaml")


@pytest.mark.parametrize(
    ("level", "says", "meets"),
    [
        ("nothing", None, True),
        ("judged", None, False),
        ("judged", "hurts", True),
        ("judged", "no significant difference", True),
        ("not hurting", "hurts", False),
        ("not hurting", "mixed", False),
        ("not hurting", "no significant difference", True),
        ("not hurting", "helps", True),
        ("helps", None, False),
        ("helps", "no significant difference", False),
        ("helps", "mixed", False),
        ("helps", "helps", True),
    ],
)
def test_a_recipe_can_require_verdicts_of_extra_sources(level: str, says: str | None, meets: bool) -> None:
    judged = FOUND | {"says": says} if says else None
    if meets:
        assert with_gsm(judged, level).require_annealing_verdict == level
        return
    with pytest.raises(
        RecipeError, match=r"r\.yaml: sources\.math\.1\.annealing_verdict: .*require_annealing_verdict"
    ) as error:
        with_gsm(judged, level)
    assert ("herd study apply" if says is None else f"judge-cpu says {says!r}") in str(error.value)


def test_only_extra_sources_need_a_verdict() -> None:
    assert with_gsm(None, "helps", add=False).sources["math"][0].annealing_verdict is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"low": 0.02}, r"annealing_verdict: gain 0\.012 is not between low 0\.02 and high 0\.016"),
        ({"gain": float("nan")}, r"annealing_verdict\.gain: nan"),
        ({"digest": "abc"}, r"annealing_verdict\.digest: 'abc'"),
        ({"digest": 123456789012}, r"annealing_verdict\.digest: 123456789012"),
        ({"says": "perhaps"}, r"annealing_verdict\.says: 'perhaps'"),
        ({"by": "me"}, r"annealing_verdict\.by: unknown key"),
    ],
)
def test_a_broken_judgement_is_refused(change: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecipeError, match=fault):
        with_gsm(FOUND | change)


def test_a_judgement_survives_the_resolved_recipe() -> None:
    recipe = with_gsm(FOUND, "helps")
    again = parse_recipe(yaml.safe_load(to_yaml(recipe)), "again")
    assert again == recipe
    assert str(again.sources["math"][1].annealing_verdict) == "helps +0.0120 on eval/bpb/math, 95 % 0.0080..0.0160"


def test_a_recipe_without_verdicts_is_resolved_as_before() -> None:
    plain = resolved(load_recipe(QUICKSTART))
    assert not {"require_annealing_verdict", "studies"} & set(plain)
    assert all("annealing_verdict" not in source for sources in plain["sources"].values() for source in sources)
    assert digest(resolved(with_gsm(None))) == digest(resolved(with_gsm(None, "nothing")))


def test_a_running_recipe_may_get_verdicts() -> None:
    before, after = with_gsm(None), with_gsm(FOUND, "helps")
    after = parse_recipe(resolved(after) | {"studies": STUDIED}, "after")
    assert frozen_fields(before, 10**6) == frozen_fields(after, 10**6)
    check_frozen_fields(before, after, 10**6)


def test_sources_of_a_running_recipe_cannot_change() -> None:
    other = parse_recipe(resolved(with_gsm(FOUND)), "other", ["sources.math.gsm.uri=other.jsonl"])
    with pytest.raises(RecipeError, match=r"sources\.math\.1\.uri: decided the first 1M tokens"):
        check_frozen_fields(with_gsm(None), other, 10**6)


def test_studies_that_changed_a_recipe_are_listed_in_it() -> None:
    recipe = load_recipe(QUICKSTART, [f"studies={STUDIED}"])
    assert resolved(recipe)["studies"] == STUDIED
    assert str(recipe.studies[0]) == "mix-cpu 0123456789ab: mix.base.math"
    with pytest.raises(RecipeError, match=r"studies\.0\.changed"):
        load_recipe(QUICKSTART, ["studies=[{study: mix-cpu, digest: 0123456789ab, changed: []}]"])
