"""What the recipe alone says of its evaluations: whether they can be made, and what the gate's rules can show.

Before an evaluation only the number of questions and documents is known. Two models are then taken to answer one
question in ten differently, and to differ from document to document by 1.5 % of their bits per byte. From that follows
the power of a rule: the chance that an equal, a better and a worse model pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from herd.llama3.evaluate.requests import read_requests, read_task_json
from herd.llama3.evaluate.scores import GOLD, LANGUAGE, MACRO
from herd.llama3.evaluate.suite import (
    ARITHMETIC,
    BPB,
    CHECKED_ROWS,
    CONTINUATION,
    CORE,
    RESPONSES,
    Suite,
    SuiteTask,
    check_suite,
    recipe_suite,
    stage_suite_name,
    with_suite,
)
from herd.llama3.evaluate.task import TASK_KINDS
from herd.llama3.evaluate.task_yaml import MissingFile, count_rows
from herd.llama3.recipe.base import Domain
from herd.llama3.recipe.gates import Better, GateRule, NoDropOver, NoWorseThan, assign_rules, matches
from herd.llama3.recipe.schema import Recipe
from herd.llama3.statistics.significance import MARGINS, USUAL, Z, items_for, normal_pass, questions_pass
from herd.storage.filesystem import is_local

# Scores that depend on the data (`eval/bpb_language/de`) or on the window (`eval/needle/...`) count as possible.

OPEN = (f"{LANGUAGE}/", f"{GOLD}/", "eval/needle")
"""Prefixes of the scores that the recipe alone does not determine."""


def check_evaluation(recipe: Recipe, look: bool = True, rows: int | None = CHECKED_ROWS) -> list[str]:
    """Return a line for each task that will be left out of a suite that `recipe` names.

    Checks the first `rows` of each data file (None: all), or no file if `look` is False. Raises ValueError, one line
    per fault, for a suite that cannot be evaluated, and a gate rule that matches no score or that no model can pass.
    """
    champion = stage_suite_name(recipe, "champion")
    left_out: list[str] = []
    if look:
        suites = dict.fromkeys(filter(None, (recipe.evaluate.suite, recipe.evaluate.deferred_suite, champion)))
        left_out = [line for suite in suites for line in check_suite(with_suite(recipe, suite), rows)]
    check_rules(with_suite(recipe, champion))
    if faults := [power.warning() for power in gate_powers(recipe, look) if power.refuses_all]:
        raise ValueError("\n".join(faults))
    return list(dict.fromkeys(left_out))


def check_rules(recipe: Recipe) -> None:
    """Raise ValueError, one line per rule, if a rule of `promote.when` judges no score of the recipe's suite."""
    known = sorted(possible_scores(recipe))
    faults = [
        f"promote.when: {pattern} is not among the scores of suite {recipe.evaluate.suite} ({', '.join(known)}); "
        "correct the name, or add its task to evaluate.tasks"
        for pattern in recipe.promote.when
        if not pattern.startswith(OPEN) and not any(matches(pattern, key) for key in known)
    ]
    if faults:
        raise ValueError("\n".join(faults))


def possible_scores(recipe: Recipe) -> set[str]:
    """Return the scores of an evaluation under `recipe`, except those that depend on its data."""
    suite = recipe_suite(recipe)
    tasks = [*suite.built_in, *(planned.name for planned in suite.tasks)]
    keys = {f"eval/{name}" for name in tasks if name != "bits"}
    if "bits" in suite.built_in:
        domains = [domain for domain, sources in recipe.sources.items() if sources]
        keys |= {BPB, MACRO, *(f"{prefix}/{domain}" for prefix in (BPB, MACRO) for domain in domains)}
    if recipe.conversations:
        keys.add(RESPONSES)
    return keys | ({CORE} if keys - {BPB, MACRO} else set())


# Power of the rules.

DISCORDANT = 0.1
"""Share of questions that two equal models answer differently."""
SPREAD = 0.015
"""Standard deviation over documents of the difference of two models' bits per byte, as a share of these."""
GAIN, BITS_GAIN = 0.02, 0.005
"""What a better model has: two points on every task, or 0.5 % fewer bits per byte."""
CHANCE = 0.25
"""Accuracy that counts as 0 in the mean of tasks where no table gives it."""


