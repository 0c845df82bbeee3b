"""Markdown to plain text: the words without the markers, code as it stands.

The paper removes all markdown markers, because they hurt a model that is trained mostly on the web (arXiv 2407.21783,
section 3.1.1). Line by line, with the rules that nearly all documents use; not a parser of CommonMark: emphasis over
several lines or SPAN characters and reference links keep their marks. Tables and the numbers of lists stay, because
they say something; code loses its fences only. Front matter (YAML or TOML before the text) goes. 5 to 30 MB/s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

SPAN = 300
"""Characters between two marks of a pair; a bound, because a search without one takes hours on a megabyte of stars."""
_FRONT = re.compile(r"\s*(---|\+\+\+)[ \t]*\n((?:.*\n){1,300}?)(?:\1|\.\.\.)[ \t]*(?:\n|\Z)")
_KEY = re.compile(r"(?:[ \t]*(?:#.*)?\n)*[\"']?[\w.-]+[\"']?[ \t]*[:=](?:\s|$)")
"""How front matter begins; a text between two rules does not."""
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[^`]*$")
_HEADING = re.compile(r" {0,3}#{1,6}(?:[ \t]+|$)")
_UNDERLINE = re.compile(r" {0,3}(?:=+|-+)[ \t]*$")
_RULE = re.compile(r" {0,3}(?:(?:\*[ \t]*){3,}|(?:_[ \t]*){3,}|(?:-[ \t]*){3,})$")
_MARK = re.compile(r"(\s*)(?:>[ \t]?|[-*+][ \t]+(?:\[[ xX]\][ \t]+)?)(?=\S|$)")
_CODE_LINE = re.compile(r"(?: {4}|\t)")
_TARGET = rf"\((?:[^()\s]|\([^()\s]*\)){{0,2000}}(?:\s+[\"'(][^\n]{{0,{SPAN}}}?[\"')])?\)"
_IMAGE = re.compile(rf"!\[([^\[\]]*)\]{_TARGET}")
_LINK = re.compile(rf"\[([^\[\]]*)\]{_TARGET}")
_AUTOLINK = re.compile(r"<((?:https?://|mailto:)[^<>\s]+)>")
_CODE = re.compile(rf"(?<!`)(`+)(?!`)(.{{1,{SPAN}}}?)(?<!`)\1(?!`)")
_STARS = re.compile(rf"(?<![*\\\w])(\*{{1,3}})(?=[^\s*])(.{{1,{SPAN}}}?)(?<=[^\s*])\1(?![*\w])")
_BARS = re.compile(rf"(?<![_\\\w])(_{{1,3}})(?=[^\s_])(.{{1,{SPAN}}}?)(?<=[^\s_])\1(?![_\w])")
_STRUCK = re.compile(rf"(~~)(?=\S)(.{{1,{SPAN}}}?)(?<=\S)\1")
_HELD = "\0"
"""Stands for a span of code while the marks around it go; no text has it, since control characters are removed."""
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")


def strip_markdown(text: str) -> str:
    """Return `text` without markdown markers: headings, emphasis, links, images, quotes, lists, fences of code."""
    text = text.replace("\r\n", "\n").replace(_HELD, "").removeprefix("\ufeff")
    front = _FRONT.match(text)
    if front and _KEY.match(front[2]):
        text = text[front.end() :]
    return "\n".join(_lines(text.split("\n")))


def _lines(lines: list[str]) -> Iterator[str]:
    fence, before = "", ""
    for line in lines:
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
            else:
                yield line
        elif found:
            fence = found[1]
        elif before.strip() and _UNDERLINE.match(line):
            line = ""  # the line before it was a heading
        elif not _RULE.match(line):
            yield line if _CODE_LINE.match(line) and not before.strip() else _plain(line)
        before = line


def _plain(line: str) -> str:
    """Return a line of prose without its marks."""
    heading = _HEADING.match(line)
    if heading:
        return _inline(_without_closing(line[heading.end() :].rstrip(" \t")))
    kept, start = [], 0
    while (mark := _MARK.match(line, start)) is not None:
        kept.append(mark[1])
        start = mark.end()
    return _inline("".join(kept) + line[start:])


def _without_closing(heading: str) -> str:
    """Return a heading without the number signs that may close it."""
    bare = heading.rstrip("#")
    return bare.rstrip(" \t") if bare != heading and bare[-1:] in (" ", "\t") else heading


def _inline(line: str) -> str:
    """Return `line` without marks inside it; spans of code keep what stands in them."""
    if "`" not in line:
        return _without_marks(line)
    spans = [found[2].strip() or found[2] for found in _CODE.finditer(line)]
    first, *others = _without_marks(_CODE.sub(_HELD, line)).split(_HELD)
    return first + "".join(span + other for span, other in zip(spans, others, strict=True))


def _without_marks(text: str) -> str:
    if "](" in text:
        text = _LINK.sub(r"\1", _IMAGE.sub(r"\1", text))
    if "<" in text:
        text = _AUTOLINK.sub(r"\1", text)
    for sign, marks in (("*", _STARS), ("_", _BARS), ("~~", _STRUCK)):
        if sign in text:
            text = marks.sub(r"\2", text)
    return _ESCAPED.sub(r"\1", text) if "\\" in text else text
