"""Markup to text within bounds: HTML and Markdown that would take minutes or more are told apart and left out.

Parsers of HTML take time that grows with the square of the nesting and of the attributes of a tag, so both are counted
first and bounded; what is counted depends on the text alone. What is still slow, or long, is read by a child process
whose processor time is limited: parsers are compiled code, which no signal of Python interrupts.
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

from llama3.data.extract import html_text
from llama3.data.markdown import strip_markdown
from llama3.data.skips import Fault, SourceError

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
_FRAME = struct.Struct("<QQ")
_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from llama3.data.markup import serve; serve()"
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
        child.stdin.write(_FRAME.pack(len(head), len(data)) + head + data)
        child.stdin.flush()
        size, _ = _FRAME.unpack(child.stdout.read(_FRAME.size))
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
    while frame := source.read(_FRAME.size):
        sizes = _FRAME.unpack(frame)
        form, extractor, seconds = json.loads(source.read(sizes[0]))
        text = str(source.read(sizes[1]), "utf-8")
        signal.setitimer(signal.ITIMER_PROF, seconds)
        data = _converted(text, form, extractor).encode("utf-8", "ignore")
        signal.setitimer(signal.ITIMER_PROF, 0)
        target.write(_FRAME.pack(len(data), 0) + data)
        target.flush()