@dataclass(frozen=True)
class SampleSize:
    """What is known of a score before a model is evaluated."""

    n: int
    items: str
    """Documents or questions."""
    stderr: float
    """Of the difference of two equal models, as a share, or relative to bits per byte."""
    remedy: str = ""
    """How to get more of them; empty: a published set has no more."""
    exact: bool = False
    """Each question has one right answer, so the interval is that of `paired_proportions`."""
    scale: float = 1.0
    """Points of this score for one point on every task: more than 1 for `eval/core`."""


@dataclass(frozen=True)
class RulePower:
    """What a rule of `promote.when` can show about one score."""

    metric: str
    rule: GateRule
    size: SampleSize

    @property
    def is_veto(self) -> bool:
        """Whether an equal model should pass."""
        return not isinstance(self.rule, Better)

    @property
    def gain(self) -> float:
        """What a better model has in this score, and a worse one lacks."""
        return BITS_GAIN if self.size.items == "documents" else GAIN

    def chance(self, worse: float = 0.0, margin: float | None = None, discordant: float = DISCORDANT) -> float:
        """Return the chance that a model passes that is `worse`: by points on every task, or relative bits per byte."""
        margin = self.rule.bound if margin is None else margin
        if self.size.exact:
            return questions_pass(margin, self.size.n, worse, discordant)
        return normal_pass(margin, self.size.stderr, worse * self.size.scale)

    @property
    def shows(self) -> float:
        """Smallest worsening that the 95 % interval tells from none."""
        return Z * self.size.stderr

    @property
    def refuses_all(self) -> bool:
        """Whether not even the same answers pass."""
        return self.is_veto and self.size.exact and not self.chance(discordant=0.0)

    def describe(self) -> str:
        """Return the rule, the smallest change that its documents or questions show, and who passes."""
        unit, gain = "%" if self.size.items == "documents" else " points", self.gain
        names = {f"{100 * gain:g}{unit} better": -gain, "equal": 0.0, f"{100 * gain:g}{unit} worse": gain}
        passes = ", ".join(f"{name} {self.chance(worse):.0%}" for name, worse in names.items())
        return f"{self.rule}: {self.size.n:,} {self.size.items} show {100 * self.shows:.2g}{unit}; passes: {passes}"

    def warning(self) -> str:
        """Return what is wrong with a veto that equal models often fail, and a remedy; "" if nothing is."""
        if not self.is_veto or self.chance() >= USUAL:
            return ""
        of = f"{self.size.n:,} {self.size.items}"
        fault = f"{of} pass an equal model in {self.chance():.0%}"
        if self.refuses_all:
            fault = f"its {of} refuse even the same answers"
        wide = (margin for margin in MARGINS if self.chance(margin=margin / 100) >= USUAL)
        advice = [f"write {self.metric}: {self.rule.with_bound(margin)}" for margin in wide][:1]
        if self.size.remedy and self.rule.bound:
            needed = items_for(self.rule.bound, self.size.n, self.size.stderr)
            advice.append(f"{self.size.remedy} to about {needed:,}")
        elif self.size.exact:
            advice.append(f"{self.metric}: no significant drop with a margin for {CORE}, the mean of the tasks")
        return f"promote.when: {self.metric}: {self.rule}: {fault}; {', or '.join(advice)}"


def rule_powers(recipe: Recipe, sizes: Mapping[str, SampleSize]) -> list[RulePower]:
    """Return the power of each rule of `promote.when` with a margin, for the scores in `sizes`."""
    powers = []
    for pattern, metrics in assign_rules(recipe.promote.when, sizes).items():
        rule = recipe.promote.when[pattern]
        for metric in metrics:
            if (size := sizes.get(metric)) is not None:
                fits = (Better, NoWorseThan) if size.items == "documents" else (NoDropOver,)
                powers += [RulePower(metric, rule, size)] if isinstance(rule, fits) else []
    return powers


def gate_powers(recipe: Recipe, look: bool = True, held_out: Mapping[Domain, int] | None = None) -> list[RulePower]:
    """Return the power of the rules of `promote.when` on the suite that the gate judges; see `expected_sizes`."""
    judged = with_suite(recipe, stage_suite_name(recipe, "champion"))
    return rule_powers(judged, expected_sizes(judged, look, held_out))


