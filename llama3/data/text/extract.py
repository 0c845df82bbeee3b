"""HTML to text: the main content with its code, its formulas and the alternative texts of its images.

resiliparse finds the main content (about 40 MB/s per core, a little less precise); where its heuristics keep less than
half of what a page says outside menus, they have mistaken the page and everything outside menus is kept: losing a
document costs more than keeping a footer. trafilatura, on request, is ten to twenty times slower and surer of what is
boilerplate. Formulas are written back as the TeX that the page carries, because what the parsers make of MathML (`x2`
for x squared) is wrong. trafilatura drops blank lines in code and all alternative texts, so both are put where it keeps
them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

from llama3.data.readers.files import Fault, SourceError

_FRAME = ["nav", "footer", "aside", "form", "script", "style", "template", "[role=navigation]", "[role=banner]"]
_BULLET = re.compile(r"^(\s*)- ", re.MULTILINE)
_HELD = re.compile(r"codeblock(\d+)held")


def html_text(html: str, extractor: str = "resiliparse") -> str:
    """Return the readable text of `html`: paragraphs apart, preformatted text as it stands, no markup.

    `extractor` is resiliparse or trafilatura.
    """
    if extractor == "trafilatura" and (found := _by_trafilatura(_parsed(html))):
        return found
    tree = _parsed(html)
    main = str(extract_plain_text(tree, main_content=True, alt_texts=True, list_bullets=False))
    whole = str(extract_plain_text(tree, alt_texts=True, list_bullets=False, skip_elements=_FRAME))
    return main if 2 * len(main) >= len(whole) else whole


def _parsed(html: str) -> Any:
    """Return the tree of `html` with its formulas as TeX."""
    tree = HTMLTree.parse(html)
    if "<math" in html or "math/tex" in html:
        _write_formulas(tree)
    return tree


def _by_trafilatura(tree: Any) -> str:
    """Return what trafilatura finds, "" if nothing; changes `tree`."""
    from trafilatura import extract  # 0.5 s, and an extra of the project

    for image in list(tree.document.query_selector_all("img[alt]")):
        _replace(tree, image, "span", image.get_attribute("alt"))
    blocks: list[str] = []
    for block in list(tree.document.query_selector_all("pre")):
        blocks.append(str(block.text).strip("\n"))
        _replace(tree, block, "pre", f"codeblock{len(blocks) - 1}held")
    found = extract(str(tree.document.html), include_comments=False, include_tables=True, favor_precision=True) or ""
    text = _BULLET.sub(r"\1", found).replace("\n", "\n\n")
    return _HELD.sub(lambda held: blocks[int(held[1])] if int(held[1]) < len(blocks) else held[0], text)


def _write_formulas(tree: Any) -> None:
    """Replace each formula by its TeX: MathML's `alttext` or TeX annotation, MathJax's script."""
    for formula in list(tree.document.query_selector_all("math, script[type^='math/tex']")):
        _replace(tree, formula, "span", formula.get_attribute("alttext") or _annotation(formula))


def _replace(tree: Any, element: Any, name: str, text: str | None) -> None:
    """Put an element `name` with `text` where `element` is, unless the text is empty."""
    if text and element.parent_node is not None:
        written = tree.create_element(name)
        written.text = text.strip()
        element.parent_node.replace_child(written, element)


def _annotation(formula: Any) -> str:
    if formula.local_name == "script":
        return str(formula.text or "")
    found = formula.query_selector("annotation[encoding='application/x-tex']")
    return str(found.text or "") if found is not None else ""


# Markdown to plain text: the words without the markers, code as it stands.
#
# The paper removes all markdown markers, because they hurt a model that is trained mostly on the web (arXiv
# 2407.21783, section 3.1.1). Line by line, with the rules that nearly all documents use; not a parser of
# CommonMark: emphasis over several lines or SPAN characters and reference links keep their marks. Tables and the
# numbers of lists stay, because they say something; code loses its fences only. Front matter (YAML or TOML before
# the text) goes. 5 to 30 MB/s.

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
_MARKDOWN_HELD = "\0"
"""Stands for a span of code while the marks around it go; no text has it, since control characters are removed."""
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")


def strip_markdown(text: str) -> str:
    """Return `text` without markdown markers: headings, emphasis, links, images, quotes, lists, fences of code."""
    text = text.replace("\r\n", "\n").replace(_MARKDOWN_HELD, "").removeprefix("\ufeff")
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
    first, *others = _without_marks(_CODE.sub(_MARKDOWN_HELD, line)).split(_MARKDOWN_HELD)
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


# Markup to text within bounds: HTML and Markdown that would take minutes or more are told apart and left out.
#
# Parsers of HTML take time that grows with the square of the nesting and of the attributes of a tag, so both are
# counted first and bounded; what is counted depends on the text alone. What is still slow, or long, is read by a
# child process whose processor time is limited: parsers are compiled code, which no signal of Python interrupts.

DEPTH = 512
"""Elements inside each other that a page may have; browsers stop nesting there."""
ATTRIBUTES = 1000
"""Attributes of a tag."""
WORK, MEAN_DEPTH = 2_000_000, 100
"""The depths of all tags together may be this and a mean of so much."""
IN_PROCESS = 64_000
"""Characters up to which a document is read in this process: so short, even a bad one ends in seconds."""
LIMIT_S, CHARS_PER_S = 60, 100_000
"""Seconds of processor time for one document, and characters for which it may have one more."""
_TOO_DEEP = Fault(
    "too_deep",
    f"nests markup deeper than {DEPTH} elements, or has a tag with more than {ATTRIBUTES} attributes; remove it",
)
_TOKEN = re.compile(
    r"<!--(?:-?>|.*?(?:--!?>|\Z))"
    r"|<(script|style|textarea|title|xmp|iframe|noembed|noframes)\b.*?(?:</\1|\Z)"
    r"|<(/?)([a-z][^\s/>]*)([^<>]*)",
    re.IGNORECASE | re.DOTALL,
)
_ATTRIBUTE = re.compile(r"""[\s/]*+[^\s/>][^\s/>=]*+(?:\s*+=\s*+(?:"[^"]*+"|'[^']*+'|[^\s>]*+))?+""")
_FLAT = frozenset(
    [
        "area",
        "base",
        "basefont",
        "bgsound",
        "br",
        "col",
        "embed",
        "frame",
        "hr",
        "img",
        "input",
        "keygen",
        "link",
        "meta",
        "param",
        "source",
        "track",
        "wbr",
        "html",
        "head",
        "body",
        "p",
        "li",
        "dt",
        "dd",
        "td",
        "th",
        "tr",
        "thead",
        "tbody",
        "tfoot",
        "caption",
        "colgroup",
        "option",
        "optgroup",
        "rp",
        "rt",
        "rb",
        "rtc",
        "a",
        "nobr",
        "button",
        "form",
        "select",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
    ]
)
"""Elements that do not nest in themselves: they have no end tag, or many people leave it out."""
_HTML = frozenset(
    [
        "b",
        "big",
        "blockquote",
        "center",
        "code",
        "div",
        "dl",
        "em",
        "font",
        "i",
        "listing",
        "menu",
        "ol",
        "pre",
        "ruby",
        "s",
        "small",
        "span",
        "strong",
        "strike",
        "sub",
        "sup",
        "table",
        "tt",
        "u",
        "ul",
        "var",
    ]
)
"""Elements that a slash does not close, also inside formulas and drawings."""
_MARKUP_FRAME = struct.Struct("<QQ")
_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from llama3.data.text.extract import serve; serve()"
_local = threading.local()


