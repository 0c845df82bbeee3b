"""Requests of the built-in tasks (held-out documents, their continuations, generated questions), and rendered requests
as a folder.

Built-in tasks need no data except the run's own. Questions are zero-shot: the query, a line `Answer:` unless the query
ends so, then a space and the choice. A folder of rendered requests freezes a task, so that it can be evaluated without
data or templates; `task.json` holds the rules and the digest, `requests.jsonl.gz` one request or prompt a line.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from herd.llama3.evaluate.held_out import ValidationDocument
from herd.llama3.evaluate.render import Rendered
from herd.llama3.evaluate.task import TASK_KINDS, Prompt, Request, Task, WrittenKind
from herd.storage.filesystem import write_atomic

ANSWER = "Answer:"
CHOICES = 4
"""Choices of a continuation question."""
CONTEXT_CHARS = 160
"""Most characters of the opening that a continuation question shows."""
CONTINUATION_CHARS = 64
"""Characters of the continuation to be recognized."""
TASK_FILE, REQUESTS_FILE = "task.json", "requests.jsonl.gz"


class GeneratedQuestion(Protocol):
    """A multiple-choice question of the generator."""

    @property
    def query(self) -> str: ...
    @property
    def choices(self) -> Sequence[str]: ...
    @property
    def gold(self) -> int: ...


def document_requests(task: str, documents: Iterable[ValidationDocument]) -> list[Request]:
    """Return one request per document: its whole text with an empty context; its language is the group."""
    return [Request(task, document.id, 0, "", document.text, 0, document.language) for document in documents]


def question_requests(task: str, questions: Iterable[GeneratedQuestion]) -> list[Request]:
    """Return one request per choice of each question. A question's id is a hash of its text; repeats are left out."""
    requests = []
    for name, question in {_hash(item.query, *item.choices)[:16]: item for item in questions}.items():
        query = question.query.rstrip()
        prompt = query if query.endswith(ANSWER) else f"{query}\n{ANSWER}"
        for index, choice in enumerate(question.choices):
            requests.append(Request(task, name, index, prompt, f" {choice.strip()}", question.gold))
    return requests


def continuation_questions(task: str, documents: Sequence[ValidationDocument], count: int) -> list[Request]:
    """Return at most `count` questions about which of four texts continues a document's opening.

    The wrong choices are the continuations of other documents of the same domain. They and the index of the right
    choice are chosen by hashes of the ids, so adding a document elsewhere changes few questions. Domains take turns.
    Documents too short to have a continuation, and domains with fewer than four different ones, give none.
    """
    domains = sorted({document.domain for document in documents})
    by_domain = [_domain_continuations(task, [d for d in documents if d.domain == domain]) for domain in domains]
    longest = max(map(len, by_domain), default=0)
    turns = [questions[i] for i in range(longest) for questions in by_domain if i < len(questions)]
    return [request for question in turns[:count] for request in question]


def _domain_continuations(task: str, documents: Sequence[ValidationDocument]) -> list[list[Request]]:
    texts: dict[str, tuple[str, str]] = {}
    for document in documents:
        text = document.text
        space = max(text.rfind(" ", 1, CONTEXT_CHARS), text.rfind("\n", 1, CONTEXT_CHARS))
        cut = space if space >= CONTEXT_CHARS // 2 else CONTEXT_CHARS
        continuation = text[cut : cut + CONTINUATION_CHARS]
        if len(continuation) == CONTINUATION_CHARS and continuation.strip():
            texts[document.id] = text[:cut], continuation
    questions = []
    for name, (context, right) in texts.items():
        ranked = sorted((other for other in texts if other != name), key=lambda other: _hash(name, other))
        wrong = list(dict.fromkeys(texts[other][1] for other in ranked if texts[other][1] != right))[: CHOICES - 1]
        if len(wrong) < CHOICES - 1:
            continue
        gold = int(_hash(name)[:8], 16) % CHOICES
        choices = [*wrong[:gold], right, *wrong[gold:]]
        questions.append([Request(task, name, i, context, choice, gold) for i, choice in enumerate(choices)])
    return questions


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def write_requests(rendered: Rendered, folder: Path) -> None:
    """Write a task into `folder`, which is created. Raises ValueError if it holds a task already."""
    if (folder / TASK_FILE).exists():
        raise ValueError(f"{folder}: holds a task already; name another folder, or delete it first")
    folder.mkdir(parents=True, exist_ok=True)
    task = rendered.task
    rules = {name: value for name, value in asdict(task).items() if name not in ("requests", "prompts")}
    facts = {**rules, "digest": task.digest, "chance": task.chance, "sources": rendered.sources}
    items: tuple[Request | Prompt, ...] = task.prompts or task.requests
    with io.BytesIO() as buffer:
        # mtime=0: equal tasks give equal bytes
        with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=6, mtime=0) as file:
            for request in items:
                row = {name: value for name, value in asdict(request).items() if name != "task" and value is not None}
                file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        write_atomic(folder / REQUESTS_FILE, buffer.getvalue())
    write_atomic(folder / TASK_FILE, json.dumps(facts, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def read_requests(folder: Path) -> Rendered:
    """Return the task in `folder`. Raises ValueError if it cannot be read or does not match its digest."""
    facts = read_task_json(folder)
    digest, sources = facts.pop("digest"), facts.pop("sources")
    facts.pop("chance", None)
    field = "prompts" if isinstance(TASK_KINDS[facts["kind"]], WrittenKind) else "requests"
    path = folder / REQUESTS_FILE
    try:
        lines = gzip.decompress(path.read_bytes()).decode().split("\n")
        rows = [{**json.loads(line), "task": facts.get("key")} for line in lines if line]
        task = TypeAdapter(Task).validate_python({**facts, field: rows})
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}); render it again") from None
    except ValidationError as error:
        first = error.errors()[0]
        fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ValueError(f"{path}: is damaged ({fault}); render it again") from None
    except (ValueError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: is damaged ({error}); render it again") from None
    if task.digest != digest:
        raise ValueError(
            f"{folder}: the digest of its requests is {task.digest}, task.json says {digest}; it was changed after it "
            "was rendered: render it again"
        )
    return Rendered(task, sources)


def is_rendered(folder: Path) -> bool:
    """Return whether `folder` holds a rendered task."""
    return (folder / TASK_FILE).is_file()


def read_task_json(folder: Path) -> dict[str, Any]:
    """Return the content of `task.json`, unchecked: key, kind, digest, ... Raises ValueError if it cannot be read."""
    path = folder / TASK_FILE
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror}); give a folder that herd eval render wrote"
        raise ValueError(message) from None
    except ValueError:
        raise ValueError(f"{path}: is not JSON; render it again") from None
    kinds = [*TASK_KINDS]
    needed = {"key", "digest", "sources"}
    if not isinstance(facts, dict) or facts.get("kind") not in kinds or not needed <= facts.keys():
        raise ValueError(f"{path}: lacks key, kind ({', '.join(kinds)}), digest or sources; render it again")
    return facts
