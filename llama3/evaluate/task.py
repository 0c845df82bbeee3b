"""What a model is put to: requests to score, or prompts to answer, and the rules that turn answers into a score.

All of it is plain text and plain settings, known before any model or tokenizer: so it is hashed, stored and put to any
model. Two kinds are scored by likelihood alone. `bits`: bits per byte of whole texts. `choice`: the likeliest of
several (context, continuation) pairs, which are the choices after one question (or their letters), or the one ending
after several beginnings (Winograd). `cloze`: every token of the continuation is the model's likeliest. `generate`: the
model writes, and what is extracted from its text is compared with the gold answers; `code`: what it writes is run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from typing import Any, ClassVar, Literal

Kind = Literal["bits", "choice", "cloze", "generate", "code"]
Normalise = Literal["bytes", "characters", "tokens", "none"]


@dataclass(frozen=True)
class Request:
    """One text to score given another."""

    task: str
    """Key of the score it counts towards, such as `eval/bpb/math`."""
    document: str
    """Id of the document or question; the choices of one question share it."""
    choice: int
    context: str
    continuation: str
    """The text that is scored; a choice begins with the space that joins it to the context."""
    gold: int
    """The right choice; 0 for a whole document or a cloze."""
    group: str = ""
    """What a task also averages by: the subject of a question, the language of a document."""
    joined: int | None = None
    """Spaces at the beginning of `continuation` that join it to the context; None: it is not known which those are."""

    @property
    def characters(self) -> int:
        """Characters of the scored text without the spaces that join it; without any white space around it if None."""
        return len(self.continuation.strip()) if self.joined is None else len(self.continuation) - self.joined

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the scored text, the joining space included."""
        return len(self.continuation.encode())


@dataclass(frozen=True)
class Prompt:
    """One text that the model continues freely."""

    task: str
    document: str
    """Id of the question."""
    context: str
    gold: tuple[str, ...]
    """Answers that count as right; none for code."""
    tests: str = ""
    """Python that is run after `program` and the answer together; it exits with 0 if the answer is right."""
    program: str = ""
    """Python that stands before the answer when it is run: the context without solved examples, or nothing."""
    group: str = ""


@dataclass(frozen=True)
class Writing:
    """How a model writes its answers, and what of them counts."""

    max_tokens: int = 256
    until: tuple[str, ...] = ()
    """Texts at which an answer ends; they are not part of it. The end token ends it always."""
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    """Answers to each prompt; the score is the mean over them, or what `k` says."""
    extract: tuple[str, ...] = ()
    """Regular expressions, tried in order on an answer; the first group of the last match is what counts."""
    ignore: tuple[str, ...] = ()
    """Regular expressions of what is taken out of answer and gold before they are compared."""
    seconds: float = 5.0
    """Processor time of one program."""
    k: int = 1
    """A question is solved if one of `k` answers is right (pass@k); more `samples` than `k` make the estimate surer."""
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True)
class Task:
    """One score's worth of questions."""

    key: str
    """`eval/...`: the name of its score."""
    kind: Kind
    requests: tuple[Request, ...] = ()
    """Of the kinds scored by likelihood; those of one question stand together."""
    prompts: tuple[Prompt, ...] = ()
    """Of the kinds that write."""
    version: int = 1
    """Raised whenever the same data would give other requests or another score."""
    shots: int = 0
    """Solved examples before each question."""
    guess: float | None = None
    """What guessing scores, where it is not 1 / choices."""
    normalise: Normalise = "bytes"
    """What the nats of a choice are divided by before the smallest is picked."""
    average: Literal["items", "groups"] = "items"
    """Whether the score is the mean over questions or the mean of the groups' means (MMLU's subjects)."""
    writing: Writing = field(default_factory=Writing)

    @property
    def questions(self) -> int:
        """Questions, prompts or whole texts, each counted once."""
        return len(self.prompts) or len({request.document for request in self.requests})

    @property
    def chance(self) -> float | None:
        """What guessing scores: `guess`, or the mean of 1 / choices; None for bits per byte."""
        if self.kind == "bits":
            return None
        if self.guess is not None:
            return self.guess
        if self.kind != "choice":
            return 0.0
        counts: dict[str, int] = {}
        for request in self.requests:
            counts[request.document] = counts.get(request.document, 0) + 1
        return math.fsum(1 / count for count in counts.values()) / len(counts)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of everything asked and of the rules by which answers are scored."""
        asked = [digest(self.requests), digest(self.prompts)]
        rules = [self.kind, self.version, self.shots, self.guess, self.normalise, self.average, astuple(self.writing)]
        return hashlib.sha256(json.dumps([asked, rules]).encode()).hexdigest()


def digest(asked: Iterable[Request | Prompt]) -> str:
    """Return the SHA-256 (hex) of requests or prompts in their order."""
    lines = (json.dumps(_values(one), ensure_ascii=False, separators=(",", ":")) for one in asked)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _values(asked: Request | Prompt) -> tuple[Any, ...]:
    """Return the fields; those added since the first digests were taken only where they are set."""
    values = astuple(asked)
    return values[:-1] if isinstance(asked, Request) and asked.joined is None else values
