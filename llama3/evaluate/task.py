"""Tasks and their kinds: requests to score or prompts to answer, and the rules that turn answers into a score.

A task is plain text and settings, independent of model and tokenizer, so it can be hashed and stored. A new kind is one
subclass of `ScoredKind` or `WrittenKind` in `TASK_KINDS`: files, tables and scores derive from it.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from string import ascii_uppercase
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

from herd.llama3.evaluate.answer_extraction import RegexTimeout, is_correct
from herd.llama3.evaluate.generation_settings import GenerationSettings
from herd.llama3.evaluate.sandbox import run_programs

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


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of a continuation."""

    nll: float
    tokens: int
    greedy: bool | None = None
    """Whether every scored token is the model's likeliest; None if not requested."""


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
class RenderedRow:
    """A row of a data file as text, before solved examples are put in front of it."""

    contexts: tuple[str, ...]
    """One, or a schema's several beginnings."""
    continuations: tuple[str, ...] = ()
    """The choices, or the one ending; empty if the model writes."""
    gold: int = 0
    golds: tuple[str, ...] = ()
    """Right answers if the model writes."""
    tests: str = ""
    program: str = ""
    id: str = ""
    """Hash of the question's text: independent of file, row number and examples."""
    group: str = ""
    preamble: str = ""
    example: str = ""
    """Context and right answer, as a solved example shows them; empty without shots."""


class TemplateRow(Protocol):
    """The templates of a task file on one row. Its methods raise ValueError naming row, field and remedy."""

    @property
    def location(self) -> str:
        """`FILE:LINE`, for messages."""

    def text(self, field: str, **variables: str) -> str:
        """Return a text; empty if the file has no such template."""

    def texts(self, field: str) -> tuple[str, ...]:
        """Return two or more texts."""

    def gold_index(self, count: int) -> int:
        """Return the index of the right one of `count` texts."""

    def gold_texts(self) -> tuple[str, ...]:
        """Return one or more right answers."""


class TaskKind(ABC):
    """How a kind of tasks is rendered and scored."""

    name: ClassVar[str]
    """As task files and tables write it."""
    scored_as: ClassVar[str]
    """In digests: kinds that share it give equal requests equal scores."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Fields that a task file must have."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Optional fields that other kinds lack."""
    whole_texts: ClassVar[bool] = False
    """Whether the score is bits per byte of whole texts, without questions; else it is the share of right answers."""
    before_answer: ClassVar[str] = " "
    """Text between question and answer if a task file gives none."""
    runs_programs: ClassVar[bool] = False

    @abstractmethod
    def render(self, row: TemplateRow) -> RenderedRow:
        """Return the texts that differ by kind. Raises ValueError as `row` does."""

    def chance(self, requests: Iterable[Request]) -> float:
        """Return the score of guessing."""
        return 0.0


Choices = Sequence[tuple[Request, Likelihood]]
"""The requests of one question."""


class Outcome(NamedTuple):
    """The contribution of one question to a score."""

    numerator: float
    denominator: float = 1.0
    picked: int | None = None
    """Index of the choice with the fewest nats; None without choices."""


class ScoredKind(TaskKind):
    """The likelihoods of requests decide."""

    greedy: ClassVar[bool] = False
    """Whether `Likelihood.greedy` is needed."""

    @abstractmethod
    def outcome(self, choices: Choices, normalize: Normalize) -> Outcome:
        """Return what the requests of one question contribute to the score."""


class ChoiceKind(ScoredKind):
    """Right if the right one of several continuations has the fewest nats per byte, or as `normalize` says."""

    name = scored_as = "choice"
    needs = ("context", "choices", "gold")

    def render(self, row: TemplateRow) -> RenderedRow:
        choices = row.texts("choices")
        return RenderedRow((row.text("context"),), choices, row.gold_index(len(choices)))

    def chance(self, requests: Iterable[Request]) -> float:
        counts = Counter(request.document for request in requests).values()
        return math.fsum(1 / count for count in counts) / len(counts)

    def outcome(self, choices: Choices, normalize: Normalize) -> Outcome:
        rates = []
        for choice, likelihood in choices:
            sizes = {"bytes": choice.bytes, "characters": choice.characters, "tokens": likelihood.tokens}
            rates.append(likelihood.nll / sizes.get(normalize, 1))
        picked = min(range(len(rates)), key=rates.__getitem__)
        return Outcome(float(picked == choices[0][0].gold), picked=picked)


class LettersKind(ChoiceKind):
    """A choice whose question shows the answers, each in a `line`; their letters are scored."""

    name = "letters"
    takes = ("line",)

    def render(self, row: TemplateRow) -> RenderedRow:
        choices = row.texts("choices")
        if len(choices) > len(ascii_uppercase):
            raise ValueError(
                f"{row.location}: choices: {len(choices)} are more than there are letters; use kind: {ChoiceKind.name}"
            )
        letters = tuple(ascii_uppercase[: len(choices)])
        pairs = zip(letters, choices, strict=True)
        lines = [row.text("line", letter=letter, choice=choice) for letter, choice in pairs]
        return RenderedRow(("\n".join([row.text("context"), *lines]),), letters, row.gold_index(len(choices)))


class SchemaKind(ChoiceKind):
    """A choice between several beginnings of one ending (Winograd)."""

    name = "schema"
    needs = ("contexts", "continuation", "gold")

    def render(self, row: TemplateRow) -> RenderedRow:
        contexts = row.texts("contexts")
        return RenderedRow(contexts, (row.text("continuation"),), row.gold_index(len(contexts)))


