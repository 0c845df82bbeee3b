"""`base:` of recipes, and variables in their addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from herd.llama3.recipe.load import RecipeError, base_changes, digest, load_recipe, resolved

PUBLISHED = {
    "llama3-8b": "a96f5d856e90f4d48ba797883e57e28aefc6bffcf22e7ee79bcd27651896a76e",
    "llama3-70b": "a671027b51bf578f96871d08dcce7bd0d8f3b52d39ec2a62aba95e9d3f1aa85c",
    "llama3-405b": "0903f98b66cb690436be22f255cf3c6959ae030d531fa8f419507f032bda70a9",
}
"""Digests of the three recipes when each was written out in full."""
QUICKSTART = Path("recipes/quickstart.yaml")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes_are_what_they_were_without_a_base(name: str) -> None:
    assert digest(resolved(load_recipe(Path(f"recipes/{name}.yaml")))) == PUBLISHED[name]


def child(folder: Path, text: str, name: str = "child") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def test_mappings_are_merged_lists_replaced_and_the_change_is_told(tmp_path: Path) -> None:
    (tmp_path / "lower").mkdir()
    child(tmp_path / "lower", f"base: {QUICKSTART.resolve()}\nname: middle\nseed: 8\nlr: {{peak: 1e-2}}\n", "middle")
    path = child(
        tmp_path,
        "base: lower/middle.yaml\nname: upper\nlr: {warmup: 9 steps}\nsources: {math: [{uri: x.jsonl, weight: 2}]}\n",
    )
    recipe, below = load_recipe(path), load_recipe(QUICKSTART)
    assert (recipe.name, recipe.seed, recipe.model) == ("upper", 8, below.model)
    assert (recipe.lr.peak, str(recipe.lr.warmup), recipe.lr.cosine) == (1e-2, "9 steps", below.lr.cosine)
    assert [source.uri for source in recipe.sources["math"]] == ["x.jsonl"]
    assert recipe.sources["code"] == below.sources["code"]
    told = base_changes(path)
    # neither the name, nor the seed, which is the base's own change
    assert told == f"lower/middle.yaml: other sources.math; lr.warmup {below.lr.warmup} -> 9 steps"
    assert base_changes(QUICKSTART) == ""


def test_a_cycle_is_named(tmp_path: Path) -> None:
    child(tmp_path, "base: b.yaml\nname: a", "a")
    child(tmp_path, "base: ./a.yaml\nname: b", "b")
    with pytest.raises(RecipeError, match=r"b\.yaml: base: a\.yaml -> b\.yaml -> a\.yaml is a cycle"):
        load_recipe(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: none.yaml\nname: a", r"child\.yaml: base: cannot be read \(No such file"),
        ("base: [x]\nname: a", r"base: \['x'\] is not a file; write its path"),
        ("base: other.yaml", r"name: is missing; a recipe with a base needs its own"),
        ("base: list.yaml\nname: a", r"list\.yaml is not a recipe; it must be a mapping"),
    ],
)
def test_mistakes_in_a_base_are_named(tmp_path: Path, text: str, message: str) -> None:
    child(tmp_path, "[1]", "list")
    with pytest.raises(RecipeError, match=message):
        load_recipe(child(tmp_path, text))


def with_source(folder: Path, uri: str) -> Path:
    return child(folder, f"base: {QUICKSTART.resolve()}\nname: child\nsources: {{math: [{{uri: '{uri}'}}]}}\n")


def test_variables_stand_in_addresses_and_the_resolved_recipe_has_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORPUS", "s3://ours")
    monkeypatch.delenv("PART", raising=False)
    recipe = load_recipe(with_source(tmp_path, "${CORPUS}/${PART:-web}/*.parquet"))
    assert recipe.sources["math"][0].uri == "s3://ours/web/*.parquet"
    assert digest(resolved(recipe)) == digest(resolved(load_recipe(with_source(tmp_path, "s3://ours/web/*.parquet"))))


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("${ABSENT}/x", r"math\.0\.uri: ABSENT is not set; export ABSENT=\.\.\., or write \$\{ABSENT:-default\}"),
        ("s3://b/x?k=${HF_TOKEN}", r"sources\.math\.0\.uri: \$\{HF_TOKEN\} is a secret"),
        ("${PLAIN}/x", r"sources\.math\.0\.uri: \$\{PLAIN\} is a secret"),
        ("${KEY_OF_STORE:-x}", r"\$\{KEY_OF_STORE\} is a secret"),
    ],
)  # fmt: skip
def test_secrets_and_unset_variables_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, message: str
) -> None:
    monkeypatch.delenv("ABSENT", raising=False)
    monkeypatch.setenv("HF_TOKEN", "tok-0123456789")
    monkeypatch.setenv("PLAIN", "https://user:hunter2222@host")
    monkeypatch.setenv("KEY_OF_STORE", "tok-0123456789")  # the value of another, secret, variable
    with pytest.raises(RecipeError, match=message) as refused:
        load_recipe(with_source(tmp_path, uri))
    assert "tok-0123" not in str(refused.value)
    assert "hunter2" not in str(refused.value)
