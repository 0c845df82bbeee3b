"""Requests of the built-in tasks: held-out documents, what continues them, and generated questions.

They need no data but the run's own, so the shortest recipe can be judged. A whole document is a request with an empty
context. Questions are zero-shot: the query, a line `Answer:` unless it ends so already, then a space and the choice.
What this gives up: numbers that compare with those of other laboratories; published sets are tasks of the library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol

from llama3.evaluate.held_out import Document
from llama3.evaluate.task import Request

ANSWER = "Answer:"
CHOICES = 4
"""Choices of a continuation question."""
CONTEXT_CHARS = 160
"""Most characters of the opening that a continuation question shows."""
CONTINUATION_CHARS = 64
"""Characters of the continuation to be recognised."""


class Question(Protocol):
    """A multiple-choice question, as the generator makes them."""

    @property
    def query(self) -> str: ...
    @property
    def choices(self) -> Sequence[str]: ...
    @property
    def gold(self) -> int: ...


def from_documents(task: str, documents: Iterable[Document]) -> list[Request]:
    """Return one request per document: its whole text, after nothing; its language is the group."""
    return [Request(task, document.id, 0, "", document.text, 0, document.language) for document in documents]


def from_questions(task: str, questions: Iterable[Question]) -> list[Request]:
    """Return one request per choice of each question. A question's id is a hash of its text; repeats are left out."""
    named = {_hash(question.query, *question.choices)[:16]: question for question in questions}
    return [
        Request(task, name, index, _prompt(question.query), f" {choice.strip()}", question.gold)
        for name, question in named.items()
        for index, choice in enumerate(question.choices)
    ]


def continuations(task: str, documents: Sequence[Document], count: int) -> list[Request]:
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


def _domain_continuations(task: str, documents: Sequence[Document]) -> list[list[Request]]:
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
