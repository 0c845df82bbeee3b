"""From a verdict to a changed recipe: the overrides, nothing else, and the study's name beside each."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated_studies import PlantedEffects, outcomes
from herd.llama3.recipe.data_schema import AnnealingVerdict, Source
from herd.llama3.recipe.load import parse_recipe, resolved
from herd.llama3.recipe.schema import Recipe
from herd.llama3.studies.apply import (
    add_source,
    annealing_verdict_of,
    apply_annealing,
    apply_annealing_verdict,
    apply_study,
)
from herd.llama3.studies.results import StudyVerdict
from herd.llama3.studies.study import NewSource
from herd.llama3.studies.verdicts import annealing_verdict

QUICKSTART = Path("recipes/quickstart.yaml").read_text()
DIGEST = "1a2b3c4d5e6f7a8b9c"
NOTE = ["+0.012 bpb, 95 % 0.008..0.016", "16 mixes, 3 seeds each"]
MATH = ["mix.base.general=45%", "mix.base.math=30%"]
SAID = AnnealingVerdict(
    study="judge-cpu", digest=DIGEST, says="helps", score="eval/bpb/math", gain=0.012, low=0.008, high=0.016
)
CHANGES = [
    "mix.base={general: 45%, math: 30%, code: 17%, multilingual: 8%}",
    "lr.warmup=100 steps",
    "stages.main.batch=4Ki",
    "stages.0.until=200K",
    "stages.anneal.weight_averaging=null",
    "curate.quality_for.math.max_divergence=5",
    "tokenizer.train.mix=base",
    "spikes.policy=off",
    "optimizer.eps=1e-6",
    "evaluate.tasks=[]",
]
NEW = {
    "gsm": NewSource(domain="math", uri="gsm.jsonl", license="MIT"),
    "web": NewSource(domain="general", uri="web.parquet"),
}


def read(text: str) -> Recipe:
    return parse_recipe(yaml.safe_load(text), "recipe")


def verdict(math: float, repeats: int = 4) -> StudyVerdict:
    truth = PlantedEffects(
        dict.fromkeys(("general", "math"), 64), {}, {"default": {}, "gsm": {"math": math}, "web": {}}, repeats
    )
    return annealing_verdict(outcomes(truth, 1), "default", {name: name for name in NEW})


@settings(max_examples=8)
@given(st.lists(st.sampled_from(CHANGES), min_size=1, unique=True))
def test_the_changed_recipe_is_the_base_with_the_overrides(changes: list[str]) -> None:
    text = apply_study(QUICKSTART, changes, "mix-cpu", DIGEST, NOTE)
    base = parse_recipe(yaml.safe_load(QUICKSTART), "recipe", changes)
    assert resolved(read(text)) | {"studies": []} == resolved(base) | {"studies": []}
    fields = [change.partition("=")[0] for change in changes]
    assert [(one.study, one.digest, one.changed) for one in read(text).studies] == [("mix-cpu", DIGEST[:12], fields)]


def test_what_does_not_change_stays_and_what_does_says_why() -> None:
    lines = apply_study(QUICKSTART, MATH, "mix-cpu", DIGEST, NOTE).splitlines()
    above = lines.index("  # study mix-cpu 1a2b3c4d5e6f: +0.012 bpb, 95 % 0.008..0.016")
    assert lines[above + 1] == "  base:      {general: 45%, math: 30%, code: 17%, multilingual: 8%}"
    old = QUICKSTART.splitlines()
    assert lines[0] == old[0]
    assert lines[1] == "# study mix-cpu 1a2b3c4d5e6f changed mix.base.general, mix.base.math"
    assert lines[2:4] == [f"#   {line}" for line in NOTE]
    new = [line for line in lines if line not in old]
    assert len(new) == 7  # three at the head, the comment, the line, two of `studies`
    assert [line for line in old if line not in lines] == [
        "  base:      {general: 50%, math: 25%, code: 17%, multilingual: 8%}"
    ]


def test_applied_again_it_is_the_same_text() -> None:
    once = apply_study(QUICKSTART, MATH, "mix-cpu", DIGEST, NOTE)
    assert apply_study(once, MATH, "mix-cpu", DIGEST, NOTE) == once


def test_a_later_study_is_added() -> None:
    once = apply_study(QUICKSTART, MATH, "mix-cpu", DIGEST, NOTE)
    twice = apply_study(once, ["mix.base.general=47%", "mix.base.math=28%"], "mix-cpu", "b" * 64, ["less"])
    assert [one.digest for one in read(twice).studies] == [DIGEST[:12], "b" * 12]
    assert "  # study mix-cpu bbbbbbbbbbbb: less\n  base:      {general: 47%" in twice
    assert "study mix-cpu 1a2b3c4d5e6f: " not in twice


def test_what_cannot_be_applied_is_refused() -> None:
    for changes, fault in [
        ([], "study mix-cpu: proposes no change, so there is nothing to apply"),
        (
            ["mix.base.math=30%"],
            "study mix-cpu: does not fit this recipe:\nrecipe: mix: the shares of base sum to 105%",
        ),
        (["stages.late.seq_len=3"], "there is no element 'late'"),
        (["mix"], "write field.subfield=value"),
    ]:
        with pytest.raises(ValueError, match=fault):
            apply_study(QUICKSTART, changes, "mix-cpu", DIGEST)


def test_a_source_gets_its_judgement() -> None:
    for which in (0, "0"):
        text = apply_annealing_verdict(QUICKSTART, "math", which, SAID)
        assert read(text).sources["math"][0].annealing_verdict == SAID
    assert read(text).studies[0].changed == ["sources.math.0.annealing_verdict"]
    again = apply_annealing_verdict(text, "math", 0, SAID.model_copy(update={"says": "mixed"}))
    assert read(again).sources["math"][0].annealing_verdict == SAID.model_copy(update={"says": "mixed"})
    assert again.count("# study judge-cpu") == 3
    with pytest.raises(ValueError, match="no element 'gsm'"):
        apply_annealing_verdict(QUICKSTART, "math", "gsm", SAID)


def test_a_judged_source_is_added() -> None:
    source = Source(uri="gsm.jsonl", name="gsm", license="MIT", annealing_verdict=SAID)
    text = apply_study(
        add_source(QUICKSTART, "math", source), ["stages.anneal.extra_sources={gsm: 30%}"], "judge-cpu", DIGEST
    )
    recipe = parse_recipe(yaml.safe_load(text) | {"require_annealing_verdict": "helps"}, "recipe")
    assert recipe.sources["math"] == [Source(uri="installed", limit=recipe.sources["math"][0].limit), source]
    assert recipe.studies[0].changed == ["sources.math.gsm", "stages.anneal.extra_sources"]
    with pytest.raises(ValueError, match="the name 'gsm' is used twice"):
        add_source(text, "code", source)
    with pytest.raises(ValueError, match="has no name or no judgement"):
        add_source(QUICKSTART, "math", Source(uri="gsm.jsonl", name="gsm"))


def test_an_annealing_study_adds_what_helps() -> None:
    said = verdict(math=0.1)
    text = apply_annealing(QUICKSTART, NEW, said, "judge-cpu", DIGEST)
    recipe = read(text)
    assert list(recipe.named_sources) == ["gsm"]
    source = recipe.sources["math"][1]
    assert (source.uri, source.license) == ("gsm.jsonl", "MIT")
    found = source.annealing_verdict
    assert found == annealing_verdict_of(said, "gsm", "judge-cpu", DIGEST)
    assert found is not None
    assert (found.says, found.score) == ("helps", "eval/bpb/math")
    assert 0 < found.low < 0.1 < found.high < 0.2


def test_an_annealing_study_judges_what_is_there() -> None:
    there = apply_annealing(QUICKSTART, NEW, verdict(math=0.1), "judge-cpu", DIGEST)
    text = apply_annealing(there, NEW, verdict(math=-0.1), "judge-cpu", "c" * 64)
    found = read(text).sources["math"][1].annealing_verdict
    assert found is not None
    assert (found.says, found.digest) == ("hurts", "c" * 12)
    assert found.high < 0


def test_a_source_that_does_not_help_is_not_added() -> None:
    with pytest.raises(ValueError, match="no new source helps and the recipe has none of them"):
        apply_annealing(QUICKSTART, NEW, verdict(math=0), "judge-cpu", DIGEST)


def test_one_repeat_is_no_judgement() -> None:
    with pytest.raises(ValueError, match=r"gsm: one repeat .* raise annealing\.draws"):
        annealing_verdict_of(verdict(math=1, repeats=1), "gsm", "judge-cpu", DIGEST)
