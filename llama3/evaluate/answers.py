"""What a model writes, and whether it is right: tasks of the kinds `generate` and `code`.

Written answers are kept whole, right or wrong, with the reason: a score that nobody can look behind is not believed.
A question whose prompt, with room for the answer, is longer than the model's window is not put to it and counts as
wrong, and says so: leaving it out would let a model of short context choose its questions, and cutting the prompt
would take away the examples that tell it how to answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from llama3.evaluate.answer_extraction import TooSlow, extracted, matches
from llama3.evaluate.distributed import Ranks
from llama3.evaluate.generate import answer
from llama3.evaluate.sandbox import run_programs
from llama3.evaluate.scores import Sample, pass_at
from llama3.evaluate.task import Prompt, Task, Writing
from llama3.model.transformer import Transformer
from llama3.tokens.tokenizer import Tokenizer

ANSWERS_FILE = "answers.parquet"
SEED = 0
"""Of sampled answers: not the recipe's, so that all models are treated alike."""


@dataclass(frozen=True)
class GeneratedAnswer:
    key: str
    id: str
    """Of the question."""
    sample: int
    text: str
    """As the model wrote it."""
    extracted: str | None
    """What of it is compared with the gold answers, or run; None where nothing was found."""
    right: bool
    reason: str
    """Why not, or of a program how it ended; empty for a right answer."""
    judged: bool = True
    """False where nothing is known about it, because a program or an expression could not be run to its end."""


class End(NamedTuple):
    """What came of an answer: the last fields of `Answer`."""

    right: bool
    reason: str
    judged: bool = True


TOO_LONG = "too long: "
"""How the reason begins where the question was not asked."""
NOTHING = "nothing was found in the answer"


def answers(
    model: Transformer, tokenizer: Tokenizer, task: Task, window: int, ranks: Ranks, parallel: int = 2
) -> list[GeneratedAnswer]:
    """Return the answers to the prompts of `task`, in their order, `writing.samples` to each.

    `window` is the most positions that the model may see at once. Each process of `ranks` answers a share of them.
    """
    mine = task.prompts[ranks.rank :: ranks.size]
    reasons = [_too_long(prompt, task.writing, tokenizer, window) for prompt in mine]
    asked = [prompt for prompt, reason in zip(mine, reasons, strict=True) if not reason]
    judged = iter(_judged(task, asked, answer(model, tokenizer, asked, task.writing, SEED), parallel))
    pairs = zip(mine, reasons, strict=True)
    written = [_unasked(prompt, reason, task.writing) if reason else next(judged) for prompt, reason in pairs]
    shares = ranks.gather([[asdict(one) for one in group] for group in written])
    turns = chain.from_iterable(zip_longest(*shares, fillvalue=[]))
    return [GeneratedAnswer(**one) for group in turns for one in group]


def answer_samples(task: Task, found: Sequence[GeneratedAnswer]) -> list[Sample]:
    """Return one sample per prompt: the share of right answers, or the chance that one of `writing.k` is right.

    None for a prompt of whose answers one was not judged.
    """
    writing, made = task.writing, []
    for place, prompt in enumerate(task.prompts):
        mine = found[place * writing.samples : (place + 1) * writing.samples]
        if not all(one.judged for one in mine):
            continue
        share = pass_at(writing.k, sum(one.right for one in mine), writing.samples)
        made.append(Sample(task.key, prompt.document, share, 1.0, 0, None, None, prompt.group))
    return made


def write_answers(found: Iterable[GeneratedAnswer], folder: Path) -> None:
    """Write all answers into `folder`, by key, question and sample."""
    rows = [asdict(one) for one in sorted(found, key=lambda one: (one.key, one.id, one.sample))]
    columns = {"key": pa.string(), "id": pa.string(), "sample": pa.int64(), "text": pa.string()}
    columns |= {"extracted": pa.string(), "right": pa.bool_(), "reason": pa.string(), "judged": pa.bool_()}
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(list(columns.items()))), folder / ANSWERS_FILE)


def program_of(prompt: Prompt, answer: str) -> str:
    """Return the program that shows whether `answer` is right: it exits with 0 if so."""
    return f"{prompt.program}{answer}\n{prompt.tests}"


def _too_long(prompt: Prompt, writing: Writing, tokenizer: Tokenizer, window: int) -> str:
    size = 1 + len(tokenizer.encode(prompt.context))
    if size + writing.max_tokens <= window:
        return ""
    return f"{TOO_LONG}{size} positions and {writing.max_tokens} to write are more than the model's {window}"


def _unasked(prompt: Prompt, reason: str, writing: Writing) -> list[GeneratedAnswer]:
    return [
        GeneratedAnswer(prompt.task, prompt.document, place, "", None, False, reason)
        for place in range(writing.samples)
    ]


def _judged(
    task: Task, prompts: Sequence[Prompt], texts: Sequence[Sequence[str]], parallel: int
) -> Iterator[list[GeneratedAnswer]]:
    """Yield the answers to each prompt; programs are all run together, `parallel` at a time."""
    writing = task.writing
    asked = [
        (prompt, place, text)
        for prompt, several in zip(prompts, texts, strict=True)
        for place, text in enumerate(several)
    ]
    parts = [_counting(text, writing) for _, _, text in asked]
    if task.kind == "code":
        pairs = [(prompt, part) for (prompt, _, _), part in zip(asked, parts, strict=True)]
        ends = _run(pairs, writing, parallel)
    else:
        triples = zip(asked, parts, strict=True)
        ends = [_compared(prompt, text, part, writing) for (prompt, _, text), part in triples]
    made = (
        GeneratedAnswer(task.key, prompt.document, place, text, None if isinstance(part, TooSlow) else part, *end)
        for (prompt, place, text), part, end in zip(asked, parts, ends, strict=True)
    )
    for _ in prompts:
        yield list(islice(made, writing.samples))


def _counting(text: str, writing: Writing) -> str | TooSlow | None:
    """Return what of the answer `text` counts, or why that cannot be said."""
    try:
        return extracted(text, writing)
    except TooSlow as error:
        return error


def _compared(prompt: Prompt, text: str, part: str | TooSlow | None, writing: Writing) -> End:
    try:
        if isinstance(part, TooSlow):
            raise part
        right = matches(text, prompt.gold, writing)
    except TooSlow as error:
        return End(False, str(error), False)
    return End(right, "" if right else NOTHING if part is None else f"it is not {' or '.join(prompt.gold)}")


def _run(pairs: Sequence[tuple[Prompt, str | TooSlow | None]], writing: Writing, parallel: int) -> list[End]:
    programs = [program_of(prompt, part) for prompt, part in pairs if isinstance(part, str)]
    verdicts = iter(run_programs(programs, writing.seconds, parallel) if programs else ())
    ends = []
    for _, part in pairs:
        if isinstance(part, str):
            verdict = next(verdicts)
            ends.append(End(verdict.passed, "" if verdict.passed else verdict.reason, verdict.judged))
        else:
            ends.append(End(False, NOTHING if part is None else str(part), part is None))
    return ends


def too_long(found: Iterable[GeneratedAnswer]) -> dict[str, int]:
    """Return how many questions of each task were not asked because the model's window is too short."""
    unasked = {(one.key, one.id) for one in found if one.reason.startswith(TOO_LONG)}
    return dict(sorted(Counter(key for key, _ in unasked).items()))


def unjudged(found: Iterable[GeneratedAnswer]) -> dict[str, int]:
    """Return how many questions of each task have an answer that was not judged."""
    questions = {(one.key, one.id) for one in found if not one.judged}
    return dict(sorted(Counter(key for key, _ in questions).items()))
