"""LaTeX without what is not its text: comments, the preamble, and what follows the document. The rest stays LaTeX."""

from __future__ import annotations

import re

_VERBATIM = ("verbatim", "verbatim*", "Verbatim", "lstlisting", "minted", "alltt", "filecontents", "filecontents*")
_COMMENT = "comment"
_MARKED = (
    rf"(?:begin|end)\{{(?:document|{'|'.join(map(re.escape, (*_VERBATIM, _COMMENT)))})\}}|verb|url|nolinkurl|path|href"
)
_TOKEN = re.compile(
    rf"\\(?={_MARKED})(?P<edge>begin|end)\{{(?P<name>[A-Za-z]+\*?)\}}"
    r"|\\verb\*?(?P<mark>[^A-Za-z\s*])[^\n]{0,500}?(?P=mark)"
    r"|\\(?:url|nolinkurl|path|href)\{[^{}\n]{0,2000}\}"
    rf"|\\[\s\S][^\\%]*+(?:\\(?!{_MARKED})[\s\S][^\\%]*+)*+"
    r"|%(?P<comment>[^\n]*)"
)
"""What may hold a `%`: verbatim text, an address, escapes and the text after them; or a comment. Each begins with one
of two characters, for which `re` searches quickly."""


def plain_tex(text: str) -> str:
    """Return LaTeX without comments, and only the inside of `document` if it has one."""
    parts: list[str] = []
    done = at = 0
    unclosed: set[str] = set()
    while token := _TOKEN.search(text, at):
        at = token.end()
        name = token["name"]
        if token["comment"] is not None:
            begin = text.rfind("\n", done, token.start()) + 1 or done
            if (begin == 0 or text[begin - 1] == "\n") and not text[begin : token.start()].strip(" \t"):
                at += 1  # a whole line, with its line end
            else:
                begin = token.start()
            parts.append(text[done:begin])
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
