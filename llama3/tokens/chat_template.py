"""Conversations by the chat template of a model, written in jinja, which may be untrusted.

It is filled in by a `limited_process`, in jinja's sandbox. Contents are marked meanwhile: each must come through once,
whole or without the white space around it, so that text of a user stays text and only the template's own text has
special tokens. The answers that a model learns are what `{% generation %}` encloses or, without it, what each message
of the assistant adds to the text before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from herd.storage.limited_process import limited_values

SECONDS = 5
"""Processor time for one text."""
LARGEST = 2**20
"""Characters of a template."""
MOST = 2**22
"""Characters that a template may add to the contents."""
DATE = "2024-07-26"
"""Today for templates that ask, so that tokens do not depend on the day; Llama 3.1's own template has this date."""
PAD, OPEN, CLOSE = "\u2003", "\ue000", "\ue001"
"""Around the number of a message in place of its content; PAD shows where white space is stripped."""
BEGIN_ANSWER, END_ANSWER = "\ue002", "\ue003"
MARK = re.compile(f"({PAD}?){OPEN}(\\d+){CLOSE}({PAD}?)")
_FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- "<|start_header_id|>" + message["role"] + "<|end_header_id|>\\n\\n" }}
    {{- (message["content"] | trim) + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""
"""The built-in Llama 3 format as a template; in `apply_chat_template` a special token in a content is one."""


class ChatTemplate(NamedTuple):
    """A template and the tokens that it writes by name."""

    source: str
    tokens: tuple[tuple[str, str], ...]
    """`bos_token`, `eos_token` and others that `tokenizer_config.json` names."""
    specials: tuple[str, ...]
    """Special tokens of the tokenizer, the longest first."""


class Piece(NamedTuple):
    """A part of a conversation."""

    text: str
    special: bool
    """Whether it is the name of a special token, which the template wrote."""
    answer: bool
    """Whether a model learns to write it."""


Messages = Sequence[Mapping[str, str]]


def chat_pieces(template: ChatTemplate, messages: Messages, add_generation_prompt: bool, answers: bool) -> list[Piece]:
    """Return the parts of the text of `messages`, in order; with `answers`, those of the assistant are marked.

    Raises ValueError if the template fails, exceeds a limit, changes or drops a content, or if the answers are not
    unambiguous.
    """
    contents = [message["content"] for message in messages]
    shape = tuple((message["role"], bool(message["content"])) for message in messages)
    if any(character in template.source for character in (PAD, OPEN, CLOSE, BEGIN_ANSWER, END_ANSWER)):
        raise ValueError("chat template: has a character of a private use (U+E000 to U+E003) or U+2003; take it out")
    marked, spans = _marked(template, shape, add_generation_prompt, answers)
    (actual,) = _render(template, [(list(messages), add_generation_prompt)])
    pieces = list(_pieces(template, marked, spans, contents))
    if _without_answers("".join(piece.text for piece in pieces)) != _without_answers(actual):
        raise ValueError(
            "chat template: changes the contents of these messages, or writes other text for them; contents must come "
            "through whole, or without the white space around them: take such messages out, or use another template"
        )
    return pieces


def turn_end(template: ChatTemplate) -> str | None:
    """Return the special token after an answer; None if there is none. Raises ValueError as `chat_pieces`."""
    messages = [{"role": role, "content": role} for role in ("user", "assistant")]
    pieces = chat_pieces(template, messages, False, False)
    after = [number for number, piece in enumerate(pieces) if "assistant" in piece.text and not piece.special][-1]
    return next((piece.text for piece in pieces[after + 1 :] if piece.special), None)


@lru_cache(4096)
def _marked(
    template: ChatTemplate, shape: tuple[tuple[str, bool], ...], opened: bool, answers: bool
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the text of messages of these roles with marks for contents, and where the answers are in it."""
    messages = [
        {"role": role, "content": f"{PAD}{OPEN}{number}{CLOSE}{PAD}" if full else ""}
        for number, (role, full) in enumerate(shape)
    ]
    turns = [number for number, (role, _) in enumerate(shape) if role == "assistant"] if answers else []
    jobs: list[tuple[list[dict[str, str]], bool]] = [(messages, opened)]
    for turn in turns:
        jobs += [(messages[:turn], True), (messages[: turn + 1], False)]
    if not answers or _GENERATION.search(template.source):
        (whole,) = _render(template, jobs[:1])
        text, spans = _cut_answers(whole)
    else:
        text, *around = _render(template, jobs)
        spans = []
        for turn, before, after in zip(turns, around[::2], around[1::2], strict=True):
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"chat template: writes the messages up to messages.{turn} differently once others follow, so the "
                    "answer cannot be told from what comes before; enclose it in {% generation %} and "
                    "{% endgeneration %}, or give conversations of one answer"
                )
            # a model stops at the last special token: white space after it is not written
            ends = [match.end() for match in _special(template).finditer(after, len(before))]
            end = ends[-1] if ends and not after[ends[-1] :].strip() else len(after)
            spans.append((len(before), end))
    found = [int(match[2]) for match in MARK.finditer(text)]
    if found != [number for number, (_, full) in enumerate(shape) if full]:
        odd = next((n for n, (_, full) in enumerate(shape) if full and found.count(n) != 1), 0)
        raise ValueError(
            f"chat template: writes the content of messages.{odd} {found.count(odd)} times or not in its place; each "
            "content must come through once: leave the message out, or use another template"
        )
    return text, tuple(spans)


_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def _cut_answers(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return `text` without the marks of answers, and where answers are in it."""
    parts, spans, at = [], list[tuple[int, int]](), 0
    for part in re.split(f"({BEGIN_ANSWER}|{END_ANSWER})", text):
        if part == BEGIN_ANSWER:
            spans.append((at, at))
        elif part == END_ANSWER:
            spans[-1] = (spans[-1][0], at)
        else:
            parts.append(part)
            at += len(part)
    return "".join(parts), spans


def _special(template: ChatTemplate) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, template.specials)) or r"(?!)")


