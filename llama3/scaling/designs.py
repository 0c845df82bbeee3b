"""Which mixes a search tries: around the base mix, on a lattice of the simplex, or drawn at random around the base.

`around` moves one domain at a time by a step, up and down, the others in proportion: the fewest runs that tell each
domain's effect. `lattice` cuts the simplex of all mixes with at least half of each base share into equal parts
(Scheffe 1958, JRSS B 20:344-360). `draws` are Dirichlet draws around the base mix, as RegMix makes them
(arXiv 2407.01492). All shares are whole tenths of a percent, so that they can be written down. What this gives up: an
optimal design for a given form of the answer.

Whichever way mixes were found, `check_mixes` says before any of them is run whether a fit over the logarithms of their
shares (`llama3/scaling/mixture.py`) can tell the domains apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product

import numpy as np
from numpy.typing import NDArray

from llama3.recipe.section import Domain
from llama3.recipe.units import Share
from llama3.scaling.study import Design
from llama3.tokens.mix import apportion

Shares = dict[Domain, Fraction]
Array = NDArray[np.float64]
PARTS = 1000
"""Shares are whole multiples of 1 / PARTS."""
LEAST_SHARE = 1e-3
"""A share of nothing has no logarithm."""


def designed(design: Design, base: Mapping[Domain, Fraction]) -> dict[str, Shares]:
    """Return the mixes of a design by name, without the base mix itself; domains without a share stay without.

    Raises ValueError for a step that no domain can take.
    """
    present = {domain: share for domain, share in base.items() if share}
    match design.kind:
        case "around":
            found = dict(_around(present, Fraction(design.step)))
        case "lattice":
            found = dict(_lattice(present, design.degree))
        case "draws":
            found = dict(_draws(present, design.count, design.spread, design.seed))
        case _:
            raise ValueError(f"mix.design.kind: {design.kind!r} is none of around, lattice and draws")
    return {name: whole(mix) for name, mix in found.items() if whole(mix) != whole(present)}


def whole(shares: Mapping[Domain, Fraction]) -> Shares:
    """Return shares as whole multiples of 1 / PARTS that sum to 1, each within one of what it was."""
    counts = apportion(PARTS, list(shares.values()))
    return {domain: Fraction(count, PARTS) for domain, count in zip(shares, counts, strict=True)}


def _around(base: Shares, step: Fraction) -> Iterator[tuple[str, Shares]]:
    """Yield the base mix with each domain raised and lowered; one that has less than the step keeps half of it."""
    for domain, share in base.items():
        if not 0 < step < 1 - share:
            raise ValueError(
                f"mix.design.step: {Share(step)} more of {domain}, which has {Share(share)}, leaves nothing for the "
                f"others; write less than {Share(1 - share)}"
            )
        for word, new in (("more", share + step), ("less", max(share - step, share / 2))):
            rest = (1 - new) / (1 - share)
            yield f"{word}-{domain}", {other: new if other == domain else old * rest for other, old in base.items()}


def _lattice(base: Shares, degree: int) -> Iterator[tuple[str, Shares]]:
    """Yield the points of the simplex lattice {domains, degree} above half of each base share."""
    floor = {domain: share / 2 for domain, share in base.items()}
    free = 1 - sum(floor.values())
    for point in product(range(degree + 1), repeat=len(base)):
        if sum(point) == degree:
            parts = zip(base, point, strict=True)
            name = "lattice-" + "-".join(str(count) for count in point)
            yield name, {domain: floor[domain] + free * Fraction(count, degree) for domain, count in parts}


def _draws(base: Shares, count: int, spread: float, seed: int) -> Iterator[tuple[str, Shares]]:
    """Yield Dirichlet draws whose mean is the base mix; the larger `spread`, the nearer to it."""
    weights = np.array([float(share) for share in base.values()]) * spread * len(base)
    for number, drawn in enumerate(np.random.default_rng(seed).dirichlet(weights, count)):
        shares = [Fraction(float(share)).limit_denominator(10**6) for share in drawn]
        total = sum(shares, Fraction(0))
        yield f"draw-{number + 1}", dict(zip(base, (share / total for share in shares), strict=True))


def domains_of(mixes: Collection[Mapping[str, object]]) -> tuple[str, ...]:
    """Return the domains that have a share in any of the mixes; a mix may leave some out."""
    return tuple(dict.fromkeys(domain for mix in mixes for domain, share in mix.items() if share))


def share_table(mixes: Sequence[Mapping[str, float]], domains: Sequence[str]) -> Array:
    """Return the shares as [mixes, domains]."""
    return np.array([[float(mix.get(domain, 0.0)) for domain in domains] for mix in mixes])


def logs(shares: Array) -> Array:
    """Return logarithms of shares, a share of nothing taken for a tenth of a percent."""
    return np.asarray(np.log(np.maximum(shares, LEAST_SHARE)))


def check_mixes(mixes: Sequence[Mapping[str, float]]) -> None:
    """Raise ValueError unless a fit with one coefficient a domain can be made over the mixes, and leaves a residual."""
    domains = domains_of(mixes)
    if len(mixes) < len(domains) + 2:
        raise ValueError(
            f"mix: {len(mixes)} mixes, where a fit over {len(domains)} domains takes {len(domains) + 2}; add arms, or "
            "write design: {kind: around}"
        )
    columns = logs(share_table(mixes, domains))
    rows = np.column_stack([np.ones(len(mixes)), columns])
    if np.linalg.matrix_rank(rows, tol=1e-6) < rows.shape[1]:
        flat = [domain for domain, column in zip(domains, columns.T, strict=True) if np.ptp(column) < 1e-6]
        which = f"{flat[0]} has one share in all of them" if flat else "their domains move together"
        raise ValueError(f"mix: the mixes do not tell the domains apart: {which}; add arms that move it alone")
