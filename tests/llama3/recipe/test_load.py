from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from herd.llama3.recipe.base import read_plain
from herd.llama3.recipe.load import RecipeError, digest, load_recipe, parse_recipe, resolved, to_yaml
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import check_batches

QUICKSTART = Path("recipes/quickstart.yaml")
QUICKSTART_TEXT = QUICKSTART.read_text()
RECIPES = sorted(Path("recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_resolved_recipe_reads_back_as_itself(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    (tmp_path / "r.yaml").write_text(to_yaml(recipe))
    again = load_recipe(tmp_path / "r.yaml")
    assert again == recipe
    assert digest(resolved(again)) == digest(resolved(recipe))


def test_a_shipped_recipe_is_found_by_name_and_a_file_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = load_recipe(QUICKSTART)
    assert load_recipe("quickstart") == load_recipe(Path("quickstart")) == shipped
    with pytest.raises(
        RecipeError, match=r"recipe quick-start: .* did you mean quickstart\? herd ships adapt-smollm2, "
    ):
        load_recipe("quick-start")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("quickstart") == shipped
    Path("quickstart").write_text(QUICKSTART_TEXT.replace("name: quickstart", "name: mine"))
    assert load_recipe("quickstart").name == "mine"


MISTAKES = [
    ("curate.dedup.jacard=0.7", r"curate\.dedup\.jacard: unknown key; did you mean 'jaccard'"),
    ("stages.main.sequence=512", r"stages\.2\.sequence: unknown key; did you mean 'seq_len'"),
    ("seeds=1", "seeds: unknown key; did you mean 'seed'"),
    ("mix.base.math=20%", "shares of base sum to 95%; change them"),
    ("stages.main.seq_len=4096", "seq_len: 4096 is longer than model.max_seq_len 512 of preset '2m'; shorten"),
    ("stages.main.batch=10000 tokens", "batch: 10K is not a multiple of sequence 512; write 10Ki"),
    ("stages.main.until=100K", "until: 100K is not after 400K.*order of their positions"),
    ("stages.main.mix=late", "mix: 'late' is not in mix"),
    ("stages.ramp-2.name=ramp-1", "name 'ramp-1' is used twice"),
    ("stages.ramp-1.batch=null", "the first stage needs a batch"),
    ("model.preset=9b", "preset '9b' is unknown; the presets are 8b, 70b"),
    ("model.heads=5", "must be an even multiple of heads 5"),
    ("tokens.dtype=float", "tokens.dtype: 'float'"),
    ("tokenizer.use=x", "write either train"),
    ("evaluate.after=[late]", "'late' is not a stage"),
    ("sources.math=[]", "mix.base.math: 25% of the tokens, but sources.math is empty"),
    ("promote.to=previous", "promote.to: 'previous' is reserved for the promotion log"),
    ("promote.when={eval/bpb: nice}", "'nice' is not a rule"),
    ("lr.warmup=20", "write 8000 steps"),
    ("name=Quick Start", "name: 'Quick Start'"),
    ("stages.late.seq_len=3", "there is no element 'late' in that list; it has ramp-1, ramp-2, main, anneal"),
    ("stages.mian.until=1M", r"no element 'mian' in that list; did you mean 'main'\? it has ramp-1, ramp-2, main"),
    ("sources.math.3.limit=1MB", "there is no element '3' in that list; it has 0"),
    ("stages.main.gates=[neddle]", "'neddle' is not a gate; the gates are short-context, needle"),
    ("stages.main.gates={needle: better}", "needle: 'better' is not a rule of this gate; write 'at least 0.9'"),
    ("stages.main.gates={short-context: at least 1}", "not a rule of this gate; write 'no worse than 1%'"),
    ("stages.ramp-1.gates=[short-context]", "ramp-1.gates: short-context compares with the previous stage"),
    ("stages.anneal={name: anneal, for: 1M, seq_len: [64, 128], mix: base, weight_averaging: 2, gates: needle}",
     "weight_averaging cannot span several sequence lengths with gates"),
    ("stages.anneal={name: x, for: [1M, 2M], seq_len: [64, 128, 256], mix: base}", "for: has 2 lengths and seq_len: 3"),
    ("stages.anneal={name: x, for: 1M, seq_len: [64, 64], mix: base, gates: needle}", "two steps have the name 'x-64'"),
    ("lr.linear={to: 0, over: 1M}", r"write exactly one of cosine, linear, wsd .* not \['cosine', 'linear'\]"),
    ("lr.cosine=null", "write exactly one of cosine, linear, wsd after the warm-up, not none"),
    ("lr.cosine.over=80 steps", "lr.cosine.over: 80 steps is not longer than the warm-up of 100 steps"),
    ("lr.cosine.over=0 steps", r"lr\.cosine\.over: invalid length 0 steps; use e\.g\. 1000 steps"),
    ("init_from={path: x}", "init_from: weights from x need the tokenizer they were trained with; write tokenizer"),
    ("init_from={path: x, format: gml}", "init_from.format: 'gml': input should be 'auto', 'hf', 'meta', 'gguf'"),
    ("spikes.policy=ignore", "spikes.policy: 'ignore'"),
    ("model.rope_scaling={low_freq_factor: 4}", "high_freq_factor 4 must be above low_freq_factor 4"),
    ("precision=fp16", "precision: 'fp16'"),
    ("seed", "write field.subfield=value"),
]  # fmt: skip


@pytest.mark.fault("F17")
def test_a_mistake_names_field_value_and_remedy() -> None:
    for override, fault in MISTAKES:
        with pytest.raises(RecipeError, match=fault):
            load_recipe(QUICKSTART, [override])


def test_a_vocabulary_above_the_token_type_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"tokens.dtype: uint16 holds ids below 65,536.*write uint32"):
        load_recipe(QUICKSTART, ["tokenizer.train.vocab=128000", "tokens.dtype=uint16"])


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, ["seeds=1", "mix.base.math=20%", "curate.dedup.jacard=1"])
    assert len(str(caught.value).splitlines()) == 3


