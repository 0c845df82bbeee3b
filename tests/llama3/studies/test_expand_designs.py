"""Designs of mixes: whole shares, the moves that were asked for, and the same ones every time."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.recipe.base import DOMAINS, Domain
from herd.llama3.recipe.units import Share
from herd.llama3.studies.expand import PARTS, design_mixes, round_shares
from herd.llama3.studies.study import MixDesign
from herd.llama3.tokens.mix import apportion

BASE: dict[Domain, Fraction] = {
    "general": Fraction(1, 2), "math": Fraction(1, 4), "code": Fraction(17, 100), "multilingual": Fraction(2, 25),
}  # fmt: skip
DESIGNS = [
    MixDesign(kind="around", step=Share.parse("10%")),
    MixDesign(kind="lattice", degree=3),
    MixDesign(kind="draws", count=20),
]
bases = st.lists(st.integers(3, 60), min_size=4, max_size=4).map(
    lambda parts: dict(
        zip(
            DOMAINS,
            (Fraction(count, 100) for count in apportion(100, [Fraction(p, sum(parts)) for p in parts])),
            strict=True,
        )
    )
)


@given(base=bases)
def test_shares_are_whole_and_sum_to_one(base: dict[Domain, Fraction]) -> None:
    for design in DESIGNS:
        mixes = design_mixes(design, base)
        assert mixes == design_mixes(design, base)
        assert round_shares(base) not in mixes.values()
        for mix in mixes.values():
            assert sum(mix.values()) == 1
            assert all(share >= 0 and (share * PARTS).denominator == 1 for share in mix.values())
            assert all(Share.parse(str(Share(share))) == share for share in mix.values())


def test_around_moves_one_domain_and_keeps_the_others_in_proportion() -> None:
    mixes = design_mixes(DESIGNS[0], BASE)
    assert list(mixes) == [f"{word}-{domain}" for domain in DOMAINS for word in ("more", "less")]
    assert mixes["more-math"]["math"] == Fraction(35, 100)
    assert mixes["less-multilingual"]["multilingual"] == Fraction(4, 100)  # half, where the step is more than there is
    rest = mixes["more-math"]
    assert float(rest["general"] / rest["code"]) == pytest.approx(50 / 17, abs=0.02)


def test_a_lattice_has_all_its_points_and_keeps_half_of_each_share() -> None:
    mixes = design_mixes(DESIGNS[1], BASE)
    assert len(mixes) == 20
    assert all(
        mix[domain] >= share / 2 - Fraction(1, PARTS) for mix in mixes.values() for domain, share in BASE.items()
    )


def test_draws_lie_around_the_base_and_closer_with_more_concentration() -> None:
    wide, narrow = (design_mixes(MixDesign(kind="draws", count=200, spread=spread), BASE) for spread in (2, 50))
    for mixes in (wide, narrow):
        assert np.mean([float(mix["general"]) for mix in mixes.values()]) == pytest.approx(0.5, abs=0.06)
    spreads = [np.std([float(mix["math"]) for mix in mixes.values()]) for mixes in (wide, narrow)]
    assert spreads[1] < spreads[0] / 3


def test_a_domain_without_a_share_stays_without() -> None:
    base: dict[Domain, Fraction] = {**BASE, "multilingual": Fraction(0), "general": Fraction(58, 100)}
    assert all("multilingual" not in mix for design in DESIGNS for mix in design_mixes(design, base).values())


def test_a_step_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mix\.design\.step: 50% more of general"):
        design_mixes(MixDesign(kind="around", step=Share.parse("50%")), BASE)
