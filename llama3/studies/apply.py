"""From a verdict to the recipe that it proposes, as a text that a person can review.

Each changed field gets a comment that names the study and its digest, the file's head says what was changed, and the
recipe carries the study under `studies`, so that the next run's lineage shows it. All else of the file stays as it is.
What this gives up: undoing; the file before is in version control.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from llama3.recipe.base import read_plain
from llama3.recipe.data_schema import AnnealingVerdict, Source, Studied
from llama3.recipe.edit import with_element, with_field
from llama3.recipe.load import RecipeError, override_parts, parse_recipe
from llama3.studies.results import HELPS, Finding, StudyVerdict
from llama3.studies.study import NewSource
from llama3.studies.verdicts import judgement

DIGITS = 12
"""Of a study's digest that are written."""
FIGURES = 6
"""Significant figures of a gain that are."""
WIDTH = 110
"""Longest comment above a field."""


def apply_study(text: str, overrides: Sequence[str], study: str, digest: str, note: Sequence[str] = ()) -> str:
    """Return the recipe `text` with `overrides` such as `mix.base.math=30%` that the study called `study` proposes.

    The first line of `note` stands above each changed field, all of it in the file's head. Raises ValueError if there
    is no override, one names no field, or the changed recipe cannot be run.
    """
    if not overrides:
        raise ValueError(f"study {study}: proposes no change, so there is nothing to apply")
    comment = _comment(study, digest, note)
    fields = []
    changed = text
    for keys, value in (override_parts(override) for override in overrides):
        changed = with_field(changed, keys, read_plain(value), comment)
        fields.append(".".join(keys))
    return _noted(text, changed, Studied(study=study, digest=digest[:DIGITS], changed=fields), note)


def apply_judged(text: str, domain: str, source: int | str, judged: AnnealingVerdict) -> str:
    """Return the recipe `text` with what a study found about one of its sources, by its number or its name.

    Raises ValueError if there is no such source.
    """
    keys = ["sources", domain, str(source), "judged"]
    note = [str(judged)]
    changed = with_field(text, keys, judged.model_dump(mode="json"), _comment(judged.study, judged.digest, note))
    return _noted(text, changed, _entry(judged, keys), note)


def add_source(text: str, domain: str, source: Source) -> str:
    """Return the recipe `text` with a judged source that it did not have; stages draw from it that `add` its name.

    Raises ValueError if nothing was found about it, or the recipe has one of that name.
    """
    judged = source.judged
    if judged is None or source.name is None:
        raise ValueError(f"sources.{domain}: {source.uri} has no name or no judgement; both are needed to add it")
    plain = source.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    note = [f"{source.name} {judged}"]
    changed = with_element(text, ["sources", domain], plain, _comment(judged.study, judged.digest, note))
    return _noted(text, changed, _entry(judged, ["sources", domain, source.name]), note)


def apply_annealing(text: str, new: Mapping[str, NewSource], verdict: StudyVerdict, study: str, digest: str) -> str:
    """Return the recipe `text` with what an annealing study found about the sources `new`, by arm.

    A source that the recipe has under the arm's name gets its judgement whatever it is; one that it has not is added if
    it helps. Raises ValueError if nothing of that can be written.
    """
    changed = text
    known = parse_recipe(read_plain(text), "recipe").apart
    for arm, source in new.items():
        found = judged(verdict, arm, study, digest)
        if arm in known:
            changed = apply_judged(changed, known[arm], arm, found)
        elif found.says == HELPS:
            plain = source.model_dump(mode="json", by_alias=True, exclude={"domain", "name", "judged"})
            changed = add_source(changed, source.domain, Source.model_validate({**plain, "name": arm, "judged": found}))
    if changed == text:
        raise ValueError(
            f"study {study}: no new source helps and the recipe has none of them; there is nothing to apply"
        )
    return changed


def judged(verdict: StudyVerdict, arm: str, study: str, digest: str) -> AnnealingVerdict:
    """Return what an annealing study found about the source of `arm`, shown by the score that tells it most clearly.

    Raises ValueError if it was not judged, or not often enough for an interval.
    """
    says = judgement(verdict, arm)
    own = [one for one in verdict.findings if one.arm == arm]
    telling = [one for one in own if one.says == says] or own
    clearest = max(telling, key=_clearness)
    if clearest.repeats < 2:
        raise ValueError(
            f"{arm}: one repeat gives no interval to write down; raise annealing.draws to 3 and run it again"
        )
    gain, low, high = (float(f"{value:.{FIGURES}g}") for value in (clearest.gain, clearest.low, clearest.high))
    return AnnealingVerdict(
        study=study, digest=digest[:DIGITS], says=says, score=clearest.score, gain=gain, low=low, high=high
    )  # fmt: skip


def _clearness(one: Finding) -> float:
    """Return how far a gain lies from 0 in units of its interval."""
    return abs(one.gain) / max(one.high - one.low, 1e-300)


def _entry(judged: AnnealingVerdict, keys: Sequence[str]) -> Studied:
    return Studied(study=judged.study, digest=judged.digest[:DIGITS], changed=[".".join(keys)])


def _comment(study: str, digest: str, note: Sequence[str]) -> str:
    """Return the comment of a changed field; its first two words find what the same study said before."""
    whole = f"study {study} {digest[:DIGITS]}" + (f": {' '.join(note[0].split())}" if note else "")
    return whole if len(whole) <= WIDTH else f"{whole[: WIDTH - 3]}..."


def _noted(text: str, changed: str, study: Studied, note: Sequence[str]) -> str:
    """Add the study to `studies` and to the head of a changed recipe; check that it can be run."""
    before: list[dict[str, Any]] = (read_plain(text) or {}).get("studies") or []
    same = [one for one in before if (one["study"], one["digest"]) == (study.study, study.digest)]
    fields = list(dict.fromkeys([*(field for one in same for field in one["changed"]), *study.changed]))
    entry = study.model_copy(update={"changed": fields}).model_dump(mode="json")
    listed = [entry if one in same else one for one in before] if same else [*before, entry]
    changed = with_field(changed, ["studies"], listed)
    try:
        parse_recipe(read_plain(changed), "recipe")
    except RecipeError as error:
        raise ValueError(f"study {study.study}: does not fit this recipe:\n{error}") from None
    return _headed(changed, [f"study {study.study} {study.digest} changed {', '.join(study.changed)}", *note])


def _headed(text: str, lines: Sequence[str]) -> str:
    """Put comment lines behind those that open the file, unless they stand there already."""
    opening = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    head = "".join(f"# {'  ' if number else ''}{' '.join(line.split())}\n" for number, line in enumerate(lines))
    return text if head in opening else opening + head + text.removeprefix(opening)
