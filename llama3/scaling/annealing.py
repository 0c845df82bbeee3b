"""Annealing as a judge of data: is a source, as 30 % of the annealing, worth more than the default mix alone?

Llama 3 (arXiv 2407.21783, section 3.1.3) takes a half-trained model, lets its learning rate go linearly to zero on 30 %
new data and 70 % default mix, and looks at the benchmarks; here a control arm anneals on the default mix for the same
tokens, so that what annealing itself gains is not put down to the source. Each repeat is another helping of documents.
A source may help on one domain and hurt on another; all of it is said. What this gives up: the effect of a source over
a whole training, or at other shares than the one that was tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from llama3.scaling import simulated
from llama3.scaling.contrast import comparable, findings
from llama3.scaling.outcome import Outcome
from llama3.scaling.verdict import HELPS, HURTS, NOTHING, Finding, Verdict

Judgement = Literal["helps", "hurts", "mixed", "no significant difference"]


def annealing_verdict(
    outcomes: Sequence[Outcome], control: str, sources: Mapping[str, str], scores: Sequence[str] | None = None
) -> Verdict:
    """Return what each source does, a line each; `sources` is arm -> name of the source that it adds.

    `scores` are keys; None takes bits per byte of each domain and the accuracy of each task. There is no change: what
    is said of a source is written back to it by `herd study apply`. Raises ValueError as `contrast.comparable` does.
    """
    arms = list(sources)
    flags = comparable(outcomes, control, arms, scores)
    found = findings(outcomes, control, arms, scores)
    lines = [_line(name, [one for one in found if one.arm == arm], control) for arm, name in sources.items()]
    return Verdict(headline=lines, flags=flags, findings=found)


def judgement(verdict: Verdict, arm: str) -> Judgement:
    """Return what the source of `arm` does over all scores. Raises ValueError if the arm was not judged."""
    own = [one for one in verdict.findings if one.arm == arm]
    if not own:
        raise ValueError(f"{arm}: the study does not judge it; run it in the same repeats as the control")
    said = {one.says for one in own} - {NOTHING}
    if len(said) > 1:
        return "mixed"
    return said.pop() if said else NOTHING


def false_findings(studies: int, repeats: int = 3, documents: int = 64, sources: int = 1, seed: int = 0) -> int:
    """Return in how many of so many made-up studies of arms that are all the control a difference is declared.

    Four domains of so many documents and two tasks of 100 questions. At most 5 % should be.
    """
    truth = simulated.Truth(
        domains=dict.fromkeys(("general", "math", "code", "multilingual"), documents),
        questions={"arithmetic": 100, "continuation": 100},
        effects={"default": {}, **{f"again-{place}": {} for place in range(sources)}},
        repeats=repeats,
    )
    names = {arm: arm for arm in truth.effects if arm != "default"}
    verdicts = (annealing_verdict(simulated.outcomes(truth, seed + one), "default", names) for one in range(studies))
    return sum(any(one.says != NOTHING for one in verdict.findings) for verdict in verdicts)


def _line(name: str, found: Sequence[Finding], control: str) -> str:
    if not found:
        return f"{name}: not judged, as nothing can be compared with {control}"
    clear = [str(one) for says in (HELPS, HURTS) for one in _largest(found) if one.says == says]
    if clear:
        return f"{name}: {'; '.join(clear)}"
    first = _largest(found)[0]
    repeats = "" if first.repeats > 1 else " can be told from one repeat"
    chance = " before correction" if first.repeats > 1 and not first.low <= 0 <= first.high else ""
    return f"{name}: {NOTHING}{repeats} (largest: {str(first).removeprefix(NOTHING).strip()}{chance})"


def _largest(found: Sequence[Finding]) -> list[Finding]:
    """Return findings by how far they lie from 0 in units of their own interval, so that units do not matter."""
    return sorted(found, key=lambda one: -abs(one.gain) / max(one.high - one.low, 1e-300))