def test_batches_must_split_over_the_ranks() -> None:
    span = Schedule(load_recipe(QUICKSTART)).spans[0]
    check_batches(span, 2)
    with pytest.raises(ValueError, match="not a multiple of sequence 128 x data-parallel size 3; write"):
        check_batches(span, 3)


def test_a_missing_or_broken_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(RecipeError, match="is not YAML"):
        load_recipe(tmp_path / "broken.yaml")
    with pytest.raises(RecipeError, match="must be a mapping"):
        parse_recipe([1], "list")


def test_overrides_reach_stages_by_name_and_number() -> None:
    by_name = load_recipe(QUICKSTART, ["stages.main.until=2M", "stages.anneal.weight_averaging=2"])
    by_number = load_recipe(QUICKSTART, ["stages.2.until=2M", "stages.3.weight_averaging=2"])
    assert by_name == by_number
    assert by_name.stages[2].until == 2_000_000


def test_gates_are_filled_in_however_they_are_written() -> None:
    def gates(text: str) -> dict[str, str]:
        stage = load_recipe(QUICKSTART, [f"stages.main.gates={text}"]).stages[2]
        return {gate: str(rule) for gate, rule in stage.gates.items()}

    usual = {"short-context": "no worse than 1%", "needle": "at least 0.9"}
    assert gates("[short-context, needle]") == gates("{short-context: null, needle: null}") == usual
    assert gates("[short-context, {needle: at least 0.8}]") == usual | {"needle": "at least 0.8"}
    assert gates("needle") == {"needle": "at least 0.9"}
    assert gates("null") == {}


