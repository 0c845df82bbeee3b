"""Apply a verdict to a recipe, as text that a person can review.

Each changed field gets a comment with the study and its digest, the head of the file lists the changes, and the field
`studies` records them for the lineage of the next run. The rest of the file stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from herd.llama3.recipe.base import read_plain
from herd.llama3.recipe.data_schema import AnnealingVerdict, Source, Studied
from herd.llama3.recipe.edit import with_element, with_field
from herd.llama3.recipe.load import RecipeError, override_parts, parse_recipe
from herd.llama3.studies.results import HELPS, StudyVerdict
from herd.llama3.studies.study import NewSource
from herd.llama3.studies.verdicts import source_effect

DIGITS = 12
"""Digits of a study's digest in the recipe."""
FIGURES = 6
"""Significant figures of a gain in the recipe."""
WIDTH = 110
"""Longest comment above a field."""


def apply_study(text: str, overrides: Sequence[str], study: str, digest: str, note: Sequence[str] = ()) -> str:
    """Return the recipe `text` with `overrides` such as `mix.base.math=30%` that the study named `study` proposes.

    The first line of `note` goes above each changed field, all lines go to the head of the file. Raises ValueError if
    there is no override, if one names no field, or if the changed recipe is not valid.
    """
    if not overrides:
        raise ValueError(f"study {study}: proposes no change, so there is nothing to apply")
    comment = _comment(study, digest, note)
    fields = []
    changed = text
    for keys, value in (override_parts(override) for override in overrides):
        changed = with_field(changed, keys, read_plain(value), comment)
        fields.append(".".join(keys))
    return _record_study(text, changed, study, digest, fields, note)


def apply_annealing_verdict(text: str, domain: str, source: int | str, judged: AnnealingVerdict) -> str:
    """Return the recipe `text` with the verdict on one of its sources, given by number or name.

    Raises ValueError if there is no such source.
    """
    keys = ["sources", domain, str(source), "annealing_verdict"]
    note = [str(judged)]
    changed = with_field(text, keys, judged.model_dump(mode="json"), _comment(judged.study, judged.digest, note))
    return _record_study(text, changed, judged.study, judged.digest, [".".join(keys)], note)


def add_source(text: str, domain: str, source: Source) -> str:
    """Return the recipe `text` with a new, judged source. A stage uses it only if its `extra_sources` names it.

    Raises ValueError if the source has no verdict, or if the recipe has a source with its name.
    """
    judged = source.annealing_verdict
    if judged is None or source.name is None:
        raise ValueError(f"sources.{domain}: {source.uri} has no name or no judgement; both are needed to add it")
    plain = source.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    note = [f"{source.name} {judged}"]
    changed = with_element(text, ["sources", domain], plain, _comment(judged.study, judged.digest, note))
    return _record_study(text, changed, judged.study, judged.digest, [f"sources.{domain}.{source.name}"], note)


def apply_annealing(text: str, new: Mapping[str, NewSource], verdict: StudyVerdict, study: str, digest: str) -> str:
    """Return the recipe `text` with the verdicts of an annealing study on the sources `new`, by variant.

    A source that the recipe already has under the variant's name gets its verdict in any case; a source that it does
    not have is added if it helps. Raises ValueError if neither applies to any source.
    """
    changed = text
    known = parse_recipe(read_plain(text), "recipe").named_sources
    for variant, source in new.items():
        annealing = annealing_verdict_of(verdict, variant, study, digest)
        if variant in known:
            changed = apply_annealing_verdict(changed, known[variant], variant, annealing)
        elif annealing.says == HELPS:
            plain = source.model_dump(mode="json", by_alias=True, exclude={"domain", "name", "annealing_verdict"})
            added = Source.model_validate({**plain, "name": variant, "annealing_verdict": annealing})
            changed = add_source(changed, source.domain, added)
    if changed == text:
        raise ValueError(
            f"study {study}: no new source helps and the recipe has none of them; there is nothing to apply"
        )
    return changed


def annealing_verdict_of(verdict: StudyVerdict, variant: str, study: str, digest: str) -> AnnealingVerdict:
    """Return the verdict on the source of `variant`, with the finding of the highest signal-to-noise ratio.

    Raises ValueError if the variant was not judged, or has too few repeats for an interval.
    """
    says = source_effect(verdict, variant)
    findings = [finding for finding in verdict.findings if finding.variant == variant]
    agreeing = [finding for finding in findings if finding.says == says] or findings
    clearest = max(agreeing, key=lambda finding: finding.signal_to_noise)
    if clearest.repeats < 2:
        raise ValueError(
            f"{variant}: one repeat gives no interval to write down; raise annealing.draws to 3 and run it again"
        )
    gain, low, high = (float(f"{value:.{FIGURES}g}") for value in (clearest.gain, clearest.low, clearest.high))
    return AnnealingVerdict(
        study=study, digest=digest[:DIGITS], says=says, score=clearest.score, gain=gain, low=low, high=high
    )  # fmt: skip


def _comment(study: str, digest: str, note: Sequence[str]) -> str:
    """Return the comment of a changed field; a later run of the study finds it by its first two words."""
    comment = f"study {study} {digest[:DIGITS]}" + (f": {' '.join(note[0].split())}" if note else "")
    return comment if len(comment) <= WIDTH else f"{comment[: WIDTH - 3]}..."


def _record_study(text: str, changed: str, study: str, digest: str, fields: Sequence[str], note: Sequence[str]) -> str:
    """Add the study to `studies` and to the head of the changed recipe; raise ValueError if the recipe is invalid."""
    digest = digest[:DIGITS]
    entries: list[dict[str, Any]] = (read_plain(text) or {}).get("studies") or []
    same = [entry for entry in entries if (entry["study"], entry["digest"]) == (study, digest)]
    merged = list(dict.fromkeys([*(field for entry in same for field in entry["changed"]), *fields]))
    new = Studied(study=study, digest=digest, changed=merged).model_dump(mode="json")
    entries = [new if entry in same else entry for entry in entries] if same else [*entries, new]
    changed = with_field(changed, ["studies"], entries)
    try:
        parse_recipe(read_plain(changed), "recipe")
    except RecipeError as error:
        raise ValueError(f"study {study}: does not fit this recipe:\n{error}") from None
    opening = "".join(takewhile(lambda line: line.startswith("#"), changed.splitlines(keepends=True)))
    lines = [f"study {study} {digest} changed {', '.join(fields)}", *note]
    head = "".join(f"# {'  ' if number else ''}{' '.join(line.split())}\n" for number, line in enumerate(lines))
    return changed if head in opening else opening + head + changed.removeprefix(opening)
