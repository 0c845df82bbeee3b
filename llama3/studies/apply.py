"""Apply a verdict to a recipe, as text that a person can review.

Each changed field gets a comment with the study and its digest, the head of the file lists the changes, and the field
`studies` records them for the lineage of the next run. The rest of the file stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import takewhile
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from herd.llama3.recipe.base import read_plain
from herd.llama3.recipe.data_schema import AnnealingVerdict, Source, Studied
from herd.llama3.recipe.load import RecipeError, element, override_parts, parse_recipe
from herd.llama3.studies.results import HELPS, StudyVerdict
from herd.llama3.studies.study import NewSource
from herd.llama3.studies.verdicts import source_effect

DIGITS = 12
"""Digits of a study's digest in the recipe."""
FIGURES = 6
"""Significant figures of a gain in the recipe."""
COMMENT = 110
"""Longest comment above a field."""
# Not the round trip of ruamel.yaml 0.19: it rewrites aligned columns and broken lines inside brackets. With the best
# width and indentation it changes other lines of 9 of our 19 recipes, e.g. 6 of the 45 lines of quickstart.yaml.
WIDTH = 120
STEP = 2
"""Columns of one level of indentation."""
INLINE = 80
"""Nested values up to this length are written on the line of their key."""
Changed = tuple[str, int]
"""A changed text and the position of the change."""


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
    return comment if len(comment) <= COMMENT else f"{comment[: COMMENT - 3]}..."


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


# Change a field in the text of a recipe and keep all other characters: the YAML parser gives the position of each value
# in the text, and the new value replaces these characters. The new text must parse to the old data plus the change, so
# changes of anchored and merged values are errors.


def with_field(text: str, keys: Sequence[str], value: Any, comment: str = "") -> str:
    """Return `text` with plain data in the field of `keys`, and `# comment` above its line.

    Elements of lists are given by `name` or number. A comment above the line with the same first two words is replaced.
    Raises RecipeError if the element does not exist, or if the change affects other fields.
    """
    expected, node = _read(text)
    where = ".".join(keys)
    new, at = _set(text, node, expected, keys, value, where)
    return _checked(new, expected, where, comment, at)


def with_element(text: str, keys: Sequence[str], value: Any, comment: str = "") -> str:
    """Return `text` with plain data at the end of the list of `keys` (of mappings); a missing list is created.

    Raises RecipeError as `with_field` does.
    """
    expected, node = _read(text)
    items: Any = expected
    for key in keys:
        pair = _pair(node, key)
        if pair is None or not items[key]:
            return with_field(text, keys, [value], comment)
        node, items = pair[1], items[key]
    if not isinstance(node, SequenceNode):
        raise RecipeError(f"{'.'.join(keys)}: is not a list; write - before its entry")
    items.append(value)
    if node.flow_style:
        new, at = _appended(text, node.value[-1], node.value[0].start_mark.column, value)
    else:
        end = _line(text, _end(text, node))[1]
        new, at = f"{text[:end]}\n{' ' * node.start_mark.column}- {_flow(value)}{text[end:]}", end + 1
    return _checked(new, expected, ".".join(keys), comment, at)