def plain_text(text: str, form: str, extractor: str) -> str | Fault:
    """Return the words of `text`, which is `html` or `md`, or why they cannot be had."""
    if form == "html" and too_deep(text):
        return _TOO_DEEP
    if len(text) <= IN_PROCESS:
        return _converted(text, form, extractor)
    for _ in range(2):
        found = _by_child(text, form, extractor)
        if not isinstance(found, int):
            return found
        if found == -signal.SIGPROF:
            said = f"took more than {_seconds(text)} s of processor time to read as {form}; remove it"
            return Fault("too_slow", said)
    raise SourceError(f"the process that reads markup ended with status {found} twice; is there enough memory?")


def too_deep(text: str) -> bool:
    """Return whether HTML nests so deep, or has so many attributes in a tag, that parsing it takes very long."""
    opened: defaultdict[str, int] = defaultdict(int)
    depth = work = tags = begun = checked = closing = 0
    for token in _TOKEN.finditer(text):
        if token.start() - begun > 2 * ATTRIBUTES and begun >= checked:
            checked = _attributes_end(text, begun)
            if checked < 0:
                return True
        name = token[3]
        if name is None:
            continue
        if closing < token.end():
            closing = text.find(">", token.end())
            closing = len(text) if closing < 0 else closing
        begun = token.end(3)
        if closing - begun > 2 * ATTRIBUTES and begun >= checked and (checked := _attributes_end(text, begun)) < 0:
            return True
        name = name.lower()
        if token[2]:
            if opened[name] > 0:
                opened[name] -= 1
                depth -= 1
            continue
        tags += 1
        work += depth
        foreign = opened["svg"] > 0 or opened["math"] > 0
        if name in _FLAT or (foreign and name not in _HTML and token[4].endswith("/")):
            continue
        opened[name] += 1
        depth += 1
        if depth > DEPTH or work > WORK + MEAN_DEPTH * tags:
            return True
    return len(text) - begun > 2 * ATTRIBUTES and begun >= checked and _attributes_end(text, begun) < 0