def joint_chance(powers: Sequence[RulePower], sign: int) -> float:
    """Return the chance that a model passes all vetoes that is worse (1), equal (0) or better (-1) everywhere."""
    return math.prod(power.chance(sign * power.gain) for power in powers if power.is_veto)


def expected_sizes(
    recipe: Recipe, look: bool = True, held_out: Mapping[Domain, int] | None = None
) -> dict[str, SampleSize]:
    """Return by score how many documents or questions the suite of `recipe` will have.

    Questions of a set are counted in its files, if they are on this machine and `look` is set, else as its task says; a
    set of unknown size is left out. `held_out` has the number of held-out documents of domains where it is known.
    """
    suite, section = recipe_suite(recipe), recipe.evaluate
    domains: list[Domain] = [domain for domain, sources in recipe.sources.items() if sources]
    documents = {each: min(section.documents, (held_out or {}).get(each, section.documents)) for each in domains}
    documents = {domain: count for domain, count in documents.items() if count}
    sizes: dict[str, SampleSize] = {}
    if "bits" in suite.built_in and documents:
        more = "raise evaluate.documents, or curate.validation_fraction,"
        for domain, count in documents.items():
            sizes[f"{BPB}/{domain}"] = SampleSize(count, "documents", SPREAD / math.sqrt(count), more)
        shares = {domain: float(recipe.first_mix.get(domain, 0)) for domain in documents}
        if total := sum(shares.values()):
            variance = sum((share / total) ** 2 / documents[domain] for domain, share in shares.items())
            sizes[BPB] = SampleSize(sum(documents.values()), "documents", SPREAD * math.sqrt(variance), more)
    if "arithmetic" in suite.built_in:
        sizes[ARITHMETIC] = _questions(section.questions, "raise evaluate.questions")
    if "continuation" in suite.built_in and documents:
        count = min(section.questions, sum(documents.values()))
        sizes[CONTINUATION] = _questions(count, "raise evaluate.documents and evaluate.questions")
    for planned in suite.tasks:
        if known := _count_questions(planned, look):
            kept = min(known, section.limit or known)
            remedy = "raise evaluate.limit" if kept < known else ""
            sizes[f"eval/{planned.name}"] = _questions(kept, remedy, _has_right_answers(planned))
    questions = [key for key, size in sizes.items() if size.items == "questions"]
    scales = {key: 1 / (1 - base) for key, base in core_baselines(suite, questions).items()}
    if scales:
        stderr = math.hypot(*(sizes[key].stderr * scale for key, scale in scales.items())) / len(scales)
        count, scale = sum(sizes[key].n for key in scales), sum(scales.values()) / len(scales)
        sizes[CORE] = SampleSize(count, "questions", stderr, scale=scale)
    return sizes


def core_baselines(suite: Suite, keys: Iterable[str]) -> dict[str, float]:
    """Return the accuracy that counts as 0 of those of `keys` that count in `eval/core`; CHANCE if no table has it."""
    if suite.baselines is None:
        return dict.fromkeys(keys, CHANCE)
    table = {f"eval/{name}": base for name, base in suite.baselines.baselines.items()}
    return {key: table[key] for key in keys if key in table}


def _questions(count: int, remedy: str, exact: bool = True) -> SampleSize:
    return SampleSize(count, "questions", math.sqrt(DISCORDANT / count), remedy, exact)


def _count_questions(planned: SuiteTask, look: bool) -> int | None:
    """Return the questions of a set; None if that is unknown, or if it has texts instead of questions."""
    definition = planned.definition
    if isinstance(definition, Path):
        task = read_requests(definition).task
        return None if TASK_KINDS[task.kind].whole_texts else task.questions
    if TASK_KINDS[definition.kind].whole_texts:
        return None
    count = definition.questions
    try:
        if look and all(is_local(planned.data_paths.uri(name)) for name in definition.data):
            count = count_rows(definition, planned.data_paths)
    except MissingFile:
        pass  # `check_suite` says so; the published size counts
    return count if count is None or definition.limit is None else min(count, definition.limit)


def _has_right_answers(planned: SuiteTask) -> bool:
    """Return whether each question has one answer, right or wrong, and the score is the mean over questions."""
    definition = planned.definition
    if isinstance(definition, Path):
        facts = read_task_json(definition)
        return bool(facts.get("average", "items") == "items" and facts.get("writing", {}).get("samples", 1) == 1)
    return definition.average == "items" and definition.writing.samples == 1
