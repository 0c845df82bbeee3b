"""Check, from the recipe alone, that its suites can be evaluated and that `promote.when` names scores they produce.

Scores that depend on the data (`eval/bpb_language/de`) or on the window (`eval/needle/...`) count as possible.
"""

from __future__ import annotations

from llama3.evaluate.scores import GOLD, LANGUAGE, MACRO
from llama3.evaluate.suite import (
    BPB,
    CHECKED_ROWS,
    CORE,
    RESPONSES,
    check_suite,
    recipe_suite,
    stage_suite_name,
    with_suite,
)
from llama3.recipe.gates import matches
from llama3.recipe.schema import Recipe

OPEN = (f"{LANGUAGE}/", f"{GOLD}/", "eval/needle")
"""Prefixes of the scores that the recipe alone does not determine."""


def check_evaluation(recipe: Recipe, look: bool = True, rows: int | None = CHECKED_ROWS) -> list[str]:
    """Return a line for each task that will be left out of a suite that `recipe` names.

    Checks the first `rows` of each data file (None: all), or no file if `look` is False. Raises ValueError, one line
    per fault, for a suite that cannot be evaluated or a gate rule that matches no score.
    """
    champion = stage_suite_name(recipe, "champion")
    left_out: list[str] = []
    if look:
        suites = dict.fromkeys(filter(None, (recipe.evaluate.suite, recipe.evaluate.deferred_suite, champion)))
        left_out = [line for suite in suites for line in check_suite(with_suite(recipe, suite), rows)]
    check_rules(with_suite(recipe, champion))
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
