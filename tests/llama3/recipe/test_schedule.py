from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from herd.llama3.recipe.lint import lint
from herd.llama3.recipe.load import RecipeError, load_recipe
from herd.llama3.recipe.lr import LearningRate
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Span
from herd.llama3.studies.expand import load_study

FILE = Path("tests/llama3/recipe/four_stages.yaml")
FOUR_STAGES = load_recipe(FILE)
PUBLISHED = load_recipe(Path("recipes/llama3-405b.yaml"))


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Recipes with up to five stages of any length and shape."""
    seqs = st.sampled_from([64, 128, 256])
    stages = []
    for index in range(draw(st.integers(1, 5))):
        seq_len = draw(st.one_of(seqs, st.lists(seqs, min_size=1, max_size=3)))
        longest = max(seq_len) if isinstance(seq_len, list) else seq_len
        batch = longest * draw(st.integers(1, 8)) * (256 // longest)
        length = draw(st.integers(1, 200_000))
        stages.append(
            {
                "name": f"s{index}",
                "for": f"{length} tokens",
                "seq_len": seq_len,
                "batch": f"{batch} tokens",
                "mix": "base",
            }
        )
    data = FOUR_STAGES.model_dump(mode="json", by_alias=True)
    return Recipe.model_validate({**data, "stages": stages, "evaluate": {}})


@given(recipes())
def test_segments_tile_the_run(recipe: Recipe) -> None:
    schedule = Schedule(recipe)
    position = step = 0
    for segment in schedule.segments:
        assert (segment.start, segment.first_step) == (position, step)
        assert segment.tokens == segment.steps * segment.batch
        assert abs(segment.tokens - segment.requested) <= max(segment.batch / 2, segment.batch - segment.requested)
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
    shapes = [(part.stage, part.seq_len, part.batch) for part in schedule.segments]
    assert shapes[:3] == [("ramp-4k", 4096, 2**22), ("ramp-8k", 8192, 2**23), ("main", 8192, 2**24)]
    assert [span.name for span in schedule.trained[2:5]] == ["main", "long-16384", "long-32768"]
    assert [part.seq_len for part in schedule.segments[3:]] == [16384, 32768, 49152, 65536, 98304, 131072, 131072]
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


def test_a_cosine_of_one_unit_is_exact() -> None:
    """To the last bit: a resumed run must take the very rates of the journal."""
    schedule, rate = Schedule(PUBLISHED), PUBLISHED.lr
    assert rate.cosine is not None
    for position, actual in schedule.rates(0, schedule.spans[0].end):
        step = schedule.step_at(position)
        share = 8000 / 1_200_000
        half = 0.5 * (1 + math.cos(math.pi * max((step / 1_200_000 - share) / (1 - share), 0.0)))
        assert actual == (
            rate.peak * ((step + 1) / 8000) if step < 7999 else rate.cosine.to + (rate.peak - rate.cosine.to) * half
        )


@st.composite
def schedules(draw: st.DrawFn) -> Recipe:
    """Recipes with batch ramps and stages of own rate; warm-up and cosine, line or decay each count steps or tokens."""
    recipe = draw(recipes())
    laid = Schedule(recipe)
    warm = draw(st.integers(1, max(1, laid.steps - 1)))
    end = draw(st.integers(warm + 1, 2 * laid.steps + 2))

    def span(step: int) -> str:
        """Write where `step` begins in one of the units; a token is added, so that most end inside a step."""
        odd = draw(st.integers(0, 1))
        return draw(st.sampled_from([f"{step} steps", f"{laid.reached(Span(step, 'steps'))[1] + odd} tokens"]))

    rule = draw(st.sampled_from(["cosine", "linear", "wsd"]))
    rate: dict[str, object] = {"peak": 1.0, "warmup": span(warm)}
    if rule == "wsd":
        decay = draw(st.integers(1, max(1, laid.steps - warm)))
        rate["wsd"] = {
            "to": 0.1,
            "shape": draw(st.sampled_from(["linear", "sqrt"])),
            "decay": draw(
                st.sampled_from(
                    [f"{decay} steps", f"{laid.tokens - laid.reached(Span(laid.steps - decay, 'steps'))[1]} tokens"]
                )
            ),
        }
    else:
        rate[rule] = {"to": 0.1, "over": span(end)}
    data = recipe.model_dump(mode="json", by_alias=True)
    rules = st.sampled_from([None, None, "linear to 0", "linear from 0.5 to 0.2", "constant", "constant at 0.3"])
    for stage in data["stages"][1:]:
        stage["lr"] = draw(rules)
    return Recipe.model_validate({**data, "lr": rate})


Steps = list[tuple[int, int]]
"""First token and tokens of each step."""


def written_rate(rate: LearningRate, steps: Steps, number: int, decay_end: int) -> float:
    """Return the rate of the step `number` of the run's schedule; `decay_end` is the number of steps of a wsd run."""
    start, batch = steps[number]
    warm = number + 1 if rate.warmup.unit == "steps" else start + batch
    if warm < rate.warmup.amount:
        return rate.peak * warm / rate.warmup.amount
    length = rate.wsd.decay if rate.wsd else rate.decay.over  # type: ignore[attr-defined]
    now = number if length.unit == "steps" else start
    if rate.wsd:
        end = decay_end if length.unit == "steps" else sum(steps[decay_end - 1])
        begin: float = end - length.amount
    else:
        end, begin = length.amount, rate.warmup.amount
        if length.unit != rate.warmup.unit:  # walk to where the warm-up ends, which may be inside a step
            sizes = [1 if rate.warmup.unit == "steps" else batch for _, batch in steps]
            last = next(step for step in range(len(steps)) if sum(sizes[: step + 1]) >= rate.warmup.amount)
            share = (rate.warmup.amount - sum(sizes[:last])) / sizes[last]
            begin = last + share if length.unit == "steps" else steps[last][0] + share * steps[last][1]
    done = min(1.0, max(0.0, (now - begin) / (end - begin)))
    cosine, line, root = (1 + math.cos(math.pi * done)) / 2, 1 - done, 1 - math.sqrt(done)
    left = cosine if rate.cosine else root if rate.wsd and rate.wsd.shape == "sqrt" else line
    return rate.decay.to + (rate.peak - rate.decay.to) * left


