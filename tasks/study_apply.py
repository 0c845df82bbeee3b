"""From a study to a changed recipe: the file it was asked about, or another one, with what the study proposes.

The study's digest goes into the recipe, so the next run's lineage names it. What this gives up: a check that the recipe
is still the one that was studied; the comment says which it was.
"""

from __future__ import annotations

from pathlib import Path

from llama3.scaling.apply import apply_annealing, apply_study
from storage.root import Root
from tasks.studies import Studies


def applied(root: Root, name: str, recipe: Path | None = None) -> str:
    """Return the text of `recipe` (none: the study's base recipe) as the study `name` proposes it.

    Raises ValueError if there is no such study, it has no verdict, or there is nothing to apply.
    """
    studies = Studies(root)
    record = studies.find(name)
    if record.verdict is None:
        raise ValueError(f"study {name}: has no verdict yet ({record.state}); go on with: {record.command}")
    path = recipe or Path(record.recipe)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); name the recipe to change: --recipe FILE"
        ) from error
    annealing = studies.posed(name).study.annealing
    if annealing is not None:
        return apply_annealing(text, annealing.new, record.verdict, name, record.digest)
    return apply_study(text, record.verdict.change, name, record.digest, record.verdict.headline)
