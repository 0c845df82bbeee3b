"""Generate and grade answers: tasks of the kinds `generate` and `code`.

Every answer is kept whole, with the reason if it is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from llama3.evaluate.answer_extraction import TooSlow, extracted, matches
from llama3.evaluate.distributed import Ranks
from llama3.evaluate.generate import answer
from llama3.evaluate.sandbox import SandboxResult, run_programs
from llama3.evaluate.scores import Sample, pass_at
from llama3.evaluate.task import Prompt, Task
from llama3.model.transformer import Transformer
from llama3.tokens.tokenizer import Tokenizer

ANSWERS_FILE = "answers.parquet"
SEED = 0
"""Of sampled answers: not the recipe's, so that all models are treated alike."""
TOO_LONG = "too long: "
"""Prefix of the reason if the question was not asked."""
NOTHING = "nothing was found in the answer"


@dataclass(frozen=True)
class GeneratedAnswer:
    key: str
    id: str
    """Of the question."""
    sample: int
    text: str
    """As the model wrote it."""
    extracted: str | None
    """The part that is compared with the gold answers or run; None if nothing matched."""
    right: bool
    reason: str
    """Why it is wrong, or how the program ended; empty for a right answer."""
    judged: bool = True
    """False if the program or a regular expression could not be run to its end, so the result is unknown."""


def answers(
    model: Transformer, tokenizer: Tokenizer, task: Task, window: int, ranks: Ranks, parallel: int = 2
) -> list[GeneratedAnswer]:
    """Return `writing.samples` answers to each prompt of `task`, in the order of the prompts.

    `window` is the most positions that the model may see at once. Each process of `ranks` answers a share of them.
    """
    writing, prompts = task.writing, task.prompts[ranks.rank :: ranks.size]
    # A prompt that does not fit counts as wrong: leaving it out would let a model with a short context choose its
    # questions, and cutting it would remove the examples that show how to answer.
    reasons = []
    for prompt in prompts:
        size = 1 + len(tokenizer.encode(prompt.context))
        fits = size + writing.max_tokens <= window
        more = f"{size} positions and {writing.max_tokens} to write are more than the model's {window}"
        reasons.append("" if fits else f"{TOO_LONG}{more}")
    fitting = [prompt for prompt, reason in zip(prompts, reasons, strict=True) if not reason]
    graded = _graded(task, fitting, answer(model, tokenizer, fitting, writing, SEED), parallel)
    groups = []
    for prompt, reason in zip(prompts, reasons, strict=True):
        unasked = [
            GeneratedAnswer(prompt.task, prompt.document, sample, "", None, False, reason)
            for sample in range(writing.samples)
        ]
        groups.append(unasked if reason else next(graded))
    by_rank = ranks.gather([[asdict(item) for item in group] for group in groups])
    in_order = chain.from_iterable(zip_longest(*by_rank, fillvalue=[]))
    return [GeneratedAnswer(**item) for group in in_order for item in group]


def _graded(
    task: Task, prompts: Sequence[Prompt], texts: Sequence[Sequence[str]], parallel: int
) -> Iterator[list[GeneratedAnswer]]:
    """Yield the graded answers to each prompt. All programs are run first, `parallel` at a time."""
    writing = task.writing
    extracts: list[list[str | TooSlow | None]] = []
    programs = []
    for prompt, several in zip(prompts, texts, strict=True):
        extracts.append([])
        for text in several:
            try:
                extract: str | TooSlow | None = extracted(text, writing)
            except TooSlow as error:
                extract = error
            extracts[-1].append(extract)
            if task.kind == "code" and isinstance(extract, str):
                programs.append(program_of(prompt, extract))
    results: Iterator[SandboxResult] = iter(run_programs(programs, writing.seconds, parallel) if programs else ())
    for prompt, several, group in zip(prompts, texts, extracts, strict=True):
        graded = []
        for sample, (text, extract) in enumerate(zip(several, group, strict=True)):
            right, judged, reason = False, True, NOTHING
            if isinstance(extract, TooSlow):
                judged, reason, extract = False, str(extract), None
            elif extract is not None and task.kind == "code":
                result = next(results)
                right, judged, reason = result.passed, result.judged, "" if result.passed else result.reason
            elif extract is not None:
                try:
                    right = matches(text, prompt.gold, writing)
                    reason = "" if right else f"it is not {' or '.join(prompt.gold)}"
                except TooSlow as error:
                    judged, reason = False, str(error)
            graded.append(GeneratedAnswer(task.key, prompt.document, sample, text, extract, right, reason, judged))
        yield graded


def program_of(prompt: Prompt, answer: str) -> str:
    """Return the program that exits with 0 if `answer` is right."""
    return f"{prompt.program}{answer}\n{prompt.tests}"


def answer_samples(task: Task, found: Sequence[GeneratedAnswer]) -> list[Sample]:
    """Return one sample per prompt: the share of right answers, or pass@k with `writing.k`.

    A prompt with an answer that was not judged has no sample.
    """
    writing, samples = task.writing, []
    for index, prompt in enumerate(task.prompts):
        group = found[index * writing.samples : (index + 1) * writing.samples]
        if not all(item.judged for item in group):
            continue
        share = pass_at(writing.k, sum(item.right for item in group), writing.samples)
        samples.append(Sample(task.key, prompt.document, share, 1.0, 0, None, None, prompt.group))
    return samples


def write_answers(found: Iterable[GeneratedAnswer], folder: Path) -> None:
    """Write all answers into `folder`, by key, question and sample."""
    rows = [asdict(item) for item in sorted(found, key=lambda item: (item.key, item.id, item.sample))]
    columns = {"key": pa.string(), "id": pa.string(), "sample": pa.int64(), "text": pa.string()}
    columns |= {"extracted": pa.string(), "right": pa.bool_(), "reason": pa.string(), "judged": pa.bool_()}
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(list(columns.items()))), folder / ANSWERS_FILE)


def too_long(found: Iterable[GeneratedAnswer]) -> dict[str, int]:
    """Return how many questions of each task were not asked because they do not fit the model's window."""
    questions = {(item.key, item.id) for item in found if item.reason.startswith(TOO_LONG)}
    return dict(sorted(Counter(key for key, _ in questions).items()))


def unjudged(found: Iterable[GeneratedAnswer]) -> dict[str, int]:
    """Return how many questions of each task have an answer that was not judged."""
    questions = {(item.key, item.id) for item in found if not item.judged}
    return dict(sorted(Counter(key for key, _ in questions).items()))
