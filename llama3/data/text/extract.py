"""HTML and Markdown to plain text, with bounds on the time that one document may take.

resiliparse finds the main content of a page (about 40 MB/s per core). trafilatura, on request, is ten to twenty times
slower and removes boilerplate more precisely. `markdown.py` reads Markdown.
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
from typing import Any

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

from herd.llama3.data.readers.files import Fault, SourceError
from herd.llama3.data.text.markdown import strip_markdown

_FRAME = ["nav", "footer", "aside", "form", "script", "style", "template", "[role=navigation]", "[role=banner]"]
_BULLET = re.compile(r"^(\s*)- ", re.MULTILINE)
_CODE_BLOCK = re.compile(r"codeblock(\d+)held")


def html_text(html: str, extractor: str = "resiliparse") -> str:
    """Return the readable text of `html`: paragraphs apart, preformatted text unchanged, no markup.

    `extractor` is resiliparse or trafilatura.
    """
    if extractor == "trafilatura" and (text := _by_trafilatura(_parse_html(html))):
        return text
    tree = _parse_html(html)
    main = str(extract_plain_text(tree, main_content=True, alt_texts=True, list_bullets=False))
    whole = str(extract_plain_text(tree, alt_texts=True, list_bullets=False, skip_elements=_FRAME))
    # With less than half of the text outside menus, the heuristics have failed: a lost document costs more than a
    # footer that stays.
    return main if 2 * len(main) >= len(whole) else whole


def _parse_html(html: str) -> Any:
    """Return the tree of `html`, each formula replaced by its TeX; the parsers make `x2` of x squared in MathML."""
    tree: Any = HTMLTree.parse(html)
    if "<math" in html or "math/tex" in html:
        for formula in list(tree.document.query_selector_all("math, script[type^='math/tex']")):
            tex = formula.get_attribute("alttext")
            if not tex:
                source = formula  # a script of MathJax
                if formula.local_name != "script":
                    source = formula.query_selector("annotation[encoding='application/x-tex']")
                tex = source.text if source is not None else ""
            _replace(tree, formula, "span", tex)
    return tree


def _by_trafilatura(tree: Any) -> str:
    """Return the text that trafilatura extracts, "" if none; changes `tree`."""
    from trafilatura import extract  # 0.5 s, and an extra of the project

    # It drops alternative texts and the blank lines of code, so both become text that it keeps.
    for image in list(tree.document.query_selector_all("img[alt]")):
        _replace(tree, image, "span", image.get_attribute("alt"))
    blocks: list[str] = []
    for block in list(tree.document.query_selector_all("pre")):
        blocks.append(str(block.text).strip("\n"))
        _replace(tree, block, "pre", f"codeblock{len(blocks) - 1}held")
    extracted = extract(str(tree.document.html), include_comments=False, include_tables=True, favor_precision=True)
    text = _BULLET.sub(r"\1", extracted or "").replace("\n", "\n\n")
    return _CODE_BLOCK.sub(lambda match: blocks[int(match[1])] if int(match[1]) < len(blocks) else match[0], text)


def _replace(tree: Any, element: Any, name: str, text: str | None) -> None:
    """Replace `element` by an element `name` with `text`, unless the text is empty."""
    if text and element.parent_node is not None:
        replacement = tree.create_element(name)
        replacement.text = text.strip()
        element.parent_node.replace_child(replacement, element)


# Bounds
#
# The time of HTML parsers grows with the square of the nesting and of the attributes of a tag, so both are counted
# first and bounded; the count depends on the text alone. What is still slow, or long, is converted by a child process
# with a limit on its processor time: parsers are compiled code, which no signal handler of Python interrupts.

DEPTH = 512
"""Maximum elements inside each other; browsers stop nesting there."""
ATTRIBUTES = 1000
"""Maximum attributes of a tag."""
WORK, MEAN_DEPTH = 2_000_000, 100
"""The sum of the depths of all tags may be WORK and MEAN_DEPTH per tag."""
IN_PROCESS = 64_000
"""Maximum characters of a document that this process converts: even a bad one of this length ends in seconds."""
LIMIT_S, CHARS_PER_S = 60, 100_000
"""Processor seconds for one document, and characters for which it may have one more."""
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
_FLAT = frozenset((
    "area", "base", "basefont", "bgsound", "br", "col", "embed", "frame", "hr", "img", "input", "keygen", "link",
    "meta", "param", "source", "track", "wbr", "html", "head", "body", "p", "li", "dt", "dd", "td", "th", "tr",
    "thead", "tbody", "tfoot", "caption", "colgroup", "option", "optgroup", "rp", "rt", "rb", "rtc", "a", "nobr",
    "button", "form", "select", "h1", "h2", "h3", "h4", "h5", "h6",
))  # fmt: skip
"""Elements that do not nest in themselves: they have no end tag, or pages often omit it."""
_HTML = frozenset((
    "b", "big", "blockquote", "center", "code", "div", "dl", "em", "font", "i", "listing", "menu", "ol", "pre",
    "ruby", "s", "small", "span", "strong", "strike", "sub", "sup", "table", "tt", "u", "ul", "var",
))  # fmt: skip
"""Elements that a slash does not close, even inside formulas and drawings."""
_HEADER = struct.Struct("<QQ")
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from herd.llama3.data.text.extract import serve; serve()"
)
_local = threading.local()


def plain_text(text: str, form: str, extractor: str) -> str | Fault:
    """Return `text`, which is `html` or `md`, as plain text, or the fault that prevents it."""
    if form == "html" and exceeds_limits(text):
        return _TOO_DEEP
    if len(text) <= IN_PROCESS:
        return _convert(text, form, extractor)
    seconds = LIMIT_S + len(text) // CHARS_PER_S
    for _ in range(2):
        result = _convert_in_child(text, form, extractor, seconds)
        if not isinstance(result, int):
            return result
        if result == -signal.SIGPROF:
            return Fault("too_slow", f"took more than {seconds} s of processor time to read as {form}; remove it")
    raise SourceError(f"the process that reads markup ended with status {result} twice; is there enough memory?")


def exceeds_limits(text: str) -> bool:
    """Return whether parsing the HTML takes very long: deep nesting, or very many attributes in a tag."""
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
    while (attribute := _ATTRIBUTE.match(text, start)) is not None:
        start, count = attribute.end(), count + 1
        if count > ATTRIBUTES:
            return -1
    return start


def _convert(text: str, form: str, extractor: str) -> str:
    return html_text(text, extractor) if form == "html" else strip_markdown(text)


def _convert_in_child(text: str, form: str, extractor: str, seconds: int) -> str | int:
    """Return `text` as this thread's child process converts it, or the exit status if the child ended."""
    child: Any = getattr(_local, "child", None)
    if child is None or _local.owner != os.getpid():
        command = [sys.executable, "-c", _CHILD, json.dumps(sys.path)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _local.child, _local.owner = child, os.getpid()
    request, data = json.dumps([form, extractor, seconds]).encode(), text.encode()
    try:
        child.stdin.write(_HEADER.pack(len(request), len(data)) + request + data)
        child.stdin.flush()
        size, _ = _HEADER.unpack(child.stdout.read(_HEADER.size))
        return str(child.stdout.read(size), "utf-8")
    except (BrokenPipeError, struct.error):
        _local.child = None
        return int(child.wait())


def serve() -> None:
    """Convert documents from standard input until it ends; the kernel kills this process at the time limit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(_HEADER.size):
        sizes = _HEADER.unpack(header)
        form, extractor, seconds = json.loads(source.read(sizes[0]))
        text = str(source.read(sizes[1]), "utf-8")
        signal.setitimer(signal.ITIMER_PROF, seconds)
        data = _convert(text, form, extractor).encode("utf-8", "ignore")
        signal.setitimer(signal.ITIMER_PROF, 0)
        target.write(_HEADER.pack(len(data), 0) + data)
        target.flush()