def test_off_is_a_policy_though_yaml_reads_it_as_false(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(to_yaml(load_recipe(QUICKSTART, ["spikes.policy=off"])))
    assert load_recipe(tmp_path / "r.yaml").spikes.policy == "off"


def test_a_preset_can_be_overridden_number_by_number() -> None:
    recipe = load_recipe(QUICKSTART, ["model.layers=3"])
    assert (recipe.model.layers, recipe.model.dim) == (3, load_recipe(QUICKSTART).model.dim)


def test_the_documented_recipe_of_the_readme_is_valid() -> None:
    blocks = Path("README.md").read_text().split("```yaml\n")[1:]
    assert blocks, "README.md shows the recipe"
    parse_recipe(yaml.safe_load(blocks[0].split("```")[0]), "README.md")


@pytest.mark.parametrize("path", sorted(Path("recipes").glob("*.yaml")), ids=str)
def test_a_resolved_recipe_that_is_read_back_has_the_same_digest(path: Path) -> None:
    """A default 0 that comes back as 0.0 would give every artifact made from it another key."""
    recipe = load_recipe(path, ["model.rope_scaling={}", "spikes.policy=skip"])
    again = parse_recipe(yaml.safe_load(to_yaml(recipe)), "again")
    assert digest(resolved(again)) == digest(resolved(recipe))


BOMBS = {
    "lists": "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n"
    + "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in pairwise("abcdefghijklm")),
    "merged": "a: &a {x: 1, y: 2}\n"
    + "".join(f"{new}: &{new} {{<<: [*{old}, *{old}]}}\n" for old, new in pairwise("abcdefghijklmnopqrstuvwxyz")),
    "itself": "a: &a [*a]\n",
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_kilobyte_of_aliases_is_refused_before_it_unfolds(bomb: str, tmp_path: Path) -> None:
    assert len(bomb) < 1100
    (tmp_path / "r.yaml").write_text(bomb)
    with pytest.raises(RecipeError, match=r"r\.yaml: is not YAML: its aliases expand to more than 100,000 values"):
        load_recipe(tmp_path / "r.yaml")
    inline = "{" + ", ".join(bomb.splitlines()) + "}"
    with pytest.raises(RecipeError, match=r"override .*its aliases expand to more"):
        load_recipe(QUICKSTART, [f"sources={inline}"])


def test_a_key_that_is_there_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("slurm: {time: '1:00:00'}\nprocesses: 8\nslurm:\n  account: a\n")
    with pytest.raises(RecipeError, match=r"r\.yaml: is not YAML: 'slurm' is in lines 1 and 3; write it once"):
        load_recipe(tmp_path / "r.yaml")
    with pytest.raises(yaml.YAMLError, match="'a' is in lines 2 and 2"):
        read_plain("x:\n- {a: 1, b: 2, a: 1}\n")
    assert read_plain("{1: a, '1': b}") == {1: "a", "1": "b"}


def test_small_aliases_are_allowed() -> None:
    text = "a: &a {x: 1, y: [2]}\nb: {<<: *a, x: 3}\nc: [*a, *a]\n"
    assert read_plain(text) == yaml.safe_load(text)
    assert read_plain("") is None


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_libyaml_reads_what_python_reads(path: Path) -> None:
    expected = yaml.load(path.read_text(), yaml.SafeLoader)
    assert read_plain(path.read_text()) == read_plain(path.read_bytes()) == expected


def test_a_mistake_in_yaml_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("name: a\nmix: [1, 2\nseed: 1\n")
    with pytest.raises(RecipeError, match=r"line 3, column 5:\n +seed: 1\n +\^"):
        load_recipe(tmp_path / "r.yaml")


DEEP = ["[" * 5000, "a: " * 5000, "{a: " * 5000 + "}" * 5000, "- " * 100_000, "[a: " * 100_000]


@pytest.mark.parametrize("text", DEEP, ids=lambda text: text[:3].strip())
def test_deep_nesting_is_a_line_and_no_traceback(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match="is not YAML"):
        load_recipe(tmp_path / "r.yaml")
