"""Change fields in the text of a recipe and leave every other character as it is.

The YAML parser says where in the text each value stands; the new value is put there, and a comment on the line above.
A library that reads and writes comments would keep those too, but lays out the whole file anew: aligned columns and
broken lines are lost. After each change the text is read again and must say exactly the old plus the change. What this
gives up: a value that others stand on (anchors, merged keys) may not be changed this way, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from llama3.recipe.base import read_plain
from llama3.recipe.load import RecipeError, element

WIDTH = 120
STEP = 2
"""Columns by which a level of a block is indented."""
INLINE = 80
"""Nested values up to this length are written on their key's line."""
Changed = tuple[str, int]
"""A changed text, and where in it the change stands."""


def with_field(text: str, keys: Sequence[str], value: Any, comment: str = "") -> str:
    """Return `text` with the field that `keys` lead to set to plain data, and `# comment` above its line.

    Elements of lists are named by their `name` or number. A comment above the line that begins with the same two words
    is replaced. Raises RecipeError if there is no such element, or the text cannot be changed in this one place.
    """
    expected, node = _read(text)
    where = ".".join(keys)
    new, at = _set(text, node, expected, keys, value, where)
    return _checked(new, expected, where, comment, at)


def with_element(text: str, keys: Sequence[str], value: Any, comment: str = "") -> str:
    """Return `text` with plain data added at the end of the list that `keys` (of mappings) lead to.

    A list that is missing or empty is written anew. Raises RecipeError as `with_field` does.
    """
    expected, node = _read(text)
    place: Any = expected
    for key in keys:
        pair = _pair(node, key)
        if pair is None or not place[key]:
            return with_field(text, keys, [value], comment)
        node, place = pair[1], place[key]
    if not isinstance(node, SequenceNode):
        raise RecipeError(f"{'.'.join(keys)}: is no list; write - before its entry")
    place.append(value)
    new, at = _added(text, node, value)
    return _checked(new, expected, ".".join(keys), comment, at)


