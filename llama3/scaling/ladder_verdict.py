"""What a ladder says, in words: the law, the range it was fitted on, and the best use of a budget by both forms.

No number is given without its interval and without how far it lies beyond the data. What this gives up: a choice
between the two forms where they differ; a reader sees both and the flag that says so.
"""

from __future__ import annotations

from llama3.scaling.chinchilla import Chinchilla
from llama3.scaling.forecast import Interval
from llama3.scaling.isoflop import Ladder, Law, NoLaw, Optimum
from llama3.scaling.verdict import Verdict

WIDE = 10.0
"""An interval of tokens whose ends differ by a larger factor decides nothing."""


def ladder_verdict(ladder: Ladder, flops: float | None = None, other: Chinchilla | None = None) -> Verdict:
    """Return what `ladder` says, and at `flops` operations, with the answers of `other` beside its own."""
    headline, flags = [str_law(ladder.law)], list(ladder.flags)
    if other:
        headline.append(
            f"L(N, D) = E + A/N^a + B/D^b through all runs: alpha {_plain(other.alpha)}, E {_plain(other.irreducible)}"
        )
    if flops is not None:
        best = ladder.law.at(flops)
        rival = other.at(flops) if other else None
        headline += [str_optimum(best, ladder.law), *([f"by L(N, D): {_spent(rival)}"] if rival else [])]
        flags += _doubts(best, rival)
    return Verdict(headline=headline, flags=flags)


def no_law(reason: NoLaw) -> Verdict:
    """Return the verdict of a ladder that shows no law."""
    used = sum(one.used for one in reason.parabolas)
    return Verdict(headline=[f"no law: {used} budget(s) with a usable minimum"], flags=reason.flags)


def str_law(law: Law) -> str:
    """Return `N*(C) = 0.31 C^0.530 tokens (95 % of alpha 0.490..0.570), fitted on 2e11..3e12 FLOPs`."""
    alpha = law.alpha
    formula = f"N*(C) = {law.coefficient.value:.3g} C^{alpha.value:.3f} tokens"
    return f"{formula} (95 % of alpha {alpha.low:.3f}..{alpha.high:.3f}), fitted on {_range(law)}"


def str_optimum(best: Optimum, law: Law) -> str:
    """Return `at 1e+14 FLOPs: 21M tokens (..) for a model of 0.8M parameters (..); 330 x beyond ..`."""
    return f"at {best.flops:.3g} FLOPs: {_spent(best)}; {_place(best, law)}"


def _spent(best: Optimum) -> str:
    return f"{_counts(best.tokens)} tokens for a model of {_counts(best.parameters)} parameters"


def _place(best: Optimum, law: Law) -> str:
    if best.flops < law.least:
        return f"{law.least / best.flops:.3g} x below the range fitted ({_range(law)})"
    if best.beyond > 1:
        return f"{best.beyond:.3g} x beyond the range fitted ({_range(law)})"
    return f"inside the range fitted ({_range(law)})"


def _range(law: Law) -> str:
    return f"{law.least:.3g}..{law.most:.3g} FLOPs"


def _doubts(best: Optimum, rival: Optimum | None) -> list[str]:
    flags, at = [], f"at {best.flops:.3g} FLOPs"
    if not best.tokens.high <= WIDE * best.tokens.low:
        flags.append(f"{at} the interval of tokens spans more than a factor of {WIDE:.0f}; add larger budgets")
    if rival and (rival.tokens.low > best.tokens.high or rival.tokens.high < best.tokens.low):
        flags.append(
            f"{at} the two forms disagree beyond their intervals; add budgets, or sizes around each minimum, before "
            "trusting either"
        )
    return flags


def _plain(found: Interval) -> str:
    return f"{found.value:.3f} (95 % {found.low:.3f}..{found.high:.3f})"


def _counts(found: Interval) -> str:
    return f"{count(found.value)} (95 % {count(found.low)}..{count(found.high)})"


def count(number: float) -> str:
    """Return a number as people say it, to three digits: `16.3T`, `812K`; beyond what has a name, `3e+20`."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if scale <= number < 1e15:
            return f"{float(f'{number / scale:.3g}'):g}{unit}"
    return f"{number:.3g}"
