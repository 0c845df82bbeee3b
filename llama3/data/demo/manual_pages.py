r"""Manual pages to plain text: roff with the `man` and `mdoc` macro packages, read well enough for prose.

Headings, paragraphs, indented examples and font changes are understood; tables, equations, conditionals and macro
definitions are left out. The alternative, running `man` or `groff` once per page, costs 20 to 50 ms a page and is not
there in a slim container.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_PLAIN = dict.fromkeys("&|^)/,%:c{}pud", "") | dict.fromkeys(" ~0", " ") | {"e": "\\", "t": "\t"}
"""One-character escapes that do not stand for themselves."""
_GLYPHS = {
    **{"aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "Fo": "«", "Fc": "»"},
    **{"lB": "[", "rB": "]", "lC": "{", "rC": "}", "la": "⟨", "ra": "⟩", "ul": "_", "sh": "#", "at": "@", "Do": "$"},
    **{"em": "—", "en": "–", "hy": "-", "mi": "-", "bu": "•", "ha": "^", "ti": "~", "ga": "`", "rs": "\\", "or": "|"},
    **{"->": "→", "<-": "←", "<=": "≤", ">=": "≥", "!=": "≠", "+-": "±", "mu": "×", "de": "°"},
    **{"co": "©", "rg": "®", "tm": "™", "R": "®"},
}
_ESCAPE = re.compile(
    r"""\\(?:f(?:\[[^]]*\]|\(..|.)|s[-+]?\(?\d{1,2}|[*n](?:\[(?P<s2>[^]]*)\]|\((?P<s1>..)|.)|\[(?P<long>[^]]*)\]
    |\((?P<two>..)|[hvwzlLbDXNkom](?:'[^']*'|\[[^]]*\]|.)|(?P<one>.))""",
    re.DOTALL | re.VERBOSE,
)
_COMMENT = re.compile(r"""\\["#].*$""", re.MULTILINE)
_WORDS = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')
_BREAKS = "PP P LP Pp HP IP TP TQ It sp RS RE Bl El br"
_PARAGRAPHS = frozenset(_BREAKS.split())
_LITERAL = {"nf": True, "EX": True, "Bd": True, "fi": False, "EE": False, "Ed": False}
_PAIRS = {"Op": "[]", "Aq": "<>", "Pq": "()", "Bq": "[]", "Brq": "{}", "Dq": "“”", "Sq": "‘’", "Ql": "‘’", "Qq": '""'}
_BRACKETS = {name: (pair[0], pair[1]) for name, pair in _PAIRS.items()} | {"Fl": ("-", ""), "Oo": ("[", "")}
_BRACKETS["Oc"] = ("", "]")
_MACROS = "TH Dd Dt Os PD UC AT DT Sm Rs Re URL LINKSTYLE"
_SETTINGS = "so ad na hy nh in ti ta ds nr rm ne ll ft ps vs tr als mso pl po bp cs fp hw hc lf ss do eo ec nop"
_IGNORED = frozenset((*_MACROS.split(), *_SETTINGS.split()))
_JOINED = frozenset(("BR", "IR", "RB", "RI", "BI", "IB"))
_BLOCKS = {"TS": "TE", "EQ": "EN", "de": ".", "de1": ".", "ig": ".", "am": "."}


def manual_text(roff: str) -> str:
    """Return the manual page `roff` as plain text; "" for a page that only points to another (`.so`)."""
    page = _Page()
    lines = iter(_COMMENT.sub("", roff).replace("\\\n", "").split("\n"))
    for line in lines:
        if line[:1] not in (".", "'"):
            page.text(line)
            continue
        name, _, rest = line[1:].strip().partition(" ")
        if name in _BLOCKS:
            _skip_until(_BLOCKS[name], lines)
        elif name in ("ie", "if", "el"):
            _skip_group(line, lines)
        else:
            page.request(name, rest.strip())
    return page.result()


def _skip_until(end: str, lines: Iterator[str]) -> None:
    """Consume a table, an equation or a macro definition."""
    for line in lines:
        if line.strip() == "." + end:
            return


def _skip_group(line: str, lines: Iterator[str]) -> None:
    """Consume a conditional and, where it opens one, its `\\{ ... \\}` group."""
    depth = line.count("\\{") - line.count("\\}")
    while depth > 0:
        inner = next(lines, None)
        if inner is None:
            return
        depth += inner.count("\\{") - inner.count("\\}")


class _Page:
    """Collects lines into filled paragraphs, or keeps them as they are between `.nf` and `.fi`."""

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._open: list[str] = []
        self._literal = False

    def text(self, line: str) -> None:
        plain = unescape(line)
        if not plain.strip() and not self._literal:
            self._close()
        elif plain or self._literal:
            self._open.append(plain.rstrip() if self._literal else plain.strip())

    def request(self, name: str, rest: str) -> None:
        if name in ("SH", "SS", "Sh", "Ss"):
            self._close()
            self._blocks.append(unescape(" ".join(arguments(rest))))
        elif name in _LITERAL:
            self._close()
            self._literal = _LITERAL[name]
        elif name in _PARAGRAPHS:
            self._close()
            self._head(name, rest)
        elif name not in _IGNORED and (words := _macro(name, arguments(rest))):
            self.text(words)

    def result(self) -> str:
        self._close()
        return "\n\n".join(block for block in self._blocks if block.strip())

    def _head(self, name: str, rest: str) -> None:
        """Write what a list item starts with: the tag of `.IP`, the whole line of `.It`."""
        words = arguments(rest)
        if name == "IP" and words:
            self.text(words[0])
        elif name == "It" and words:
            self.text(_macro("", words))

    def _close(self) -> None:
        if self._open:
            self._blocks.append(("\n" if self._literal else " ").join(self._open))
        self._open = []


def arguments(rest: str) -> list[str]:
    """Return the words of a macro line; quotes hold words together, and a doubled quote is a quote."""
    return [plain or quoted.replace('""', '"') for quoted, plain in _WORDS.findall(rest)]


def unescape(text: str) -> str:
    """Return `text` with roff's escapes as the characters they stand for; font and size changes vanish."""
    if "\\" not in text:
        return text
    return _ESCAPE.sub(_character, text)


def _character(match: re.Match[str]) -> str:
    if match["one"] is not None:
        return _PLAIN.get(match["one"], match["one"])
    name = match["long"] or match["two"] or match["s1"] or match["s2"]
    if name is None:
        return ""
    if re.fullmatch(r"u[0-9A-F]{4,6}", name):
        return chr(int(name[1:], 16)) if int(name[1:], 16) < 0x110000 else ""
    return _GLYPHS.get(name, "")


def _macro(name: str, words: list[str]) -> str:
    """Return the text of a macro and its arguments; `mdoc` macros may stand among the arguments."""
    if name in _JOINED:
        return "".join(words)
    if name in ("UR", "MT", "Lk", "Mt", "B", "I", "SM", "SB"):
        return " ".join(words)
    if name == "Xr" and len(words) > 1:
        return f"{words[0]}({words[1]}){''.join(words[2:])}"
    before, after = _BRACKETS.get(name, ("", ""))
    inner: list[str] = []
    for place, word in enumerate(words):
        if word in _BRACKETS or word == "Xr":
            inner.append(_macro(word, words[place + 1 :]))
            break
        if len(word) > 2 or not re.fullmatch(r"[A-Z][a-z]", word):
            inner.append(word)
    joined = re.sub(r" ([.,;:)\]])(?= |$)", r"\1", " ".join(inner))
    return f"{before}{joined}{after}"
