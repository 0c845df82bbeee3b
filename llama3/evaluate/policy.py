"""Whether the rules of `promote.when` can be met at all: each names scores that the recipe's suite will have.

Known from the recipe alone, so a misspelt task is found before a run and not by its gate. What this gives up: scores
that depend on the data (`eval/bpb_language/de`) or on the window (`eval/needle/...`) are taken as possible.
"""

from __future__ import annotations

from llama3.evaluate.gold import GOLD
from llama3.evaluate.score_table import LANGUAGE, MACRO
from llama3.evaluate.suites import BPB, CORE, suite_of
from llama3.recipe.rules import matches
from llama3.recipe.schema import Recipe

OPEN = (f"{LANGUAGE}/", f"{GOLD}/", "eval/needle")


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


def possible(recipe: Recipe) -> set[str]:
    """Return the scores that an evaluation under `recipe` has, but for those that only its data decide."""
    suite = suite_of(recipe)
    tasks = [*suite.built_in, *(planned.name for planned in suite.planned)]
    keys = {f"eval/{name}" for name in tasks if name != "bits"}
    if "bits" in suite.built_in:
        domains = [domain for domain, sources in recipe.sources.items() if sources]
        keys |= {BPB, MACRO, *(f"{prefix}/{domain}" for prefix in (BPB, MACRO) for domain in domains)}
    return keys | ({CORE} if keys - {BPB, MACRO} else set())
