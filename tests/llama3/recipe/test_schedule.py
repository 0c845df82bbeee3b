from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama3.recipe.lint import lint
from llama3.recipe.load import load_recipe
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe

QUICKSTART = load_recipe(Path("recipes/quickstart.yaml"))
PUBLISHED = load_recipe(Path("recipes/llama3-405b.yaml"))


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Recipes with up to five stages of any length and shape."""
    seqs = st.sampled_from([64, 128, 256])
    stages = []
    for index in range(draw(st.integers(1, 5))):
        seq = draw(st.one_of(seqs, st.lists(seqs, min_size=1, max_size=3)))
        longest = max(seq) if isinstance(seq, list) else seq
        batch = longest * draw(st.integers(1, 8)) * (256 // longest)
        length = draw(st.integers(1, 200_000))
        stages.append(
            {"name": f"s{index}", "for": f"{length} tokens", "seq": seq, "batch": f"{batch} tokens", "mix": "base"}
        )
    data = QUICKSTART.model_dump(mode="json", by_alias=True)
    return Recipe.model_validate({**data, "stages": stages, "evaluate": {}})


@given(recipes())
def test_segments_tile_the_run(recipe: Recipe) -> None:
    schedule = Schedule(recipe)
    position = step = 0
    for segment in schedule.segments:
        assert (segment.start, segment.first_step) == (position, step)
        assert segment.tokens == segment.steps * segment.batch
        assert abs(segment.tokens - segment.asked) <= max(segment.batch / 2, segment.batch - segment.asked)
        assert schedule.segment_at(segment.start) == schedule.segment_at(segment.end - 1) == segment
        assert schedule.step_at(segment.start + segment.batch) == step + 1
        position, step = segment.end, step + segment.steps
    assert (schedule.tokens, schedule.steps) == (position, step)


@given(recipes())
def test_rates_stay_between_zero_and_peak(recipe: Recipe) -> None:
    schedule = Schedule(recipe)
    for segment in schedule.segments:
        for position in (segment.start, segment.end - segment.batch):
            assert 0 < schedule.lr_at(position) <= recipe.lr.peak


def test_the_published_schedule() -> None:
    schedule = Schedule(PUBLISHED)
    shapes = [(part.stage, part.seq, part.batch) for part in schedule.segments]
    assert shapes[:3] == [("ramp-4k", 4096, 2**22), ("ramp-8k", 8192, 2**23), ("main", 8192, 2**24)]
    assert [part.seq for part in schedule.segments[3:]] == [16384, 32768, 49152, 65536, 98304, 131072, 131072]
    assert [span.steps for span in schedule.spans] == [60, 342_101, 711_083, 50_863, 2]
    assert schedule.spans[1].start == 60 * 2**22
    assert schedule.spans[2].start == pytest.approx(2.87e12, rel=1e-5)
    assert schedule.tokens == pytest.approx(15.6e12, rel=1e-5)


def test_the_published_learning_rate() -> None:
    schedule = Schedule(PUBLISHED)

    def at(step: int) -> float:
        part = next(p for p in schedule.segments if p.first_step <= step < p.first_step + p.steps)
        return schedule.lr_at(part.start + (step - part.first_step) * part.batch)

    assert at(0) == pytest.approx(8e-5 / 8000)
    assert at(3999) == pytest.approx(4e-5)
    assert at(8000) == pytest.approx(8e-5)
    assert at(604_000) == pytest.approx((8e-5 + 8e-7) / 2, rel=1e-6)
    begin = schedule.lr_at(schedule.spans[-1].start)
    assert schedule.lr_at(schedule.spans[-1].start + 2**24) == pytest.approx(begin / 2)


def test_the_cosine_ends_at_its_floor() -> None:
    recipe = load_recipe(Path("recipes/llama3-405b.yaml"), ["lr.cosine.over=1M steps"])
    schedule = Schedule(recipe)
    assert schedule.lr_at(schedule.spans[3].start) == pytest.approx(8e-7)


def test_the_published_numbers_earn_three_warnings() -> None:
    warnings = lint(PUBLISHED)
    assert len(warnings) == 3
    assert "ramp-4k" in warnings[0]
    assert "60 steps, inside the warm-up of 8K steps" in warnings[0]
    assert "2.4 steps" in warnings[1]
    assert "the cosine ends at step 1.2M" in warnings[2]


def test_the_quickstart_earns_none() -> None:
    assert lint(QUICKSTART) == []
