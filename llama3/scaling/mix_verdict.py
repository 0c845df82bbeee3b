"""What a mix search says: the proposal with its gain, or that no mix is better than the one there is, and what to add.

What this gives up: a change of a mix that helps one domain at another's cost is shown in the findings and not proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from llama3.recipe.units import Share
from llama3.scaling.contrast import comparable, findings
from llama3.scaling.mixture import Mixture, Proposal, pareto
from llama3.scaling.outcome import Outcome
from llama3.scaling.verdict import NOTHING, Verdict
from llama3.tokens.mix import apportion

LEAST_RANK = 0.5
"""A fit whose predictions of arms left out go with what was measured less than this orders nothing."""
HALVES = 200
"""Proposed shares are whole halves of a percent."""


def mix_verdict(
    made: Mixture, found: Proposal, outcomes: Sequence[Outcome], control: str, arms: Sequence[str], mix: str
) -> Verdict:
    """Return what the search came to; `arms` are all but the control, `mix` the name of the mix in the recipe."""
    flags = [*comparable(outcomes, control, arms), *_flags(made, control)]
    gain = found.gain
    ends = f"{gain.value:+.4f} bpb, 95 % {gain.low:.4f}..{gain.high:.4f}"
    rounded = whole(found)
    if found.significant:
        listed = "/".join(f"{float(share) * 100:g}" for share in rounded.values())
        headline = [f"take {mix} {listed} ({'/'.join(rounded)}): weighted {ends}"]
        change = [f"mix.{mix}.{domain}={Share(share)}" for domain, share in rounded.items()]
    else:
        headline, change = [f"{NOTHING}: keep {mix} (best blend of the arms: weighted {ends})"], []
    headline.append(f"not beaten on every domain by any other arm: {', '.join(pareto(made))}")
    headline.append(
        f"arms left out of the fit are ordered with a rank correlation of {made.rank_correlation:.2f}; "
        f"noise by {'seeds' if made.by_seeds else 'what the form leaves unexplained'}"
    )
    return Verdict(headline=headline, change=change, flags=flags, findings=findings(outcomes, control, arms))


def whole(found: Proposal) -> dict[str, Fraction]:
    """Return the proposed shares in whole halves of a percent that sum to 1."""
    values = np.array([one.value for one in found.shares.values()])
    exact = [Fraction(float(value)).limit_denominator(10**6) for value in values / values.sum()]
    counts = apportion(HALVES, [share / sum(exact) for share in exact])
    return {domain: Fraction(count, HALVES) for domain, count in zip(found.shares, counts, strict=True)}


def _flags(made: Mixture, control: str) -> list[str]:
    flags = []
    if not made.rank_correlation >= LEAST_RANK:
        flags.append(
            f"the fit orders arms that it has not seen with a rank correlation of {made.rank_correlation:.2f}; add "
            "arms or seeds, or train longer"
        )
    if not made.by_seeds:
        flags.append(
            "noise is what the form leaves unexplained, not that between seeds; add seeds to tell the two apart"
        )
    if control not in pareto(made):
        flags.append(f"an arm beats {control} on every domain; see the table of findings")
    return flags
