"""The pictures of a study: what is drawn is what was found, and where the data end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from herd.llama3.studies.isoflop import NoLawError, fit_ladder
from herd.llama3.studies.results import NOTHING, Finding
from herd.tasks.html import PAGE
from herd.tasks.study.plots import TINTS, against_shares, forest, isoflop, ladder_figures, law
from tests.tasks.study_samples import DOMAINS, findings, ladder, mixes, trials


def texts(svg: str) -> list[str]:
    return re.findall(r">([^<>\n]+)</text>", svg)


def strokes(svg: str, colour: str) -> int:
    """Return how many lines have a colour."""
    return len(re.findall(rf"stroke: {colour}; stroke-width: 1.8", svg))


@pytest.mark.parametrize("variants", [1, 40])
@pytest.mark.slow
def test_the_forest_has_a_row_for_each_variant_and_a_panel_for_each_score(variants: int) -> None:
    found = findings(variants, scores=6)
    svg = forest(found)
    shown = texts(svg)
    assert {f"variant-{variant}" for variant in range(variants)} <= set(shown)
    assert {"general", "math", "code", "multilingual", "task-4", "task-5"} <= set(shown)
    assert (shown.count("bpb"), shown.count("accuracy")) == (4, 2)
    for says, colour in TINTS.items():
        assert strokes(svg, colour) == sum(one.says == says for one in found)


def test_a_finding_without_an_interval_is_a_point_alone() -> None:
    one = findings(1, scores=1)[0]
    endless = Finding(**{**one.model_dump(), "low": float("nan"), "high": float("nan"), "says": NOTHING})
    svg = forest([one, endless.model_copy(update={"variant": "short"})])
    assert "short" in texts(svg)
    assert strokes(svg, TINTS[NOTHING]) == 0


def test_the_ladder_shows_every_budget_and_every_run() -> None:
    made = ladder()
    svg = isoflop(made.parabolas)
    assert {"2e+11", "4e+11", "8e+11", "1.6e+12", "3.2e+12"} <= set(texts(svg))
    circles = sum(len(re.findall("<use ", group)) for group in re.findall(r'id="PathCollection.*?</g>\n  ', svg, re.S))
    assert circles >= len(trials())


def test_a_minimum_at_the_edge_is_hollow_and_does_not_enter_the_law() -> None:
    made = ladder(shift=0.9)
    assert [one.used for one in made.parabolas] == [False, True, True, True, True]
    hollow, filled = (svg.count(f"fill: {PAGE}; stroke: #440154") for svg in map(_drawn, (made, ladder())))
    assert (hollow > 0, filled) == (True, 0)


def _drawn(made: object) -> str:
    return isoflop(made.parabolas)  # type: ignore[attr-defined]


def test_the_law_says_how_far_beyond_the_range_it_is_asked() -> None:
    made = ladder()
    best = made.law.optimum(1e14)
    svg = law(made.law, made.parabolas, 1e14)
    words = " ".join(texts(svg))
    assert f"{best.beyond:.3g} x the largest fitted" in words
    assert "range fitted" in words
    assert f"C^{made.law.alpha.value:.3f}, exponent {made.law.alpha.low:.3f} to {made.law.alpha.high:.3f}" in words
    assert "stroke-dasharray" in svg
    assert "largest fitted" not in " ".join(texts(law(made.law, made.parabolas)))


@pytest.mark.slow
def test_both_pictures_have_title_and_note_and_are_the_same_each_time() -> None:
    made = ladder_figures(ladder(), 1e14)
    assert [title for title, *_ in made] == ["Loss by budget", "The law"]
    assert all(note and svg.startswith("<svg") for _, note, svg in made)
    assert made == ladder_figures(ladder(), 1e14)


def test_a_ladder_without_a_law_can_still_be_drawn(tmp_path: Path) -> None:
    made = [one for one in trials() if one.flops in (2e11, 4e11)]
    with pytest.raises(NoLawError) as caught:
        fit_ladder(made, [2e11, 4e11])
    assert {"2e+11", "4e+11"} <= set(texts(isoflop(caught.value.parabolas)))


def points(svg: str) -> int:
    """Return how many points the scatter plots have."""
    groups = re.findall(r'id="PathCollection_\d+">(.*?)</g>\n  ', svg, re.DOTALL)
    return sum(group.count("<use ") for group in groups)


def test_a_mix_search_has_a_panel_for_each_domain_and_a_point_for_each_variant() -> None:
    shares, losses = mixes(9)
    svg = against_shares(shares, losses, "base")
    assert set(DOMAINS) <= set(texts(svg))
    assert points(svg) == 9 * len(DOMAINS)