class ClozeKind(ScoredKind):
    """Right if each token of the continuation is the model's likeliest."""

    name = scored_as = "cloze"
    needs = ("context", "continuation")
    greedy = True

    def render(self, row: TemplateRow) -> RenderedRow:
        return RenderedRow((row.text("context"),), (row.text("continuation"),))

    def outcome(self, choices: Choices, normalize: Normalize) -> Outcome:
        ((request, likelihood),) = choices
        assert likelihood.greedy is not None, f"{request.document}: score_requests was not asked whether it is greedy"
        return Outcome(float(likelihood.greedy))


class RollingKind(ScoredKind):
    """Bits per byte of whole texts."""

    name, scored_as = "rolling", "bits"
    takes = ("text", "split_at")
    whole_texts = True
    before_answer = ""

    def render(self, row: TemplateRow) -> RenderedRow:
        return RenderedRow(("",), (row.text("text"),))

    def outcome(self, choices: Choices, normalize: Normalize) -> Outcome:
        ((request, likelihood),) = choices
        return Outcome(likelihood.nll / math.log(2), float(request.bytes))


class Verdict(NamedTuple):
    """Whether a generated answer is right."""

    right: bool
    reason: str
    """Why it is wrong, or how the program ended; empty for a right answer."""
    judged: bool = True
    """False if the program or a regular expression could not be run to its end, so the result is unknown."""


Answers = Sequence[tuple[Prompt, str, str]]
"""Prompt, text of the model, and what was extracted from it."""


class WrittenKind(TaskKind):
    """The model writes its answers."""

    takes: ClassVar[tuple[str, ...]] = ("answer", "writing")

    @abstractmethod
    def judge(self, answers: Answers, writing: GenerationSettings, parallel: int) -> Iterator[Verdict]:
        """Yield the verdict on each answer; at most `parallel` programs run at the same time."""


class GenerateKind(WrittenKind):
    """Right if what is extracted from the text equals a gold answer."""

    name = scored_as = "generate"
    needs = ("context", "gold")

    def render(self, row: TemplateRow) -> RenderedRow:
        return RenderedRow((row.text("context"),), golds=row.gold_texts())

    def judge(self, answers: Answers, writing: GenerationSettings, parallel: int) -> Iterator[Verdict]:
        for prompt, text, _ in answers:
            try:
                right = is_correct(text, prompt.gold, writing)
            except RegexTimeout as error:
                yield Verdict(False, str(error), judged=False)
            else:
                yield Verdict(right, "" if right else f"it is not {' or '.join(prompt.gold)}")


class CodeKind(WrittenKind):
    """Right if `program`, the answer and `tests` run without an error, in a sandbox."""

    name = scored_as = "code"
    needs = ("context", "tests")
    takes = (*WrittenKind.takes, "program")
    before_answer = ""
    runs_programs = True

    def render(self, row: TemplateRow) -> RenderedRow:
        context, tests = row.text("context"), row.text("tests")
        program = row.text("program", context=context)
        if not tests.strip():
            raise ValueError(f"{row.location}: tests: are empty; give Python that fails on a wrong answer")
        return RenderedRow((context,), tests=tests, program=program)

    def judge(self, answers: Answers, writing: GenerationSettings, parallel: int) -> Iterator[Verdict]:
        programs = [answer_program(prompt, extracted) for prompt, _, extracted in answers]
        for result in run_programs(programs, writing.seconds, parallel) if programs else ():
            yield Verdict(result.passed, "" if result.passed else result.reason, result.judged)


def answer_program(prompt: Prompt, answer: str) -> str:
    """Return the program that exits with 0 if `answer` is right."""
    return f"{prompt.program}{answer}\n{prompt.tests}"


TASK_KINDS: dict[str, TaskKind] = {
    kind.name: kind
    for kind in (ChoiceKind(), LettersKind(), SchemaKind(), ClozeKind(), RollingKind(), GenerateKind(), CodeKind())
}
if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[tuple(TASK_KINDS)]  # pydantic refuses other names


@dataclass(frozen=True)
class Task:
    """The questions of one score."""

    key: str
    """Name of its score, `eval/...`."""
    kind: Kind
    requests: tuple[Request, ...] = ()
    """Of a `ScoredKind`; those of one question are adjacent."""
    prompts: tuple[Prompt, ...] = ()
    """Of a `WrittenKind`."""
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
    clusters: Mapping[str, str] = field(default_factory=dict)
    """Id of a document or question -> what it errs with, such as its web site or passage; not in the digest."""

    @property
    def questions(self) -> int:
        """Questions, prompts or whole texts, each counted once."""
        return len(self.prompts) or len({request.document for request in self.requests})

    @property
    def chance(self) -> float | None:
        """The score of guessing: `guess`, or the mean of 1 / choices; None for whole texts."""
        kind = TASK_KINDS[self.kind]
        if kind.whole_texts:
            return None
        return kind.chance(self.requests) if self.guess is None else self.guess

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the requests, the prompts and the rules by which answers are scored."""
        texts = [requests_digest(self.requests), requests_digest(self.prompts)]
        writing = astuple(self.writing)
        if writing[-2:] == (0, 1.0):
            writing = writing[:-2]  # top_k and repetition_penalty are newer than the first digests: see `joined`
        scored_as = TASK_KINDS[self.kind].scored_as
        rules = [scored_as, self.version, self.shots, self.guess, self.normalize, self.average, writing]
        return hashlib.sha256(json.dumps([texts, rules]).encode()).hexdigest()


def requests_digest(items: Iterable[Request | Prompt]) -> str:
    """Return the SHA-256 (hex) of requests or prompts in their order."""
    lines = []
    for item in items:
        values = astuple(item)
        if isinstance(item, Request) and item.joined is None:
            values = values[:-1]  # `joined` is newer than the first digests: hash it only if it is set
        lines.append(json.dumps(values, ensure_ascii=False, separators=(",", ":")))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
