"""Frozen fields against brute force: the data and rate of each step before a position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.recipe.frozen import check_frozen_fields, frozen_fields
from herd.llama3.recipe.load import RecipeError, load_recipe, parse_recipe, resolved
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe

FOUR_STAGES = Path("tests/llama3/recipe/four_stages.yaml")
MIXES = {
    "base": {"general": "50%", "math": "25%", "code": "17%", "multilingual": "8%"},
    "twin": {"general": "50%", "math": "25%", "code": "17%", "multilingual": "8%"},
    "late": {"general": "30%", "math": "40%", "code": "22%", "multilingual": "8%"},
}
RATES: list[dict[str, Any]] = [
    {"cosine": {"to": 1e-4, "over": "40 steps"}},
    {"cosine": {"to": 2e-4, "over": "40 steps"}},
    {"linear": {"to": 1e-4, "over": "60K"}},
    {"wsd": {"to": 0, "decay": "10 steps"}},
    {"wsd": {"to": 0, "decay": "20 steps", "shape": "linear"}},
]
STAGE: dict[str, list[Any]] = {
    "for": ["5K", "8K", "16K"],
    "seq_len": [128, 256, [128, 256]],
    "batch": ["512 tokens", "1Ki"],
    "mix": ["base", "twin", "late"],
    "lr": [None, "constant", "linear to 0"],
    "weight_averaging": [None, None, 3, "polyak", "ema 0.9"],
}


def stage(number: int) -> st.SearchStrategy[dict[str, Any]]:
    fields = {key: st.sampled_from(values) for key, values in STAGE.items()}
    return st.fixed_dictionaries(fields).map(lambda fields: {"name": f"s{number}", **fields})


def recipe(stages: list[dict[str, Any]], rate: dict[str, Any], warmup: str = "6 steps", **more: Any) -> Recipe:
    data = resolved(load_recipe(FOUR_STAGES))
    data |= {"stages": stages, "lr": {"peak": 1e-3, "warmup": warmup, **rate}, "mix": MIXES, "evaluate": {}}
    return parse_recipe(data | {"tokens": {"chunk_tokens": "256 tokens"}} | more, "test")


def trained(recipe: Recipe, position: int) -> list[tuple[Any, ...]]:
    """Return what each step before `position` was trained on and with which rate."""
    schedule, steps = Schedule(recipe), []
    for span in schedule.spans:
        for part in span.segments:
            for start in range(part.start, min(part.end, position), part.batch):
                steps.append((start, part.batch, part.seq_len, span.shares, schedule.lr_at(start)))
    return steps


def averaging(recipe: Recipe, position: int) -> tuple[str, int, int] | None:
    spans = [
        span for span in Schedule(recipe).spans if span.stage.weight_averaging and span.start < position < span.end
    ]
    return (str(spans[0].stage.weight_averaging), spans[0].start, spans[0].end) if spans else None


@given(st.data())
def test_frozen_fields_are_equal_exactly_when_all_steps_are(data: st.DataObject) -> None:
    """The second recipe differs from the first in one stage and one rate at most, so that both answers are common."""
    stages = [data.draw(stage(number)) for number in range(3)]
    rate = data.draw(st.sampled_from(RATES))
    first = recipe(stages, rate)
    changed = data.draw(st.integers(0, 2))
    other = [*stages[:changed], data.draw(stage(changed)), *stages[changed + 1 :]]
    second = recipe(data.draw(st.sampled_from([stages, other])), data.draw(st.sampled_from([rate, *RATES])))
    ends = [start for start, *_ in trained(first, Schedule(first).tokens)]
    position = data.draw(st.sampled_from([*ends, Schedule(first).tokens]))
    same = trained(first, position) == trained(second, position) and (
        averaging(first, position) == averaging(second, position)
    )
    if position > Schedule(second).tokens:
        same = False
    assert (frozen_fields(first, position) == frozen_fields(second, position)) == same
    if same:
        check_frozen_fields(first, second, position)
    else:
        with pytest.raises(RecipeError, match=r"the past of a run cannot change; .*\n- .*\n\+ "):
            check_frozen_fields(first, second, position)


@given(st.lists(st.sampled_from([0, 1, 2]), unique=True), st.integers(0, 2))
def test_stages_after_the_position_may_change(changed: list[int], done: int) -> None:
    before = load_recipe(FOUR_STAGES)
    position = Schedule(before).spans[done].end
    names = [before.stages[number].name for number in changed if number > done]
    overrides = [f"stages.{name}.{field}" for name in names for field in ("batch=4Ki", "seq_len=256", "mix=annealing")]
    check_frozen_fields(before, load_recipe(FOUR_STAGES, overrides), position)


@pytest.mark.parametrize(
    ("position", "change", "line"),
    [
        (1, "seed=2", "- seed: 1\n+ seed: 2"),
        (1, "precision=bf16", "- precision: fp32\n+ precision: bf16"),
        (1, "model.layers=3", "- model.layers: 4\n+ model.layers: 3"),
        (1, "sources.code.0.limit=7MB", "- sources.code.0.limit: 4MB\n+ sources.code.0.limit: 7MB"),
        (1, "curate.dedup.jaccard=0.7", "- curate.dedup.jaccard: 0.8\n+ curate.dedup.jaccard: 0.7"),
        (1, "tokenizer.train.vocab=4000", "- tokenizer.train.vocab: 4096\n+ tokenizer.train.vocab: 4000"),
        (1, "optimizer.weight_decay=0", "- optimizer.weight_decay: 0.1\n+ optimizer.weight_decay: 0.0"),
        (1, "z_loss=1e-4", "- z_loss: 0.0\n+ z_loss: 0.0001"),
        (1, "lr.peak=1e-3", "- lr.peak: 0.002\n+ lr.peak: 0.001"),
        (400_000, "lr.cosine.over=2M", "- lr.cosine.over: 700K\n+ lr.cosine.over: 2M"),
        (1, "stages.ramp-1.batch=1Ki", "- stages.ramp-1.batch: 512 tokens\n+ stages.ramp-1.batch: 1Ki"),
        (1, "stages.ramp-1.seq_len=256", "- stages.ramp-1.seq_len: 128\n+ stages.ramp-1.seq_len: 256"),
        (400_000, "stages.ramp-2.until=250K", "- stages.ramp-2.until: 220K\n+ stages.ramp-2.until: 250K"),
        (400_000, "stages.main.until=320K", "- stages.main.until: 600K\n+ stages.main.until: 320K"),
        (1, "stages.ramp-1.mix=annealing", "- stages.ramp-1.mix.code: 17%\n+ stages.ramp-1.mix.code: 22%"),
        (1, "mix.base={general: 60%, math: 15%, code: 17%, multilingual: 8%}",
         "- stages.ramp-1.mix.general: 50%\n+ stages.ramp-1.mix.general: 60%"),
        (650_000, "stages.anneal.weight_averaging=2",
         "- stages.anneal.weight_averaging: last 4\n+ stages.anneal.weight_averaging: last 2"),
        (650_000, "stages.anneal.for=200K", "- stages.anneal.for: 100K\n+ stages.anneal.for: 200K"),
        (650_000, "stages.anneal.lr=constant", "- stages.anneal.lr: linear to 0\n+ stages.anneal.lr: constant"),
    ],
)  # fmt: skip
def test_a_changed_past_is_refused_with_its_first_differing_line(position: int, change: str, line: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_frozen_fields(load_recipe(FOUR_STAGES), load_recipe(FOUR_STAGES, [change]), position)
    assert str(caught.value).endswith(line)
    check_frozen_fields(load_recipe(FOUR_STAGES), load_recipe(FOUR_STAGES, [change]), 0)


@pytest.mark.parametrize(
    ("stage", "steps", "changes"),
    [
        ("ramp-1", 20, ["lr.cosine.to=1e-5", "mix.annealing={general: 100%}", "stages.anneal.lr=constant"]),
        ("ramp-1", 20, ["lr.cosine=null", "lr.wsd={to: 0, decay: 100K}"]),
        ("ramp-1", 100, ["stages.ramp-1.until=200K"]),
        ("main", 0, ["stages.main.until=2M", "stages.main.batch=4Ki", "stages.anneal.weight_averaging=2"]),
        ("main", 9, ["stages.main.until=2M", "checkpoint.every=5 min", "checkpoint.keep.last=9"]),
        ("anneal", 9, ["evaluate.documents=8", "promote.to=challenger", "name=other", "tokens.max_epochs=9"]),
        ("anneal", 9, ["spikes.policy=skip", "non_finite=skip", "model.max_seq_len=4096", "stages.ramp-1.name=first"]),
    ],
)
def test_later_stages_and_fields_without_effect_may_change(stage: str, steps: int, changes: list[str]) -> None:
    before = load_recipe(FOUR_STAGES)
    segment = Schedule(before).span(stage).segments[0]
    check_frozen_fields(before, load_recipe(FOUR_STAGES, changes), segment.start + steps * segment.batch)


def test_a_wsd_run_is_lengthened_until_its_decay_begins() -> None:
    rate = {"wsd": {"to": 0, "decay": "10 steps"}}
    stages = [{"name": "main", "for": "100Ki", "seq_len": 128, "batch": "1Ki", "mix": "base"}]
    short, longer = recipe(stages, rate), recipe([{**stages[0], "for": "200Ki"}], rate)
    check_frozen_fields(short, longer, 90 * 1024)
    with pytest.raises(RecipeError, match=r"- stages\.main\.for: 100Ki\n\+ stages\.main\.for: 200Ki"):
        check_frozen_fields(short, longer, 92 * 1024)


def test_a_longer_sequence_later_needs_the_unit_written_down() -> None:
    before = load_recipe(FOUR_STAGES)
    with pytest.raises(RecipeError, match=r"tokens.chunk_tokens: .* write tokens: \{chunk_tokens: 512 tokens\}"):
        check_frozen_fields(before, load_recipe(FOUR_STAGES, ["stages.anneal.seq_len=1024"]), 1)
    check_frozen_fields(
        before, load_recipe(FOUR_STAGES, ["stages.anneal.seq_len=1024", "tokens.chunk_tokens=512 tokens"]), 1
    )


def test_parts_may_be_written_out_as_stages() -> None:
    """What a failed gate asks for: one length trained longer than the others."""
    begin = {"name": "main", "for": "16Ki", "seq_len": 128, "batch": "1Ki", "mix": "base"}
    split = {"name": "long", "for": "24Ki", "seq_len": [128, 256], "mix": "base", "gates": ["needle"]}
    parts = [
        {**split, "name": f"long-{seq_len}", "seq_len": seq_len, "for": length}
        for seq_len, length in ((128, "12Ki"), (256, "40Ki"))
    ]
    before, after = recipe([begin, split], RATES[2]), recipe([begin, *parts], RATES[2])
    check_frozen_fields(before, after, 28 * 1024)
    check_frozen_fields(before, recipe([begin, {**split, "for": ["12Ki", "40Ki"]}], RATES[2]), 40 * 1024)
