"""The pictures of a mix search: every domain has its panel, every variant its point."""

from __future__ import annotations

import re

from herd.llama3.studies.forecast import Interval
from herd.tasks.study.plots import BLEND, against_shares, left_out, split
from tests.tasks.study_samples import DOMAINS, mixes


def texts(svg: str) -> list[str]:
    return re.findall(r">([^<>\n]+)</text>", svg)


def points(svg: str) -> int:
    """Return how many points the scatter plots have."""
    groups = re.findall(r'id="PathCollection_\d+">(.*?)</g>\n  ', svg, re.DOTALL)
    return sum(group.count("<use ") for group in groups)


def test_a_panel_for_each_domain_and_a_point_for_each_arm() -> None:
    shares, losses = mixes(9)
    svg = against_shares(shares, losses, "base")
    assert set(DOMAINS) <= set(texts(svg))
    assert points(svg) == 9 * len(DOMAINS)


def test_arms_left_out_are_drawn_against_their_predictions() -> None:
    _, losses = mixes(7)
    pairs = {domain: [(own[domain] + 0.01, own[domain]) for own in losses.values()] for domain in DOMAINS}
    svg = left_out(pairs)
    assert points(svg) == 7 * len(DOMAINS)
    assert {"predicted", "measured, bits per byte", *DOMAINS} <= set(texts(svg))
    assert left_out(pairs) == svg


def test_the_best_blend_stands_beside_the_base_mix() -> None:
    shares, _ = mixes(2)
    svg = split(shares["base"], {domain: Interval(0.25, 0.2, 0.3) for domain in DOMAINS})
    assert {"base", "best blend", *DOMAINS} <= set(texts(svg))
    assert svg.count(f"fill: {BLEND}") == len(DOMAINS) + 1  # and the legend's