def _without_answers(text: str) -> str:
    return text.replace(BEGIN_ANSWER, "").replace(END_ANSWER, "")


def _pieces(
    template: ChatTemplate, marked: str, spans: Sequence[tuple[int, int]], contents: Sequence[str]
) -> Iterator[Piece]:
    """Yield the parts of `marked`, whose marks are replaced by contents."""
    edges = sorted({edge for span in spans for edge in span})
    special = _special(template)

    def parts() -> Iterator[tuple[int, str, bool]]:
        """Yield (place, text, is a special token) of what the template wrote and, at marks, of contents."""
        at = 0
        for match in chain(MARK.finditer(marked), [None]):
            stop = len(marked) if match is None else match.start()
            own = marked[at:stop]
            begin = 0
            for found in special.finditer(own):
                yield at + begin, own[begin : found.start()], False
                yield at + found.start(), found[0], True
                begin = found.end()
            yield at + begin, own[begin:], False
            if match is not None:
                content = contents[int(match[2])]
                content = content if match[1] else content.lstrip()
                yield stop, content if match[3] else content.rstrip(), False
                at = match.end()

    for place, text, is_special in parts():
        inside = [edge - place for edge in edges if place < edge < place + len(text)] if not is_special else []
        marks = [] if MARK.match(marked, place) else inside  # an answer does not begin inside a content
        for first, stop in zip([0, *marks], [*marks, len(text)], strict=True):
            if stop > first:
                answer = any(begin <= place + first < end for begin, end in spans)
                yield Piece(text[first:stop], is_special, answer)


# The side of the process.


def _render(template: ChatTemplate, jobs: Sequence[tuple[Sequence[Mapping[str, str]], bool]]) -> list[str]:
    """Return the text of each of the conversations, with marks around answers."""
    texts = sum(len(message["content"]) for messages, _ in jobs for message in messages)
    job = {"source": template.source, "tokens": dict(template.tokens), "jobs": jobs, "most": MOST + 4 * texts}
    subject = "chat template: its texts"
    return list(limited_values(__name__, job, b"", SECONDS, subject, lambda _: subject))


def run_limited(job: dict[str, Any], data: bytes) -> Iterator[str]:
    """Yield the text of each conversation, as transformers' `apply_chat_template` gives it."""
    if len(job["source"]) > LARGEST:
        raise ValueError(f"chat template: has more than {LARGEST:,} characters; shorten it")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime}
    try:
        compiled = environment.from_string(job["source"])
    except (TemplateError, RecursionError) as error:
        raise ValueError(f"chat template: is not a template ({str(error)[:200]}); mend it") from None
    for messages, opened in job["jobs"]:
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": opened}
        size, parts = 0, []
        try:
            for part in compiled.generate(**job["tokens"], **variables):
                parts.append(part)
                size += len(part)
                if size > job["most"]:
                    raise ValueError(f"gives more than {job['most']:,} characters")
        except _FAULTS as error:
            raise ValueError(
                f"chat template: {str(error)[:200]}; change the messages (roles: "
                f"{', '.join(message['role'] for message in messages)[:80]}), or the template"
            ) from None
        yield "".join(parts)


class _GenerationTag(Extension):
    """`{% generation %}`, which encloses the answers of the assistant."""

    tags = {"generation"}  # noqa: RUF012 - as the class that it extends

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{BEGIN_ANSWER}{caller()}{END_ANSWER}"


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: object) -> None:
    raise TemplateError(str(message))


def _strftime(form: str) -> str:
    return datetime.fromisoformat(DATE).strftime(form)