def _read(text: str) -> tuple[dict[str, Any], Node]:
    try:
        plain, node = read_plain(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe: is not YAML: {error}") from error
    if not isinstance(plain, dict) or not isinstance(node, MappingNode):
        raise RecipeError(f"recipe: must be a mapping, not {type(plain).__name__}")
    return plain, node


def _set(text: str, node: Node, plain: Any, keys: Sequence[str], value: Any, where: str, flow: bool = False) -> Changed:
    """Set a field below `node`, in the text and in `plain`, the data of `node`; `flow`: inside brackets."""
    key, *rest = keys
    flow = flow or bool(getattr(node, "flow_style", False))
    if isinstance(node, SequenceNode):
        number = element(plain, key, where)
        old = node.value[number]
        if rest:
            return _set(text, old, plain[number], rest, value, where, flow)
        plain[number] = value
        return f"{text[: old.start_mark.index]}{_flow(value)}{text[_end(text, old) :]}", old.start_mark.index
    if not isinstance(node, MappingNode):
        raise RecipeError(f"{where}: the field before {key!r} has no fields")
    pair = _pair(node, key)
    if pair is not None and rest:
        return _set(text, pair[1], plain[key], rest, value, where, flow)
    plain[key] = reduce(lambda inner, name: {name: inner}, reversed(rest), value)
    return _inserted(text, node, key, plain[key], flow) if pair is None else _replaced(text, pair, value, flow)


def _pair(node: Node, key: str) -> tuple[Node, Node] | None:
    """Return key and value nodes of a mapping; the last of two equal keys, as the parser does."""
    pairs = node.value if isinstance(node, MappingNode) else []
    return next((pair for pair in reversed(pairs) if pair[0].value == key), None)


def _checked(new: str, expected: object, where: str, comment: str, at: int) -> str:
    """Return `new` with `comment` above the line of `at`. Raises RecipeError unless it parses to `expected`."""
    if comment:
        begin, end = _line(new, at)
        indent = " " * _indent(new[begin:end])
        above = new.rfind("\n", 0, max(0, begin - 1)) + 1
        same_study = begin > 0 and new[above:begin].split()[:3] == ["#", *comment.split()[:2]]
        new = f"{new[: above if same_study else begin]}{indent}# {comment}\n{new[begin:]}"
    try:
        parsed = read_plain(new)
    except yaml.YAMLError:
        parsed = None
    if parsed != expected:
        raise RecipeError(f"{where}: cannot be changed without other fields (an anchor?); change it by hand")
    return new


def _replaced(text: str, pair: tuple[Node, Node], value: Any, flow: bool) -> Changed:
    """Replace the value of a key: on its line if it is short or inside brackets, else as a block below it."""
    key, old = pair
    at, start, end = key.start_mark.index, old.start_mark.index, _end(text, old)
    colon = text.index(":", key.end_mark.index) + 1
    if not _fits(value, flow):
        return f"{text[:colon]}{_block(value, key.start_mark.column + STEP)}{text[end:]}", at
    if isinstance(value, dict | list) and _too_wide(text, start, _flow(value)):
        column = _indent(text[slice(*_line(text, start))]) + STEP
        return f"{text[:colon]}\n{' ' * column}{_flow(value, column)}{text[end:]}", at
    beside = start > colon and "\n" not in text[colon:start]
    return f"{text[:start] if beside else text[:colon] + ' '}{_flow(value)}{text[end:]}", at


def _inserted(text: str, node: MappingNode, key: str, value: Any, flow: bool) -> Changed:
    """Add a key at the end of a mapping."""
    if flow and not node.value:
        at = node.start_mark.index + 1
        return f"{text[:at]}{_flow({key: value})[1:-1]}{text[at:]}", at
    if flow:
        return _appended(text, node.value[-1][1], node.value[0][0].start_mark.column, {key: value}, pair=True)
    end, column = _line(text, _end(text, node))[1], node.start_mark.column
    body = f" {_flow(value)}" if _fits(value, flow) else _block(value, column + STEP)
    return f"{text[:end]}\n{' ' * column}{_flow(key)}:{body}{text[end:]}", end + 1


def _appended(text: str, last: Node, column: int, value: Any, pair: bool = False) -> Changed:
    """Add `value`, or its only key with `pair`, after the node `last` inside brackets."""
    at, new = _end(text, last), _flow(value, column)
    gap = f"\n{' ' * column}" if _too_wide(text, at, _flow(value)) else " "
    return f"{text[:at]},{gap}{new[1:-1] if pair else new}{text[at:]}", at + 1 + len(gap)


def _too_wide(text: str, at: int, new: str) -> bool:
    """Return whether the line of `at` is too long after adding `new`."""
    begin, end = _line(text, at)
    return end - begin + 1 + len(new) > WIDTH


def _fits(value: Any, flow: bool) -> bool:
    """Return whether `value` is written on the line of its key."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    nested = [item for item in items if isinstance(item, dict | list) and item]
    return flow or not nested or (len(_flow(value)) <= INLINE and not (isinstance(value, list) and len(nested) > 1))


def _flow(value: Any, column: int | None = None) -> str:
    """Return plain data as YAML for use inside brackets: on one line, or on lines that start at `column`."""
    width = 10**6 if column is None else WIDTH - column
    listed = yaml.safe_dump([value], default_flow_style=True, width=width, allow_unicode=True, sort_keys=False)
    return f"\n{' ' * (column or 0)}".join(listed.strip()[1:-1].split("\n"))


def _block(value: dict[str, Any] | list[Any], column: int) -> str:
    """Return a collection as lines that start at `column`: one per element, deeper values below their key."""
    line = f"\n{' ' * column}"
    if isinstance(value, list):
        return "".join(f"{line}- {_flow(item, column + STEP)}" for item in value)
    return "".join(
        f"{line}{_flow(key)}:"
        + (f" {_flow(item, column + STEP)}" if _fits(item, False) else _block(item, column + STEP))
        for key, item in value.items()
    )


def _end(text: str, node: Node) -> int:
    """Return the end of a value; the parser's end of a block is after the comments behind it."""
    end = int(node.end_mark.index)
    if isinstance(node, ScalarNode):
        return len(text[:end].rstrip()) if node.style in ("|", ">") else end
    if getattr(node, "flow_style", False) or not node.value:
        return end
    last = node.value[-1]
    return _end(text, last[1] if isinstance(last, tuple) else last)


def _line(text: str, at: int) -> tuple[int, int]:
    """Return start and end of the line of the character `at`."""
    end = text.find("\n", at)
    return text.rfind("\n", 0, at) + 1, len(text) if end < 0 else end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
