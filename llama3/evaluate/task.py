"""Tasks: requests to score or prompts to answer, and the rules that turn answers into a score.

All of it is plain text and settings, independent of model and tokenizer, so it can be hashed and stored. Kinds: `bits`:
bits per byte of whole texts. `choice`: the likeliest of several (context, continuation) pairs: choices after one
question, or one ending after several beginnings (Winograd). `cloze`: every token of the continuation is the model's
likeliest. `generate`: generated text is compared with the gold answers. `code`: it is run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from typing import ClassVar, Literal

Kind = Literal["bits", "choice", "cloze", "generate", "code"]
Normalize = Literal["bytes", "characters", "tokens", "none"]


@dataclass(frozen=True)
class Request:
    """One text to score given another."""

    task: str
    """Key of its score, such as `eval/bpb/math`."""
    document: str
    """Id of the document or question; the choices of one question share it."""
    choice: int
    context: str
    continuation: str
    """The text that is scored; a choice begins with the space between context and choice."""
    gold: int
    """Index of the right choice; 0 for a whole document or a cloze."""
    group: str = ""
    """Subject of a question or language of a document, for means over groups."""
    joined: int | None = None
    """Spaces at the beginning of `continuation` that join it to the context; None: unknown."""

    @property
    def characters(self) -> int:
        """Characters of the scored text without the joining spaces; without any surrounding white space if unknown."""
        return len(self.continuation.strip()) if self.joined is None else len(self.continuation) - self.joined

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the scored text, the joining space included."""
        return len(self.continuation.encode())


WRITTEN = ("generate", "code")
"""Task kinds whose answers are generated text."""


@dataclass(frozen=True)
class Prompt:
    """One text that the model continues freely."""

    task: str
    document: str
    """Id of the question."""
    context: str
    gold: tuple[str, ...]
    """Right answers; empty for code."""
    tests: str = ""
    """Python that is run after `program` and the answer; it exits with 0 if the answer is right."""
    program: str = ""
    """Python that is run before the answer: the context without solved examples, or nothing."""
    group: str = ""


@dataclass(frozen=True)
class GenerationSettings:
    """How a model generates its answers, and how they are compared."""

    max_tokens: int = 256
    until: tuple[str, ...] = ()
    """Stop texts, which are not part of the answer. The end token always ends it."""
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    """Answers to each prompt; the score is the mean over them, or pass@k."""
    extract: tuple[str, ...] = ()
    """Regular expressions, tried in order on an answer; the first group of the last match is compared."""
    ignore: tuple[str, ...] = ()
    """Regular expressions whose matches are removed from answer and gold before they are compared."""
    seconds: float = 5.0
    """Processor time of one program."""
    k: int = 1
    """A question is solved if one of `k` answers is right (pass@k); more `samples` than `k` narrow the estimate."""
    top_k: int = 0
    repetition_penalty: float = 1.0
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True)
class Task:
    """The questions of one score."""

    key: str
    """Name of its score, `eval/...`."""
    kind: Kind
    requests: tuple[Request, ...] = ()
    """Of the kinds scored by likelihood; those of one question are adjacent."""
    prompts: tuple[Prompt, ...] = ()
    """Of the kinds `generate` and `code`."""
    version: int = 1
    """Raised whenever the same data would give other requests or another score."""
    shots: int = 0
    """Solved examples before each question."""
    guess: float | None = None
    """The score of guessing, if it is not 1 / choices."""
    normalize: Normalize = "bytes"
    """What the nats of a choice are divided by before the smallest is picked."""
    average: Literal["items", "groups"] = "items"
    """Whether the score is the mean over questions or the mean of the groups' means (MMLU's subjects)."""
    writing: GenerationSettings = field(default_factory=GenerationSettings)

    @property
    def questions(self) -> int:
        """Questions, prompts or whole texts, each counted once."""
        return len(self.prompts) or len({request.document for request in self.requests})

    @property
    def chance(self) -> float | None:
        """The score of guessing: `guess`, or the mean of 1 / choices; None for bits per byte."""
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
        """SHA-256 (hex) of the requests, the prompts and the rules by which answers are scored."""
        asked = [requests_digest(self.requests), requests_digest(self.prompts)]
        writing = astuple(self.writing)
        if writing[-2:] == (0, 1.0):
            writing = writing[:-2]  # top_k and repetition_penalty are newer than the first digests: see `joined`
        rules = [self.kind, self.version, self.shots, self.guess, self.normalize, self.average, writing]
        return hashlib.sha256(json.dumps([asked, rules]).encode()).hexdigest()


def requests_digest(asked: Iterable[Request | Prompt]) -> str:
    """Return the SHA-256 (hex) of requests or prompts in their order."""
    lines = []
    for item in asked:
        values = astuple(item)
        if isinstance(item, Request) and item.joined is None:
            values = values[:-1]  # `joined` is newer than the first digests: hash it only if it is set
        lines.append(json.dumps(values, ensure_ascii=False, separators=(",", ":")))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def check_sampling(temperature: float, top_p: float, top_k: int = 0, repetition_penalty: float = 1.0) -> None:
    """Raise ValueError, naming field and value, for settings that no token can be drawn with."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature {temperature} must be 0 or more; 0 takes the likeliest token")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p} must be in (0, 1]; 1 draws from all tokens")
    if top_k < 0:
        raise ValueError(f"top_k {top_k} must be 0 or more; 0 draws from all tokens")
    if not 0 < repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty {repetition_penalty} must be above 0; 1 changes nothing")
