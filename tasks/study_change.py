"""A proposed change of a recipe as lines of YAML, to be read like the output of `diff`.

What this gives up: comments and the order of the file that will be changed; `herd study apply` keeps those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Line = tuple[str, str]
"""`-`, `+` or a blank, and the text."""
INDENT = "  "


def change_lines(change: Sequence[str], before: Mapping[str, str]) -> list[Line]:
    """Return overrides (`mix.base.math=30%`) as lines; `before` has former values by path, where they are known."""
    lines: list[Line] = []
    above: list[str] = []
    for override in change:
        path, _, value = override.partition("=")
        *parents, last = path.split(".")
        same = next((n for n, pair in enumerate(zip(above, parents, strict=False)) if pair[0] != pair[1]), None)
        kept = min(len(above), len(parents)) if same is None else same
        lines += [(" ", f"{INDENT * depth}{parents[depth]}:") for depth in range(kept, len(parents))]
        indent = INDENT * len(parents)
        if path in before:
            lines.append(("-", f"{indent}{last}: {before[path]}"))
        lines.append(("+", f"{indent}{last}: {value}"))
        above = parents
    return lines