RAMPS = [
    load_recipe(FILE, ["lr.cosine=null", "lr.warmup=300K", f"lr.{rate}"])  # the third batch begins at 220K
    for rate in ("linear={to: 2e-4, over: 480 steps}", "cosine={to: 2e-4, over: 550K}", "wsd={to: 2e-4, decay: 90K}")
]


@given(schedules())
@example(RAMPS[0])
@example(RAMPS[1])
@example(RAMPS[2])
def test_rates_are_those_of_the_written_formulas(recipe: Recipe) -> None:
    """At the first, the last and other steps of each stage, and around the ends of warm-up and decay."""
    schedule = Schedule(recipe)
    steps: Steps = [
        (part.start + step * part.batch, part.batch) for part in schedule.segments for step in range(part.steps)
    ]
    first_of = [span.segments[0].first_step for span in schedule.spans]
    last_ruled = [span.stage.lr is None for span in schedule.spans][::-1].index(True)
    decay_end = [*first_of, len(steps)][len(first_of) - last_ruled]
    for span, first in zip(schedule.spans, first_of, strict=True):
        rates = [schedule.lr_at(steps[first + step][0]) for step in range(span.steps)]
        edges = {
            step for step in range(1, span.steps - 1) if abs(rates[step - 1] - 2 * rates[step] + rates[step + 1]) > 1e-9
        }
        for step in {0, span.steps // 3, span.steps - 1, *sorted(edges)[:3], *sorted(edges)[-3:]}:
            expected = written_rate(recipe.lr, steps, first + step, decay_end)
            if span.stage.lr is not None:
                begin, end = span.stage.lr.start, span.stage.lr.end
                begin = written_rate(recipe.lr, steps, first, decay_end) if begin is None else begin
                expected = begin + ((begin if end is None else end) - begin) * step / span.steps
            assert rates[step] == pytest.approx(expected, rel=1e-9, abs=1e-12), (span.name, step)


def test_a_cosine_in_tokens_begins_where_a_warm_up_in_steps_ends() -> None:
    """The published form: at step 4,000 of 6,715, of a warm-up of 2,000, 0.656 of the peak is left."""
    expanded = load_study(Path("recipes/experiments/ladder-llama3.yaml"))
    recipe = next(run.recipe for run in expanded.runs if run.name == "6e18-524m 1")
    schedule = Schedule(recipe)
    batch = schedule.segments[0].batch
    assert (schedule.steps, str(recipe.lr.warmup)) == (6715, "2K steps")
    left = [schedule.lr_at(step * batch) / recipe.lr.peak for step in (1998, 1999, 2000, 4000)]
    assert left == pytest.approx([0.9995, 1, 1, 0.656], abs=5e-4)


@pytest.mark.parametrize(
    ("rate", "end"),
    [
        ("{peak: 1e-3, warmup: 300 steps, cosine: {to: 0, over: 200K}}", "token [0-9,]{6,}"),
        ("{peak: 1e-3, warmup: 600K, linear: {to: 0, over: 40 steps}}", "step [0-9]{2,}"),
    ],
)
def test_a_decay_inside_a_warm_up_of_the_other_unit_is_refused(rate: str, end: str) -> None:
    told = rf"lr\.(cosine|linear)\.over: .* is not longer than the warm-up of .* ends at {end} of these stages"
    with pytest.raises(RecipeError, match=told):
        load_recipe(FILE, [f"lr={rate}"])


def with_rate(rate: str, *more: str) -> Recipe:
    return load_recipe(FILE, ["lr.cosine=null", rate, *more])


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
@pytest.mark.parametrize("unit", ["steps", "tokens"])
def test_wsd_holds_the_peak_and_decays_at_the_end(shape: str, half: float, unit: str) -> None:
    """The annealing stage has a rule of its own, so the decay ends with the stage before it."""
    decay = "100 steps" if unit == "steps" else f"{100 * 2048} tokens"
    schedule = Schedule(with_rate(f"lr.wsd={{to: 2e-4, decay: {decay}, shape: {shape}}}"))
    main, anneal = schedule.spans[2:]
    end = main.end

    def before_the_end(steps: int) -> float:
        return schedule.lr_at(end - steps * 2048)

    assert schedule.lr_at(schedule.spans[0].start) == pytest.approx(2e-3 / 80)
    assert {before_the_end(steps) for steps in (100, 101, 200)} == {2e-3}
    assert before_the_end(50) == pytest.approx(2e-4 + 1.8e-3 * half)
    assert 2e-4 < before_the_end(1) < before_the_end(2) < before_the_end(99) < 2e-3
    assert schedule.lr_at(anneal.start) == pytest.approx(2e-4)
    half_way = anneal.steps // 2
    assert schedule.lr_at(anneal.start + half_way * 2048) == pytest.approx(2e-4 * (1 - half_way / anneal.steps))


def test_a_longer_wsd_run_begins_like_a_shorter_one() -> None:
    overrides = "lr.wsd={to: 0, decay: 50 steps}", "stages.anneal.lr=null"
    short, longer = (Schedule(with_rate(*overrides, f"stages.anneal.for={size}")) for size in ("400K", "800K"))
    decay = short.tokens - 50 * 2048
    assert short.rates(0, decay) == [pair for pair in longer.rates(0, decay) if pair in short.rates(0, decay)] != []
    assert all(rate == short.lr_at(position) for position, rate in longer.rates(0, decay))
    assert short.lr_at(decay + 2048) < longer.lr_at(decay + 2048) == 2e-3


@given(recipes(), st.data())
def test_rates_name_steps_of_a_range_and_its_ends(recipe: Recipe, data: st.DataObject) -> None:
    schedule = Schedule(recipe)
    stop = data.draw(st.integers(1, schedule.tokens))
    rates = schedule.rates(0, stop)
    last = max(part.start + step * part.batch for part in schedule.segments for step in (0, part.steps - 1)
               if part.start + step * part.batch < stop)  # fmt: skip
    assert rates[0][0] == 0
    assert last <= rates[-1][0] < stop
    for position, rate in rates:
        part = schedule.segment_at(position)
        assert (position - part.start) % part.batch == 0
        assert rate == schedule.lr_at(position)


@given(recipes())
def test_gates_change_neither_positions_nor_rates(recipe: Recipe) -> None:
    data = recipe.model_dump(mode="json", by_alias=True)
    for stage in data["stages"]:
        lengths = stage["seq_len"] if isinstance(stage["seq_len"], list) else []
        stage["gates"] = ["needle"] if len(set(lengths)) == len(lengths) else []
    plain, gated = Schedule(recipe), Schedule(Recipe.model_validate(data))
    assert gated.segments == plain.segments
    assert gated.rates(0, gated.tokens) == plain.rates(0, plain.tokens)
    assert [(span.start, span.end) for span in plain.trained] == [(span.start, span.end) for span in plain.spans]
    assert [segment for span in gated.trained for segment in span.segments] == plain.segments
    for span in gated.trained:
        assert gated.span(span.name) == span
        assert span.part is None or span.name == f"{span.stage.name}-{span.lengths[0]}"
    assert [span.begins_stage for span in gated.trained].count(True) == len(gated.spans)
    assert [span.stage for span in gated.trained if span.ends_stage] == [span.stage for span in gated.spans]


def test_each_length_may_have_its_own_number_of_tokens() -> None:
    stage = "stages.anneal={name: long, for: [20Ki, 40Ki, 10Ki], seq_len: [256, 512, 1024], mix: base, batch: 2Ki}"
    long = Schedule(load_recipe(FILE, [stage, "evaluate={}"])).spans[-1]
    assert [part.tokens for part in long.segments] == [20 * 1024, 40 * 1024, 10 * 1024]
    assert long.tokens == 70 * 1024


def test_the_published_numbers_earn_three_warnings() -> None:
    warnings = lint(PUBLISHED)
    assert len(warnings) == 3
    assert "ramp-4k" in warnings[0]
    assert "60 steps, inside the warm-up of 8K steps" in warnings[0]
    assert "2.4 steps" in warnings[1]
    assert "the cosine ends at step 1.2M" in warnings[2]


def test_the_quickstart_earns_none() -> None:
    assert lint(load_recipe(Path("recipes/quickstart.yaml"))) == []


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        (["lr.cosine=null", "lr.linear={to: 0, over: 2M}"], "lr.linear.over: the line ends at token 2M, the tokens be"),
        (
            ["lr.cosine=null", "lr.linear={to: 0, over: 200K}"],
            "lr.linear.over: the line ends at token 200K, long before",
        ),
        (["lr.cosine=null", "lr.wsd={to: 1e-4, decay: 5 steps}"], "lr.wsd.decay: 5 steps are few"),
        (["lr.cosine=null", "lr.wsd={to: 1e-4, decay: 2M}"], r"lr.wsd.decay: 2M before token .* inside the warm-up"),
        (["lr.cosine=null", "lr.wsd={to: 1e-4, decay: 600 steps}"], "600 steps before step .* inside the warm-up"),
        (["lr.cosine=null", "lr.wsd={to: 0, decay: 90 steps}"], "the decay ends at 0, so stage anneal"),
        ([], "max_seq_len: preset 3m declares 2048, but the longest .* is 512, .* write max_seq_len: 512, or add a"),
        ([], "tokens.shuffle: a batch of stage main has 4 chunks of 512 tokens"),
        (
            ["model.rope_scaling={factor: 2, original: 128}"],
            "factor 2 stretches 128 positions to 256, less than .* 512",
        ),
        (
            ["init_from={path: x}", "tokenizer={use: t}", "mix.base={code: 100%}"],
            "init_from: every token comes from sources.code.0",
        ),
    ],
)
def test_unusual_settings_earn_a_warning(changes: list[str], warning: str) -> None:
    warnings = lint(load_recipe(FILE, changes))
    assert any(re.search(warning, text) for text in warnings), warnings


