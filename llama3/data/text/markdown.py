"""Markdown to plain text: paragraphs on one line, marks gone, code and tables whole.

CommonMark with the common extensions, by pulldown-cmark. A line end inside a paragraph is a blank (a soft break), and
rules on lines judge paragraphs. The marks go because they hurt a model that is trained mostly on the web (arXiv
2407.21783, section 3.1.1); tables and the numbers of lists stay, because they carry meaning. Blank lines between blocks
are those of the source.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from html import unescape
from typing import Any

import pyromark

_OPTIONS = (
    pyromark.Options.ENABLE_TABLES
    | pyromark.Options.ENABLE_FOOTNOTES
    | pyromark.Options.ENABLE_STRIKETHROUGH
    | pyromark.Options.ENABLE_TASKLISTS
    | pyromark.Options.ENABLE_HEADING_ATTRIBUTES
    | pyromark.Options.ENABLE_DEFINITION_LIST
    | pyromark.Options.ENABLE_GFM
    | pyromark.Options.ENABLE_MATH
)
_FRONT_MATTER = re.compile(r"\s*(---|\+\+\+)[ \t]*\n((?:.*\n){1,300}?)(?:\1|\.\.\.)[ \t]*(?:\n|\Z)")
_KEY = re.compile(r"(?:[ \t]*(?:#.*)?\n)*[\"']?[\w.-]+[\"']?[ \t]*[:=](?:\s|$)")
"""How front matter begins; a text between two rules does not."""
_FENCE = re.compile(r"[ \t]*(?:>[ \t]?)*(`{3,}|~{3,})")
_HIGHLIGHT = re.compile(r"[ \t]*\{%-?[ \t]*(end)?highlight\b[^%\n]*%\}[ \t]*")
"""Begins or ends a block of code of Jekyll: `{% highlight ruby %}`."""
_CODE = "~" * 8
_BLOCK_MARK = re.compile(r"([ \t]*)(/{3,}|:{3,})[ \t]*(.*)$")
"""Begins or ends a block of pymdown (`/// tip | Title`) or of Docusaurus and Pandoc (`:::tip Title`)."""
_ADMONITION = re.compile(r"([ \t]*)(?:!!!|\?\?\?\+?|===)[ \t]+[\w\"'][^\n]*$")
"""Begins an indented block of Python-Markdown and MkDocs: `!!! note "Title"`, `=== "Tab"`."""
_TITLE = re.compile(r"[\"']([^\"']+)[\"']|\|\s*(.+)")
_ATTRIBUTES = re.compile(r"[ \t]*\{:?[ \t]*(?:[#.][\w:-]+|[\w-]+=(?:\"[^\"]*\"|[^\s{}]+))(?:[ \t]+[^{}\n]*)?\}")
"""Attributes in braces (`{ #id .class }`, `{: width="50"}`) after a block, a link or an image."""
_WIDE = "\u2e80-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"
"""Letters and punctuation of scripts without blanks, where CommonMark does not see the ends of emphasis."""
_WIDE_EMPHASIS = re.compile(
    rf"(?<!\*)(\*{{1,3}})(?![\s*])([^*\n]{{0,300}}[{_WIDE}][^*\n]{{0,300}}|[^*\n]{{1,300}}(?=\*{{1,3}}[{_WIDE}]))(?<!\s)\1(?!\*)"
)
_LETTER = re.compile(rf"[{_WIDE}]")
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_HIDDEN = re.compile(r"<(script|style|template)\b.*?(?:</\1\s*>|\Z)", re.DOTALL | re.IGNORECASE)
_BREAK = re.compile(r"<(?:br|/p|/div|/tr|/li|/h[1-6]|/summary|hr)\b[^<>]*>", re.IGNORECASE)
_ALT = re.compile(r"<img\b[^<>]*?\balt\s*=\s*(?:\"([^\"]*)\"|'([^']*)')[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?[A-Za-z][^<>]*>|<![A-Za-z][^<>]*>|<\?.*?\?>", re.DOTALL)
_NUMBER = re.compile(rb"[ \t>]*([0-9]{1,9}[.)])")
_BLANK_LINE = re.compile(rb"\n[ \t>]*\n")


def strip_markdown(text: str) -> str:
    """Return `text` without Markdown marks: headings, emphasis, links, images, quotes, list marks, fences, HTML tags.

    A paragraph, and the text of an item, is one line. Code keeps every character, tables keep their rows. Entities are
    decoded, comments, definitions of links and attributes are left out.
    """
    text = text.replace("\r\n", "\n").removeprefix("\ufeff")
    front = _FRONT_MATTER.match(text)
    if front and _KEY.match(front[2]):
        text = text[front.end() :]
    text = text.replace(_PROTECTED, "")  # `normalize` drops it from every text
    return "".join(gap + block for gap, block in _blocks(_plain_blocks(text)))


# What CommonMark does not know


def _plain_blocks(text: str) -> str:
    """Return `text` with the marks of admonitions, tabs and containers left out, their titles and content kept.

    Code between marks of Liquid gets fences.
    """
    if not any(mark in text for mark in ("///", ":::", "!!!", "???", "===", "highlight")):
        return text
    return "\n".join(_plain_lines(text.split("\n")))


def _plain_lines(lines: list[str]) -> Iterator[str]:
    fence, opened, indented = "", Counter[str](), list[int]()
    closing = Counter(line.strip() for line in lines)
    for number, line in enumerate(lines):
        while indented and line.strip() and _indent(line) <= indented[-1]:
            indented.pop()
        line = line[min(4 * len(indented), _indent(line)) :]
        fenced, liquid = _FENCE.match(line), _HIGHLIGHT.fullmatch(line)
        if liquid and bool(liquid[1]) == (fence == _CODE) and fence in ("", _CODE):
            fence, line = "" if fence else _CODE, _CODE
        elif fence:
            if fenced and fenced[1].startswith(fence) and not line[fenced.end() :].strip("`~ \t"):
                fence = ""
        elif fenced:
            fence = fenced[1]
        elif mark := _BLOCK_MARK.match(line):
            if mark[3] and closing[mark[2]] > opened[mark[2]]:
                opened[mark[2]] += 1
                line = _title(mark[3])
            elif not mark[3]:
                closing[mark[2]] -= 1
                if opened[mark[2]]:
                    opened[mark[2]] -= 1
                    line = ""
        elif (mark := _ADMONITION.match(line)) and _begins_block(lines, number + 1, _indent(lines[number])):
            indented.append(_indent(lines[number]))
            line = f"{mark[1]}{_title(line[mark.end(1) :])}\n"
        yield line


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _begins_block(lines: list[str], start: int, indent: int) -> bool:
    """Return whether the first line with text from `start` is indented by four columns more."""
    following = next((line for line in lines[start : start + 3] if line.strip()), "")
    return _indent(following) >= indent + 4


def _title(words: str) -> str:
    found = _TITLE.search(words)
    return (found[1] or found[2]).strip() + "\n" if found else ""


# Events of the parser

_INLINE = frozenset(("Emphasis", "Strong", "Strikethrough", "Link", "Image"))
_DEEPEST = 20
"""Lists inside one another that are indented further."""
_PROTECTED = "\0"
"""Around what no emphasis is looked for in."""


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield each block of text and, before it, what stands between it and the block before: one line end or two."""
    data = text.encode("utf-8", "surrogatepass")
    pieces, begin, end, written = list[str](), -1, 0, 0  # of the block that is read: its text and its bytes
    rows, numbers, prefix = list[list[str]](), list[bool](), ""
    attributed = True  # where attributes may stand: at the beginning of a line, after a link or an image
    event: Any
    value: Any
    for event, span in pyromark.events_with_range(text, options=_OPTIONS, merge_text=True):
        # The parser writes an event without a value as its name.
        kind, value = (event, None) if isinstance(event, str) else event.popitem()
        if kind in ("Start", "End"):
            name, inner = (value, None) if isinstance(value, str) else value.popitem()
            if name in _INLINE:
                attributed = kind == "End" and name in ("Link", "Image")
                continue
            if name == "TableCell":
                if kind == "End":
                    rows[-1].append(_inline(pieces).replace("\n", " "))
                pieces = []
                continue
            if name in ("TableHead", "TableRow"):
                rows += [[]] if kind == "Start" else []
                continue
            if kind == "End" and name == "Table":
                block, rows = _table(rows), []
            elif kind == "End" and name == "CodeBlock":
                block = "".join(pieces).strip("\n")
            elif kind == "End" and name == "HtmlBlock":
                block = _text_of_html("".join(pieces))
            else:
                block = _inline(pieces)
            if block:
                gap = "\n\n" if _BLANK_LINE.search(data, written, max(begin, written)) else "\n"
                yield gap if written else "", prefix + block
                prefix, written = "", end
                while written > begin and data[written - 1 : written].isspace():
                    written -= 1
            pieces, begin, attributed = [], -1, True
            if name == "List":
                numbers += [inner is not None] if kind == "Start" else []
                del numbers[len(numbers) - (kind == "End") :]
            elif name == "Item" and kind == "Start":
                number = _NUMBER.match(data, span["start"], span["end"]) if numbers[-1] else None
                prefix = "  " * min(len(numbers) - 1, _DEEPEST) + (f"{number[1].decode()} " if number else "")
            continue
        begin, end = span["start"] if begin < 0 else begin, span["end"]
        if kind == "Text":
            found = _ATTRIBUTES.match(value) if attributed else None
            pieces.append(value[found.end() :] if found else value)
        elif kind in ("Code", "InlineMath", "DisplayMath"):
            sign = {"Code": "", "InlineMath": "$", "DisplayMath": "$$"}[kind]
            pieces.append(f"{_PROTECTED}{sign}{value}{sign}{_PROTECTED}")
        elif kind == "Html":
            pieces.append(value)
        elif kind == "InlineHtml":
            image = _ALT.match(value)
            pieces.append("\n" if value[:3].lower() == "<br" else unescape(image[1] or image[2] or "") if image else "")
        elif kind == "SoftBreak":
            wide = pieces and _LETTER.match(pieces[-1][-1:]) and _LETTER.match(_character(data, end))
            pieces.append("" if wide else " ")
        elif kind == "HardBreak":
            pieces.append("\n")
        attributed = kind in ("SoftBreak", "HardBreak")


def _character(data: bytes, at: int) -> str:
    return data[at : at + 4].decode("utf-8", "ignore")[:1]


def _inline(pieces: list[str]) -> str:
    """Return the text of a paragraph, without the emphasis that CommonMark does not see beside wide letters."""
    text = "".join(pieces)
    if "*" in text and _LETTER.search(text):
        parts = text.split(_PROTECTED)
        parts[::2] = [_WIDE_EMPHASIS.sub(r"\2", part) for part in parts[::2]]
        text = _PROTECTED.join(parts)
    return text.replace(_PROTECTED, "").strip()


def _table(rows: list[list[str]]) -> str:
    head, *body = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([head, f"|{' --- |' * len(rows[0])}", *body])


def _text_of_html(html: str) -> str:
    """Return the text of a piece of HTML inside Markdown: tags, comments and scripts gone, entities decoded."""
    text = _ALT.sub(lambda found: found[1] or found[2] or "", _HIDDEN.sub("", _COMMENT.sub("", html)))
    lines = (line.strip() for line in unescape(_TAG.sub("", _BREAK.sub("\n", text))).split("\n"))
    return "\n".join(line for line in lines if line)
