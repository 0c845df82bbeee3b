"""Read conversations from JSON lines or a list: messages (OpenAI, ShareGPT), or pairs (prompt and response, Alpaca).

The first row of a file decides its form. Unlike documents, a broken line is never skipped: SourceError names file,
line, field, and what to write. BUILT_IN_CONVERSATIONS are generated instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from herd.llama3.data.demo.sql_functions import sql_conversations
from herd.llama3.data.demo.word_problems import conversation
from herd.llama3.data.readers.files import (
    DAMAGE,
    MAX_LINE,
    Fault,
    File,
    SourceError,
    decompress,
    is_unchanged,
    open_raw,
    read_all,
    source_files,
    split_lines,
)
from herd.llama3.data.readers.records import parse_json
from herd.llama3.data.readers.sources import source_names
from herd.llama3.recipe.data_schema import ConversationSource, Source
from herd.storage.filesystem import fetched_listing, is_local

BUILT_IN_CONVERSATIONS = ("problems", "duckdb-functions")
"""Sources without files: generated math problems, and questions about DuckDB's functions."""
LONGEST_LINE = 16_000_000
"""Maximum bytes of a line."""
COUNTED = 1000
"""Conversations of a source whose tokens a survey counts."""
FORMS = (
    '{"messages": [{"role": "user", "content": "..."}, ...]}, {"conversations": [{"from": "human", "value": "..."}, '
    '...]}, {"prompt": "...", "response": "..."} or {"instruction": "...", "input": "...", "output": "..."}'
)
LISTS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Field with a list of messages -> the fields of a message: as for OpenAI's API, and as ShareGPT has them."""
PAIRS = {"response": "prompt", "completion": "prompt", "output": "instruction"}
"""Field of the answer -> that of the question. `output` is Alpaca's, with `input` added to `instruction`."""
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
NOT_READ = {
    "tools": "tools are not supported",
    "functions": "functions are not supported",
    "tool_calls": "calls of tools are not supported",
    "function_call": "calls of functions are not supported",
    "history": "earlier turns are read only as messages",
}
"""Fields of a row or a message whose loss would change the conversation."""
TOOLS = ("tool", "function", "tool_call", "function_call", "tool_response", "observation")
TURNS = ("user", "assistant")


class Conversation(NamedTuple):
    messages: list[dict[str, str]]
    """`role` and `content` of each message."""
    license: str


class ConversationSurvey(NamedTuple):
    """Amount of text of one source."""

    name: str
    conversations: int = 0
    messages: int = 0
    bytes: int = 0
    """UTF-8 bytes of all contents."""
    tokens: int | None = None
    """Estimate from the first conversations, with the format's special tokens; None without a tokenizer."""
    complete: bool = True
    """False for a remote source that was not read."""


def survey_conversations(
    sources: Sequence[ConversationSource],
    seed: int,
    remote: bool = True,
    count: Callable[[list[dict[str, str]]], int] | None = None,
) -> list[ConversationSurvey]:
    """Read all conversations of `sources` and return their amounts; remote ones only with `remote`.

    `count` returns the tokens of a conversation. Raises SourceError with a line for each source at fault.
    """
    surveys, faults = [], []
    for index, (name, source) in enumerate(zip(source_names(sources), sources, strict=True)):
        if not (remote or source.uri in BUILT_IN_CONVERSATIONS or is_local(source.uri) or fetched_listing(source.uri)):
            surveys.append(ConversationSurvey(name, complete=False))
            continue
        conversations = messages = size = counted = counted_size = 0
        try:
            for row in read_conversations(source, seed):
                own = sum(len(message["content"].encode("utf-8", "ignore")) for message in row.messages)
                if count is not None and conversations < COUNTED:
                    counted, counted_size = counted + count(row.messages), counted_size + own
                conversations, messages, size = conversations + 1, messages + len(row.messages), size + own
            tokens = round(counted * size / counted_size) if counted_size else None
            surveys.append(ConversationSurvey(name, conversations, messages, size, tokens))
        except SourceError as error:
            faults.append(f"conversations.{index}.uri: {error}")
    if faults:
        raise SourceError("\n".join(faults))
    return surveys


def conversation_files(source: ConversationSource) -> list[File]:
    """Return the files of `source`, sorted; none for a built-in one. Raises SourceError if there is none to read."""
    if source.uri in BUILT_IN_CONVERSATIONS:
        return []
    files = source_files(Source(uri=source.uri, ignore=source.ignore))
    if not files:
        raise SourceError(f"{source.uri!r} matches no file; correct the path (it is relative to where herd runs)")
    for file in files:
        if file.kind not in ("jsonl", "json"):
            raise SourceError(
                f"{file.uri!r} is not read as conversations; write them as .jsonl (also packed: .jsonl.gz), or "
                "name the file under ignore:"
            )
    return files


def read_conversations(
    source: ConversationSource, seed: int, files: Sequence[File] | None = None
) -> Iterator[Conversation]:
    """Yield the conversations of `source`, up to its limit; `files` are those of its listing, by default listed now.

    Raises SourceError for the first line that is broken, a damaged file, and a source without conversations.
    """
    if source.uri in BUILT_IN_CONVERSATIONS:
        generated = (conversation(seed, index) for index in range(source.limit or 0))
        rows = generated if source.uri == "problems" else islice(sql_conversations(), source.limit)
        yield from (Conversation(row, source.license) for row in rows)
        return
    count = 0
    for file in conversation_files(source) if files is None else files:
        for row in _read_file(file, source):
            yield row
            count += 1
            if count == source.limit:
                return
    if not count:
        raise SourceError(f"{source.uri!r} has no conversation; add lines such as {FORMS}")