@pytest.mark.parametrize(
    "rate", ["lr.linear={to: 2e-4, over: 700K}", "lr.wsd={to: 2e-4, decay: 90 steps}", "lr.wsd={to: 2e-4, decay: 100K}"]
)
def test_usual_settings_earn_none(rate: str) -> None:
    assert lint(with_rate(rate, "tokens.shuffle=chunks", "model.max_seq_len=512")) == []


def test_what_a_started_model_was_trained_on_is_not_in_the_recipe() -> None:
    start = ["init_from={path: x}", "tokenizer={use: t}"]
    assert not [line for line in lint(load_recipe(FILE, start)) if "max_seq_len" in line]
    assert load_recipe(FILE, start).final_model.max_seq_len == 2048
    assert FOUR_STAGES.final_model.max_seq_len == 512


@pytest.mark.parametrize("path", sorted(Path("recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_declare_what_they_train(path: Path) -> None:
    assert not [line for line in lint(load_recipe(path)) if "max_seq_len" in line]


def test_a_recipe_builds_its_schedule_once_and_a_changed_copy_another() -> None:
    recipe = load_recipe(FILE)
    assert recipe.schedule is recipe.schedule
    shorter = recipe.model_copy(update={"stages": recipe.stages[:-1]})
    assert len(shorter.schedule.spans) == len(recipe.schedule.spans) - 1
    assert recipe == FOUR_STAGES, "what is cached is not compared"
    assert "schedule" not in recipe.model_dump()