def _read(text: str) -> tuple[dict[str, Any], Node]:
    try:
        plain, node = read_plain(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe: is not YAML: {error}") from error
    if not isinstance(plain, dict) or not isinstance(node, MappingNode):
        raise RecipeError(f"recipe: must be a mapping, not {type(plain).__name__}")
    return plain, node


def _set(text: str, node: Node, place: Any, keys: Sequence[str], value: Any, where: str, flow: bool = False) -> Changed:
    """Set a field below `node`, in the text and in `place`, the plain data that it stands for."""
    key, *rest = keys
    flow = flow or _is_flow(node)
    if isinstance(node, SequenceNode):
        number = element(place, key, where)
        old = node.value[number]
        if rest:
            return _set(text, old, place[number], rest, value, where, flow)
        place[number] = value
        return f"{text[: _start(old)]}{_flow(value)}{text[_end(text, old) :]}", _start(old)
    if not isinstance(node, MappingNode):
        raise RecipeError(f"{where}: the field before {key!r} has no fields")
    pair = _pair(node, key)
    if pair is not None and rest:
        return _set(text, pair[1], place[key], rest, value, where, flow)
    place[key] = _nested(rest, value)
    return _inserted(text, node, key, place[key], flow) if pair is None else _replaced(text, pair, value, flow)


def _pair(node: Node, key: str) -> tuple[Node, Node] | None:
    """Return key and value nodes of a mapping; of two equal keys the last counts, as it does for the parser."""
    pairs = node.value if isinstance(node, MappingNode) else []
    return next((pair for pair in reversed(pairs) if pair[0].value == key), None)


def _checked(new: str, expected: object, where: str, comment: str, at: int) -> str:
    """Return the changed text with its comment if it says what is expected."""
    new = _commented(new, at, comment) if comment else new
    try:
        said = read_plain(new)
    except yaml.YAMLError:
        said = None
    if said != expected:
        raise RecipeError(f"{where}: cannot be changed alone where it stands (an anchor?); change it by hand")
    return new


def _commented(text: str, at: int, comment: str) -> str:
    """Put the comment above the line of the character `at`, in place of one that begins alike."""
    begin = text.rfind("\n", 0, at) + 1
    indent = _indent(text, at)
    above = text.rfind("\n", 0, max(0, begin - 1)) + 1
    before = text[above:begin].split()
    alike = bool(begin) and before[:3] == ["#", *comment.split()[:2]]
    return f"{text[: above if alike else begin]}{indent}# {comment}\n{text[begin:]}"


def _replaced(text: str, pair: tuple[Node, Node], value: Any, flow: bool) -> Changed:
    """Replace the value of a key: on its line if it is short or within brackets, else as a block below it."""
    key, old = pair
    start, end, colon = _start(old), _end(text, old), text.index(":", key.end_mark.index) + 1
    if not _fits(value, flow):
        return f"{text[:colon]}{_block(value, key.start_mark.column + STEP)}{text[end:]}", _start(key)
    if isinstance(value, dict | list) and _too_wide(text, start, _flow(value)):
        column = len(_indent(text, start)) + STEP
        return f"{text[:colon]}\n{' ' * column}{_flow(value, column)}{text[end:]}", _start(key)
    beside = start > colon and "\n" not in text[colon:start]
    return f"{text[:start] if beside else text[:colon] + ' '}{_flow(value)}{text[end:]}", _start(key)


def _added(text: str, node: SequenceNode, value: Any) -> Changed:
    """Add an element at the end of a list that has some."""
    if not _is_flow(node):
        at = _line_end(text, _end(text, node))
        return f"{text[:at]}\n{' ' * node.start_mark.column}- {_flow(value)}{text[at:]}", at + 1
    at, column = _end(text, node.value[-1]), node.value[0].start_mark.column
    gap = _gap(text, at, column, _flow(value))
    return f"{text[:at]},{gap}{_flow(value, column)}{text[at:]}", at + 1 + len(gap)


def _gap(text: str, at: int, column: int, new: str) -> str:
    """Return what parts a new element within brackets from the one before it: a blank, or a line's end."""
    return f"\n{' ' * column}" if _too_wide(text, at, new) else " "


def _too_wide(text: str, at: int, new: str) -> bool:
    """Return whether the line of `at` is too long with the characters of `new` added."""
    return _line_end(text, at) - text.rfind("\n", 0, at) + len(new) > WIDTH


def _inserted(text: str, node: MappingNode, key: str, value: Any, flow: bool) -> Changed:
    """Add a key at the end of a mapping."""
    if flow:
        if not node.value:
            at = _start(node) + 1
            return f"{text[:at]}{_flow({key: value})[1:-1]}{text[at:]}", at
        at, column = _end(text, node.value[-1][1]), node.value[0][0].start_mark.column
        gap = _gap(text, at, column, _flow({key: value}))
        return f"{text[:at]},{gap}{_flow({key: value}, column)[1:-1]}{text[at:]}", at + 1 + len(gap)
    at, column = _line_end(text, _end(text, node)), node.start_mark.column
    head = f"\n{' ' * column}{_flow(key)}:"
    body = f" {_flow(value)}" if _fits(value, flow) else _block(value, column + STEP)
    return f"{text[:at]}{head}{body}{text[at:]}", at + 1


def _nested(keys: Sequence[str], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


def _fits(value: Any, flow: bool) -> bool:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    deep = [one for one in inner if isinstance(one, dict | list) and one]
    return flow or not deep or (len(_flow(value)) <= INLINE and not (isinstance(value, list) and len(deep) > 1))


def _flow(value: Any, column: int | None = None) -> str:
    """Return plain data as YAML that may stand inside brackets: on one line, or on lines that begin at `column`."""
    width = 10**6 if column is None else WIDTH - column
    listed = yaml.safe_dump([value], default_flow_style=True, width=width, allow_unicode=True, sort_keys=False)
    return f"\n{' ' * (column or 0)}".join(listed.strip()[1:-1].split("\n"))


def _block(value: dict[str, Any] | list[Any], column: int) -> str:
    """Return a collection as lines that begin at `column`: an element a line, what is nested deeper below its key."""
    line = f"\n{' ' * column}"
    if isinstance(value, list):
        return "".join(f"{line}- {_flow(one, column + STEP)}" for one in value)
    inner = ((_flow(key), one) for key, one in value.items())
    return "".join(
        f"{line}{key}: {_flow(one, column + STEP)}"
        if _fits(one, False)
        else f"{line}{key}:{_block(one, column + STEP)}"
        for key, one in inner
    )


def _is_flow(node: Node) -> bool:
    return isinstance(node, MappingNode | SequenceNode) and bool(node.flow_style)


def _start(node: Node) -> int:
    return int(node.start_mark.index)


def _end(text: str, node: Node) -> int:
    """Return where a value ends; the parser ends a block only behind the comments that follow it."""
    end = int(node.end_mark.index)
    if isinstance(node, ScalarNode):
        return len(text[:end].rstrip()) if node.style in ("|", ">") else end
    if _is_flow(node) or not node.value:
        return end
    last = node.value[-1]
    return _end(text, last[1] if isinstance(last, tuple) else last)


def _indent(text: str, at: int) -> str:
    """Return the blanks that the line of `at` begins with."""
    line = text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0]
    return line[: len(line) - len(line.lstrip())]


def _line_end(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found