def _attributes_end(text: str, start: int) -> int:
    """Return where the attributes of a tag end whose name ends at `start`, or -1 if there are too many."""
    count = 0
    while (found := _ATTRIBUTE.match(text, start)) is not None:
        start, count = found.end(), count + 1
        if count > ATTRIBUTES:
            return -1
    return start


def _converted(text: str, form: str, extractor: str) -> str:
    return html_text(text, extractor) if form == "html" else strip_markdown(text)


def _seconds(text: str) -> int:
    return LIMIT_S + len(text) // CHARS_PER_S


def _by_child(text: str, form: str, extractor: str) -> str | Fault | int:
    """Return what this thread's child makes of `text`, or the status with which it ended instead."""
    child = _child()
    head = json.dumps([form, extractor, _seconds(text)]).encode()
    data = text.encode()
    try:
        child.stdin.write(_MARKUP_FRAME.pack(len(head), len(data)) + head + data)
        child.stdin.flush()
        size, _ = _MARKUP_FRAME.unpack(child.stdout.read(_MARKUP_FRAME.size))
        return str(child.stdout.read(size), "utf-8")
    except (BrokenPipeError, struct.error):
        _local.child = None
        return int(child.wait())


def _child() -> Any:
    child, owner = getattr(_local, "child", None), getattr(_local, "owner", 0)
    if child is None or owner != os.getpid():
        command = [sys.executable, "-c", _CHILD, json.dumps(sys.path)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _local.child, _local.owner = child, os.getpid()
    return child


def serve() -> None:
    """Convert the documents that come on standard input, until it ends; the kernel ends what takes too long."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while frame := source.read(_MARKUP_FRAME.size):
        sizes = _MARKUP_FRAME.unpack(frame)
        form, extractor, seconds = json.loads(source.read(sizes[0]))
        text = str(source.read(sizes[1]), "utf-8")
        signal.setitimer(signal.ITIMER_PROF, seconds)
        data = _converted(text, form, extractor).encode("utf-8", "ignore")
        signal.setitimer(signal.ITIMER_PROF, 0)
        target.write(_MARKUP_FRAME.pack(len(data), 0) + data)
        target.flush()
