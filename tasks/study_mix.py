"""The analysis of a mix search, with its tables and pictures.

Arms that change something else than shares (caps of topics, say) are compared with the base mix and left out of the
fit; where no arm changes shares, that comparison is the verdict. What this gives up: weights that are not those of the
evaluation; the page says which were used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from llama3.evaluate.suites import BPB
from llama3.recipe.section import Domain
from llama3.scaling.ablation import ablation_verdict
from llama3.scaling.arm import BASE
from llama3.scaling.mix_verdict import mix_verdict
from llama3.scaling.mixture import Mixture, Proposal, fit_mixture, mix_trials, pareto, propose
from llama3.scaling.outcome import Outcome
from llama3.scaling.posed import Posed
from tasks.study_mix_plots import LEFT_OUT, PANELS, SPLIT, against_shares, left_out, split
from tasks.study_page import Analysis, Figure, ViewTable


def mix_analysis(posed: Posed, found: Sequence[Outcome]) -> Analysis:
    """Return what a mix search came to. Raises ValueError for too few mixes, or a missing control."""
    search, ran = posed.study.mix, {one.arm for one in found}
    assert search is not None
    if BASE not in ran:
        raise ValueError(f"mix: the control arm {BASE} has no finished run; run it too")
    shares = {run.arm.name: _plain(run.arm.shares) for run in posed.runs if run.arm.name in ran - set(search.others)}
    weights = _plain(search.weights) or shares[BASE]
    if list(shares) == [BASE]:
        changes = {name: lines for name, lines in search.others.items() if name in ran}
        return Analysis(ablation_verdict(found, BASE, changes, BPB, weights))
    made = fit_mixture(mix_trials(found, shares), weights)
    row = np.array([shares[BASE].get(domain, 0.0) for domain in made.domains])
    bounds: dict[str, tuple[float, float]] = {
        domain: (float(low), float(high)) for domain, (low, high) in search.bounds.items()
    }
    best = propose(made, row, bounds)
    others = [name for name in dict.fromkeys(run.arm.name for run in posed.runs) if name in ran - {BASE}]
    verdict = mix_verdict(made, best, found, BASE, others, search.of)
    return Analysis(verdict, [_arms(made), _proposed(made, best)], _figures(made, best))


def _plain(shares: Mapping[Domain, Fraction]) -> dict[str, float]:
    return {domain: float(share) for domain, share in shares.items()}


def _arms(made: Mixture) -> ViewTable:
    """Return the arms with their shares and losses, the fewest weighted bits first."""
    front = pareto(made)
    order = np.argsort(made.totals)
    rows = [
        [made.arms[i], *(f"{share:.1%}" for share in made.shares[i]), *(f"{loss:.4f}" for loss in made.losses[i]),
         f"{made.totals[i]:.4f}", f"{made.predicted[i]:.4f}", "yes" if made.arms[i] in front else ""]
        for i in order
    ]  # fmt: skip
    columns = ["arm", *made.domains, *(f"bpb {domain}" for domain in made.domains), "weighted", "predicted", "Pareto"]
    note = (
        "Bits per byte, means over repeats. Predicted: by the fit through all other arms. Pareto: no arm beats it on "
        "every domain."
    )
    return ViewTable("Mixes", note, columns, rows)


def _proposed(made: Mixture, best: Proposal) -> ViewTable:
    rows = [
        [domain, f"{weight:.1%}", f"{one.value:.1%}", f"{one.low:.1%} to {one.high:.1%}", f"{slope:+.4f}"]
        for (domain, one), weight, slope in zip(best.shares.items(), made.weights, made.coefficients, strict=True)
    ]
    note = (
        "The best blend of the arms; its spread is what noise leaves open. Slope: weighted bits per byte for each "
        "e-fold of the domain's share; below 0 more of it helps."
    )
    return ViewTable("Best blend", note, ["domain", "weight", "share", "95 %", "slope"], rows)


def _figures(made: Mixture, best: Proposal) -> list[Figure]:
    shares = {
        arm: dict(zip(made.domains, row.tolist(), strict=True)) for arm, row in zip(made.arms, made.shares, strict=True)
    }
    losses = {
        arm: dict(zip(made.domains, row.tolist(), strict=True)) for arm, row in zip(made.arms, made.losses, strict=True)
    }
    pairs = [(float(a), float(b)) for a, b in zip(made.predicted, made.totals, strict=True)]
    return [
        ("Shares", SPLIT, split(shares[BASE], best.shares)),
        ("Bits per byte by share", PANELS, against_shares(shares, losses, BASE)),
        ("Arms that the fit has not seen", LEFT_OUT, left_out({"all domains, weighted": pairs})),
    ]