def _read_file(file: File, source: ConversationSource) -> Iterator[Conversation]:
    """Yield the conversations of one file. Raises SourceError."""
    form = ""
    try:
        if not is_unchanged(file):
            raise SourceError(f"{file.uri!r} changed since it was listed; run again when no process writes there")
        with open_raw(file) as raw:
            for number, row in _rows(raw, file):
                try:
                    if isinstance(row, Fault):
                        raise ValueError(f"{row.message}; a line is {FORMS}")
                    form = form or _form(row)
                    messages = _messages(row, form)
                except ValueError as error:
                    raise SourceError(f"{file.uri}:{number} {error}") from None
                own = row.get("license")
                stated = source.license if source.license != "unknown" or not isinstance(own, str) else own
                yield Conversation(messages, stated)
    except DAMAGE as error:
        raise SourceError(f"{file.uri!r} cannot be read to its end ({error}); copy or pack it again") from error


def _rows(raw: Any, file: File) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file, or their faults, with their numbers: its lines, or the elements of its list (.json)."""
    pieces, bom = decompress(raw, file.uri), b"\xef\xbb\xbf"
    first = next(pieces, b"").removeprefix(bom)
    if file.kind == "json" and first.lstrip()[:1] == b"[":
        data = read_all(chain([first], pieces))
        if isinstance(data, int):
            raise SourceError(
                f"{file.uri!r} is longer than {MAX_LINE // 10**6} MB; write a conversation a line, as .jsonl"
            )
        rows = parse_json(data)
        if isinstance(rows, Fault):
            raise SourceError(f"{file.uri!r} {rows.message.partition(';')[0]}; repair the list")
        yield from enumerate(rows, 1)
        return
    number = 0
    for lines in split_lines(chain([first], pieces), LONGEST_LINE):
        for line in lines:
            number += 1
            if isinstance(line, int):
                raise SourceError(f"{file.uri}:{number} is longer than {LONGEST_LINE // 10**6} MB; split it")
            if line and not line.isspace():
                yield number, parse_json(line.removeprefix(bom))


def _form(row: Any) -> str:
    """Return the field by which the rows of a file are read: a list of messages, or that of the response."""
    names = row if isinstance(row, dict) else {}
    for form in (*LISTS, *PAIRS):
        if form in names and PAIRS.get(form, form) in names:
            return form
    known = ", ".join(map(repr, names)) or "no field"
    raise ValueError(f"has {known}; write {FORMS}")


class _Message(NamedTuple):
    """A message as the row has it, and the names of its fields for what is said about it."""

    role: Any
    content: Any
    role_field: str
    content_field: str


def _given(row: Any, form: str) -> list[_Message]:
    """Return the messages of a row, whatever they are. Raises ValueError that begins with the field."""
    names = row if isinstance(row, dict) else {}
    for field in (PAIRS.get(form, form), form):
        if field not in names:
            raise ValueError(f"{field}: is missing, and the file begins with rows that have it; write {FORMS}")
    for field in (field for field in NOT_READ if row.get(field)):
        raise ValueError(f"{field}: {NOT_READ[field]}; remove it, or the conversation")
    system = row.get("system") if form in ("conversations", "output") else None
    messages = [_Message("system", system, "system", "system")] if system else []
    if form in PAIRS:
        question, more = row[PAIRS[form]], row.get("input")
        if form == "output" and more:
            if not isinstance(more, str):
                raise ValueError(f"input: is {type(more).__name__}, not text; write a text, or remove the conversation")
            question = f"{question}\n\n{more}" if isinstance(question, str) else question
        asked, answer = PAIRS[form], form
        return [*messages, _Message("user", question, asked, asked), _Message("assistant", row[form], answer, answer)]
    if not isinstance(row[form], list) or not row[form]:
        raise ValueError(f"{form}: {str(row[form])[:40]!r} is not a list of messages; write {FORMS}")
    for number, message in enumerate(row[form]):
        given, at = message if isinstance(message, dict) else {}, f"{form}.{number}"
        role, content = LISTS["messages" if "role" in given else form]
        for field in (field for field in NOT_READ if given.get(field)):
            raise ValueError(f"{at}.{field}: {NOT_READ[field]}; remove it, or the conversation")
        own = given.get(role)
        if own in TOOLS:
            raise ValueError(f"{at}.{role}: {own!r} is of a tool, which is not supported; remove the conversation")
        if given.get("weight") == 0:
            raise ValueError(f"{at}.weight: 0 is not supported; remove the field, or the conversation")
        named = SPEAKERS.get(own, own) if form == "conversations" and isinstance(own, str) else own
        messages.append(_Message(named, given.get(content), f"{at}.{role}", f"{at}.{content}"))
    return messages


def _messages(row: Any, form: str) -> list[dict[str, str]]:
    """Return the messages of a row, checked. Raises ValueError that begins with the field."""
    messages: list[dict[str, str]] = []
    given = _given(row, form)
    for number, (role, content, role_field, content_field) in enumerate(given):
        turns = len(messages) - (bool(messages) and messages[0]["role"] == "system")
        due = TURNS[turns % 2]
        if role != due and not (role == "system" and number == 0):
            expected = f"{due!r} or 'system'" if number == 0 else repr(due)
            raise ValueError(
                f"{role_field}: {role!r} where {expected} is expected; write user and assistant in turns, after at "
                "most one system message at the beginning"
            )
        if not isinstance(content, str) or not content.strip():
            what = "is empty" if isinstance(content, str) else f"is {type(content).__name__}, not text"
            raise ValueError(f"{content_field}: {what}; write a text, or remove the conversation")
        messages.append({"role": role, "content": content})
    if messages[-1]["role"] != "assistant":
        last = given[-1]
        raise ValueError(f"{last.role_field}: the last message is of {last.role!r}; end with 'assistant'")
    return messages
