"""Mathematics text without end: worked problems for training, and multiple-choice questions of the same kinds.

Problem (seed, index) is a pure function of the two. One canonical statement in 16, chosen by hash, is never generated
for training, whatever the seed; questions are drawn from those alone, so an evaluation asks nothing that was trained
on as such (its sub-steps, such as 7 + 8 inside 17 + 28, may well occur). What this gives up: variety of language;
it teaches the arithmetic and the form, real text has to teach the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llama3.data.demo.math_problems import ARITHMETIC, NUMBERS, Draws, MathProblem
from llama3.data.demo.word_problems import WORDS

KINDS: tuple[Callable[[Draws], MathProblem], ...] = (*ARITHMETIC, *NUMBERS, *WORDS)
_PER_DOCUMENT = (6, 14)
_OFFSETS = (1, 2, 3, 4, 5, 10)


@dataclass(frozen=True)
class MultipleChoice:
    """A multiple-choice question; a scorer joins `query` and a choice with one space."""

    query: str
    """Ends in `Answer:`, as the training documents write it."""
    choices: tuple[str, ...]
    """Four whole numbers near each other."""
    gold: int
    """Index of the right choice."""
    statement: str
    """Canonical form of the problem, as in `Problem.statement`."""


def problem(seed: int, index: int) -> MathProblem:
    """Return training problem `index` of `seed`; never a held-out one."""
    return _drawn("train", seed, index, held_out=False)


def worked_text(draws: Draws, problem: MathProblem) -> str:
    """Return `problem` as training text; half of the problems show their steps, half go straight to the answer."""
    working = f"Working: {problem.steps}\n" if draws.below(2) else ""
    return f"Question: {problem.question}\n{working}Answer: {problem.answer}"


def document(seed: int, index: int) -> str:
    """Return document `index` of `seed`: 6 to 14 problems of mixed kinds, with no problem twice."""
    draws = Draws("document", seed, index)
    problems: dict[str, str] = {}
    for place in range(draws.between(*_PER_DOCUMENT)):
        found = problem(seed, index * _PER_DOCUMENT[1] + place)
        problems.setdefault(found.statement, worked_text(draws, found))
    return "\n\n".join(problems.values())


def questions(seed: int, count: int) -> list[MultipleChoice]:
    """Return `count` different questions, fixed by `seed`; a longer list begins with the shorter one.

    Raises ValueError when so many different ones cannot be found.
    """
    found: dict[str, MultipleChoice] = {}
    for index in range(50 * count):
        if len(found) == count:
            break
        asked = _drawn("question", seed, index, held_out=True)
        if asked.number is not None and asked.statement not in found:
            found[asked.statement] = _question(Draws("choices", seed, index), asked, asked.number)
    if len(found) < count:
        raise ValueError(f"questions: {count} asked, only {len(found)} different ones exist; ask for fewer")
    return list(found.values())


def is_same(problem: MathProblem, question: MultipleChoice) -> bool:
    """Return whether a problem asks what `question` asks, however it is phrased."""
    return problem.statement == question.statement


def _drawn(use: str, seed: int, index: int, *, held_out: bool) -> MathProblem:
    """Return the stream's first problem on the wanted side; the kind is drawn before, so all stay equally common."""
    kind = KINDS[Draws(use, "kind", seed, index).below(len(KINDS))]
    attempt = 0
    while (found := kind(Draws(use, seed, index, attempt))).held_out != held_out:
        attempt += 1
    return found


def _question(draws: Draws, asked: MathProblem, number: int) -> MultipleChoice:
    """Return `asked` with three wrong numbers near the right one, whose rank among the four is itself drawn."""
    lower = min(draws.below(4), number)
    below = [number - offset for offset in draws.sample([o for o in _OFFSETS if o <= number], lower)] if lower else []
    above = [number + offset for offset in draws.sample(_OFFSETS, 3 - len(below))]
    choices = draws.sample([number, *below, *above], 4)
    texts = tuple(map(str, choices))
    return MultipleChoice(f"Question: {asked.question}\nAnswer:", texts, choices.index(number), asked.statement)
