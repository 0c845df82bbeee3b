"""Requests of the built-in tasks: held-out documents, what continues them, and generated questions.

They need no data but the run's own, so the shortest recipe can be judged. A whole document is a request with an empty
context. Questions are zero-shot: the query, a line `Answer:` unless it ends so already, then a space and the choice.
What this gives up: numbers that compare with those of other laboratories; published sets are tasks of the library.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from llama3.evaluate.held_out import ValidationDocument
from llama3.evaluate.render import Rendered
from llama3.evaluate.task import Prompt, Request, Task
from storage.filesystem import write_atomic

ANSWER = "Answer:"
CHOICES = 4
"""Choices of a continuation question."""
CONTEXT_CHARS = 160
"""Most characters of the opening that a continuation question shows."""
CONTINUATION_CHARS = 64
"""Characters of the continuation to be recognised."""


class GeneratedQuestion(Protocol):
    """A multiple-choice question, as the generator makes them."""

    @property
    def query(self) -> str: ...
    @property
    def choices(self) -> Sequence[str]: ...
    @property
    def gold(self) -> int: ...


def from_documents(task: str, documents: Iterable[ValidationDocument]) -> list[Request]:
    """Return one request per document: its whole text, after nothing; its language is the group."""
    return [Request(task, document.id, 0, "", document.text, 0, document.language) for document in documents]


def from_questions(task: str, questions: Iterable[GeneratedQuestion]) -> list[Request]:
    """Return one request per choice of each question. A question's id is a hash of its text; repeats are left out."""
    named = {_hash(question.query, *question.choices)[:16]: question for question in questions}
    return [
        Request(task, name, index, _prompt(question.query), f" {choice.strip()}", question.gold)
        for name, question in named.items()
        for index, choice in enumerate(question.choices)
    ]


def continuations(task: str, documents: Sequence[ValidationDocument], count: int) -> list[Request]:
    """Return at most `count` questions about which of four texts continues a document's opening.

    The wrong choices are the continuations of other documents of the same domain, chosen, like the place of the right
    one, by hashes of the ids, so adding a document elsewhere changes few questions. Domains take turns. Documents too
    short to have a continuation, and domains with fewer than four different ones, give none.
    """
    domains = sorted({document.domain for document in documents})
    by_domain = [_domain_continuations(task, [d for d in documents if d.domain == domain]) for domain in domains]
    longest = max(map(len, by_domain), default=0)
    turns = [questions[i] for i in range(longest) for questions in by_domain if i < len(questions)]
    return [request for question in turns[:count] for request in question]


def _domain_continuations(task: str, documents: Sequence[ValidationDocument]) -> list[list[Request]]:
    parts = {document.id: part for document in documents if (part := _split(document.text))}
    questions = []
    for name, (context, true) in parts.items():
        ranked = sorted((other for other in parts if other != name), key=lambda other: _hash(name, other))
        wrong = list(dict.fromkeys(parts[other][1] for other in ranked if parts[other][1] != true))[: CHOICES - 1]
        if len(wrong) < CHOICES - 1:
            continue
        gold = int(_hash(name)[:8], 16) % CHOICES
        choices = [*wrong[:gold], true, *wrong[gold:]]
        questions.append([Request(task, name, i, context, choice, gold) for i, choice in enumerate(choices)])
    return questions


def _split(text: str) -> tuple[str, str] | None:
    """Return the opening of `text` and what follows, cut before a space where the opening has one, or None."""
    space = max(text.rfind(" ", 1, CONTEXT_CHARS), text.rfind("\n", 1, CONTEXT_CHARS))
    cut = space if space >= CONTEXT_CHARS // 2 else CONTEXT_CHARS
    continuation = text[cut : cut + CONTINUATION_CHARS]
    return (text[:cut], continuation) if len(continuation) == CONTINUATION_CHARS and continuation.strip() else None


def _prompt(query: str) -> str:
    query = query.rstrip()
    return query if query.endswith(ANSWER) else f"{query}\n{ANSWER}"


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# Rendered requests as a folder: what was asked, frozen, so that others ask exactly the same without data or
# templates.
#
# `task.json` holds the rules, the digest and where the rows came from; `requests.jsonl.gz` one request or prompt a
# line. Equal tasks give equal bytes (the gzip header holds no time), and reading checks the digest, so a folder
# that was edited is refused. What this gives up: size; a task with five examples repeats them in every request.

TASK_FILE, REQUESTS_FILE = "task.json", "requests.jsonl.gz"
_ASKED = ("requests", "prompts")
_PROMPTED = ("generate", "code")


def write_requests(rendered: Rendered, folder: Path) -> None:
    """Write a task into `folder`, which is made. Raises ValueError if it holds a task already."""
    if (folder / TASK_FILE).exists():
        raise ValueError(f"{folder}: holds a task already; name another folder, or delete it first")
    folder.mkdir(parents=True, exist_ok=True)
    task = rendered.task
    rules = {name: value for name, value in asdict(task).items() if name not in _ASKED}
    facts = {**rules, "digest": task.digest, "chance": task.chance, "sources": rendered.sources}
    with io.BytesIO() as buffer:
        with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=6, mtime=0) as file:
            file.writelines(_lines(task))
        write_atomic(folder / REQUESTS_FILE, buffer.getvalue())
    write_atomic(folder / TASK_FILE, json.dumps(facts, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def read_requests(folder: Path) -> Rendered:
    """Return the task in `folder`. Raises ValueError if it cannot be read or is not what its digest says."""
    facts = stated(folder)
    digest, sources = facts.pop("digest"), facts.pop("sources")
    facts.pop("chance", None)
    asked = "prompts" if facts.get("kind") in _PROMPTED else "requests"
    try:
        lines = gzip.decompress((folder / REQUESTS_FILE).read_bytes()).decode().split("\n")
        rows = [{**json.loads(line), "task": facts.get("key")} for line in lines if line]
        task = TypeAdapter(Task).validate_python({**facts, asked: rows})
    except OSError as error:
        raise ValueError(
            f"{folder / REQUESTS_FILE}: cannot be read ({error.strerror or error}); render it again"
        ) from None
    except (ValueError, EOFError, zlib.error) as error:
        raise ValueError(f"{folder / REQUESTS_FILE}: is damaged ({_first(error)}); render it again") from None
    if task.digest != digest:
        raise ValueError(
            f"{folder}: the digest of its requests is {task.digest}, task.json says {digest}; it was changed after it "
            "was rendered: render it again"
        )
    return Rendered(task, sources)


def is_rendered(folder: Path) -> bool:
    """Return whether `folder` holds a rendered task."""
    return (folder / TASK_FILE).is_file()


def stated(folder: Path) -> dict[str, Any]:
    """Return what `task.json` states, unchecked: key, kind, digest, ... Raises ValueError if it cannot be read."""
    path = folder / TASK_FILE
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give a folder that herd requests wrote") from None
    except ValueError:
        raise ValueError(f"{path}: is not JSON; render it again") from None
    if not isinstance(facts, dict) or not {"key", "kind", "digest", "sources"} <= facts.keys():
        raise ValueError(f"{path}: lacks key, kind, digest or sources; render it again")
    return facts


def _lines(task: Task) -> Iterator[bytes]:
    asked: tuple[Request | Prompt, ...] = task.prompts or task.requests
    for one in asked:
        row = {name: value for name, value in asdict(one).items() if name != "task" and value is not None}
        yield json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        fault = error.errors()[0]
        return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
    return str(error)
