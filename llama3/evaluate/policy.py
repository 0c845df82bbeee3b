"""Whether a recipe's suites can be asked, and the rules of `promote.when` be met: each names scores that there will be.

Known from the recipe alone, so a misspelt task is found before a run and not by its gate. What this gives up: scores
that depend on the data (`eval/bpb_language/de`) or on the window (`eval/needle/...`) are taken as possible.
"""

from __future__ import annotations

from llama3.evaluate.scores import GOLD, LANGUAGE, MACRO
from llama3.evaluate.suite import BPB, CORE, LOOKED_AT, check_suite, suite_for, suite_of, under
from llama3.recipe.gates import matches
from llama3.recipe.schema import Recipe

OPEN = (f"{LANGUAGE}/", f"{GOLD}/", "eval/needle")


def check_evaluation(recipe: Recipe, look: bool = True, rows: int | None = LOOKED_AT) -> list[str]:
    """Return a line for each task that will be left out of a suite that `recipe` names.

    Of data files the first `rows` are looked at (None: all), or none at all without `look`.

    Raises ValueError, one line per fault, for a suite that cannot be asked or a rule of the gate that judges nothing.
    """
    left_out = [line for suite in _suites(recipe) if look for line in check_suite(under(recipe, suite), rows)]
    check_rules(under(recipe, suite_for(recipe, "champion")))
    return list(dict.fromkeys(left_out))


def check_rules(recipe: Recipe) -> None:
    """Raise ValueError, one line per rule, where a rule of `promote.when` judges no score of the recipe's suite."""
    known = sorted(possible(recipe))
    faults = [
        f"promote.when: {pattern} is not among the scores of suite {recipe.evaluate.suite} ({', '.join(known)}); "
        "correct the name, or add its task to evaluate.tasks"
        for pattern in recipe.promote.when
        if not pattern.startswith(OPEN) and not any(matches(pattern, key) for key in known)
    ]
    if faults:
        raise ValueError("\n".join(faults))


def _suites(recipe: Recipe) -> list[str]:
    """Return the suites that `recipe` names, the one for the gate last."""
    asked = [recipe.evaluate.suite, recipe.evaluate.later, suite_for(recipe, "champion")]
    return list(dict.fromkeys(filter(None, asked)))


def possible(recipe: Recipe) -> set[str]:
    """Return the scores that an evaluation under `recipe` has, but for those that only its data decide."""
    suite = suite_of(recipe)
    tasks = [*suite.built_in, *(planned.name for planned in suite.planned)]
    keys = {f"eval/{name}" for name in tasks if name != "bits"}
    if "bits" in suite.built_in:
        domains = [domain for domain, sources in recipe.sources.items() if sources]
        keys |= {BPB, MACRO, *(f"{prefix}/{domain}" for prefix in (BPB, MACRO) for domain in domains)}
    return keys | ({CORE} if keys - {BPB, MACRO} else set())
