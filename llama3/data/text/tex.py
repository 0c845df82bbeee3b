"""LaTeX without what is not its text: comments, the preamble, and what follows the document. The rest stays LaTeX."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"\\(?P<edge>begin|end)\{(?P<name>[A-Za-z]+\*?)\}"
    r"|\\verb\*?(?P<mark>[^A-Za-z\s*])[^\n]{0,500}?(?P=mark)"
    r"|\\(?:url|nolinkurl|path|href)\{[^{}\n]{0,2000}\}"
    r"|\\[\s\S]"
    r"|(?P<comment>(?:^[ \t]*%[^\n]*(?:\n|\Z))|%[^\n]*)",
    re.M,
)
"""What may hold a `%`: verbatim text, an address, an escape; or a comment, of a whole line with its line end."""
_VERBATIM = ("verbatim", "verbatim*", "Verbatim", "lstlisting", "minted", "alltt", "filecontents", "filecontents*")
_COMMENT = "comment"


def plain_tex(text: str) -> str:
    """Return LaTeX without comments, and only the inside of `document` if it has one."""
    parts: list[str] = []
    done = at = 0
    unclosed: set[str] = set()
    while token := _TOKEN.search(text, at):
        at = token.end()
        name = token["name"]
        if token["comment"] is not None:
            parts.append(text[done : token.start()])
            done = at
        elif name == "document":
            if token["edge"] == "end":
                text = text[: token.start()]
                break
            parts, done = [], at
        elif token["edge"] == "begin" and name in (*_VERBATIM, _COMMENT) and name not in unclosed:
            end = text.find(closing := rf"\end{{{name}}}", at)
            if end < 0:
                unclosed.add(name)  # looked for once, so that the time is linear
                continue
            at = end + len(closing)
            if name == _COMMENT:
                parts.append(text[done : token.start()])
                done = at
    return "".join([*parts, text[done:]])
