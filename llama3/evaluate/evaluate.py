"""Evaluate one model on the recipe's suite and write the tables that the gate, the report and `compare` read.

Files: `scores.parquet` (a row per score), `samples.parquet` (a row per document or question, for paired comparisons),
`answers.parquet` (generated answers, if a task has any), `tasks.json` (what was asked and what was skipped) and
`generations.json` (a few sample continuations). Equal inputs give equal bytes on any number of processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from herd.llama3.evaluate.answer_extraction import RegexTimeout, extract_answer
from herd.llama3.evaluate.distributed import EvalRanks
from herd.llama3.evaluate.generate import generate, generate_batch, stream
from herd.llama3.evaluate.held_out import (
    ValidationDocument,
    document_bytes,
    read_validation_documents,
)
from herd.llama3.evaluate.needle import KINDS, context_lengths, find_needles
from herd.llama3.evaluate.scores import (
    BITS,
    GENERATIONS_FILE,
    SAMPLES_FILE,
    TASKS_FILE,
    Sample,
    Score,
    gold_key,
    gold_samples,
    gold_score,
    pass_at,
    samples,
    score_table,
    write_scores,
)
from herd.llama3.evaluate.scoring import LanguageModel, Scorable, score_requests, score_sequences
from herd.llama3.evaluate.suite import ARITHMETIC, RESPONSES, LoadedSuite, render_recipe_suite
from herd.llama3.evaluate.task import TASK_KINDS, Prompt, ScoredKind, Task, Verdict, WrittenKind, requests_digest
from herd.llama3.model.linear import use_reproducible_matmul
from herd.llama3.model.transformer import Transformer
from herd.llama3.recipe.schema import Recipe
from herd.llama3.statistics.estimates import ratio
from herd.llama3.tokens.chat import encode_chat, encode_conversation
from herd.llama3.tokens.tokenizer import TEMPLATE_FILE, Tokenizer, tokenizer_file

# Tasks of the kinds `generate` and `code`. Every answer is kept whole, with the reason if it is wrong.

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


def generate_answers(
    model: Transformer, tokenizer: Tokenizer, task: Task, window: int, ranks: EvalRanks, parallel: int = 2
) -> list[GeneratedAnswer]:
    """Return `writing.samples` answers to each prompt of `task`, in the order of the prompts.

    `window` is the most positions that the model may see at once. Each replica of `ranks` answers a share of them.
    """
    writing, prompts = task.writing, task.prompts[ranks.rank :: ranks.size]

    def answer() -> list[list[dict[str, Any]]]:
        # A prompt that does not fit counts as wrong: leaving it out would let a model with a short context choose its
        # questions, and cutting it would remove the examples that show how to answer.
        reasons = []
        for prompt in prompts:
            size = len(tokenizer.prompt(prompt.context))
            fits = size + writing.max_tokens <= window
            more = f"{size} positions and {writing.max_tokens} to write are more than the model's {window}"
            reasons.append("" if fits else f"{TOO_LONG}{more}")
        fitting = [prompt for prompt, reason in zip(prompts, reasons, strict=True) if not reason]
        texts = generate_batch(model, tokenizer, fitting, writing, SEED)
        graded = _grade(task, fitting, texts, parallel) if ranks.leads else iter([[]] * len(fitting))
        groups = []
        for prompt, reason in zip(prompts, reasons, strict=True):
            unasked = [
                GeneratedAnswer(prompt.task, prompt.document, sample, "", None, False, reason)
                for sample in range(writing.samples)
            ]
            groups.append(unasked if reason else next(graded))
        return [[asdict(item) for item in group] for group in groups]

    by_rank = ranks.gather(answer)
    in_order = chain.from_iterable(zip_longest(*by_rank, fillvalue=[]))
    return [GeneratedAnswer(**item) for group in in_order for item in group]


def _grade(
    task: Task, prompts: Sequence[Prompt], texts: Sequence[Sequence[str]], parallel: int
) -> Iterator[list[GeneratedAnswer]]:
    """Yield the graded answers to each prompt. All programs are run first, `parallel` at a time."""
    kind, writing = TASK_KINDS[task.kind], task.writing
    assert isinstance(kind, WrittenKind), f"{task.key}: kind {task.kind} is scored by likelihood"
    extracts: list[list[str | RegexTimeout | None]] = []
    judged = []
    for prompt, several in zip(prompts, texts, strict=True):
        extracts.append([])
        for text in several:
            try:
                extract: str | RegexTimeout | None = extract_answer(text, writing)
            except RegexTimeout as error:
                extract = error
            extracts[-1].append(extract)
            if isinstance(extract, str):
                judged.append((prompt, text, extract))
    verdicts = kind.judge(judged, writing, parallel)
    for prompt, several, group in zip(prompts, texts, extracts, strict=True):
        graded = []
        for sample, (text, extract) in enumerate(zip(several, group, strict=True)):
            if isinstance(extract, RegexTimeout):
                extract, verdict = None, Verdict(False, str(extract), judged=False)
            else:
                verdict = Verdict(False, NOTHING) if extract is None else next(verdicts)
            graded.append(GeneratedAnswer(task.key, prompt.document, sample, text, extract, *verdict))
        yield graded


def answer_samples(task: Task, answers: Sequence[GeneratedAnswer]) -> list[Sample]:
    """Return one sample per prompt: the share of right answers, or pass@k with `writing.k`.

    A prompt with an answer that was not judged has no sample.
    """
    writing, samples = task.writing, []
    for index, prompt in enumerate(task.prompts):
        group = answers[index * writing.samples : (index + 1) * writing.samples]
        if not all(item.judged for item in group):
            continue
        share = pass_at(writing.k, sum(item.right for item in group), writing.samples)
        cluster = task.clusters.get(prompt.document, "")
        samples.append(Sample(task.key, prompt.document, share, 1.0, 0, None, None, prompt.group, cluster))
    return samples


def write_answers(answers: Iterable[GeneratedAnswer], folder: Path) -> None:
    """Write all answers into `folder`, by key, question and sample."""
    rows = [asdict(item) for item in sorted(answers, key=lambda item: (item.key, item.id, item.sample))]
    columns = {"key": pa.string(), "id": pa.string(), "sample": pa.int64(), "text": pa.string()}
    columns |= {"extracted": pa.string(), "right": pa.bool_(), "reason": pa.string(), "judged": pa.bool_()}
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(list(columns.items()))), folder / ANSWERS_FILE)


def count_too_long(answers: Iterable[GeneratedAnswer]) -> dict[str, int]:
    """Return how many questions of each task were not asked because they do not fit the model's window."""
    questions = {(item.key, item.id) for item in answers if item.reason.startswith(TOO_LONG)}
    return dict(sorted(Counter(key for key, _ in questions).items()))


def count_unjudged(answers: Iterable[GeneratedAnswer]) -> dict[str, int]:
    """Return how many questions of each task have an answer that was not judged."""
    questions = {(item.key, item.id) for item in answers if not item.judged}
    return dict(sorted(Counter(key for key, _ in questions).items()))


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Of the weights and of what is computed, by `evaluate.precision`."""
HAYSTACK_BYTES = 4
"""UTF-8 bytes of each document per position of the longest haystack."""
PROMPT_CHARS = 80
"""Characters of a held-out document that prompt a sample continuation."""
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 0}
"""Of sample continuations: greedy decoding of a small model soon repeats itself."""
GENERATED_TOKENS = 32
CONVERSATION, ANSWERED, ANSWER_TOKENS = "conversation", 2, 64
"""Held-out conversations whose first message is answered, and the most tokens of an answer."""

_SAMPLES_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("id", pa.string()),
        ("numerator", pa.float64()),
        ("denominator", pa.float64()),
        ("tokens", pa.int64()),
        ("picked", pa.int64()),
        ("gold", pa.int64()),
        ("group", pa.string()),
        ("cluster", pa.string()),
    ]
)


# Answers in held-out conversations: their bits fall while a model learns to answer; those of documents tell what it
# forgets.


def score_responses(
    model: LanguageModel, tokenizer: Tokenizer, file: Path, count: int, window: int, device: str, ranks: EvalRanks
) -> tuple[dict[str, Score], list[Sample]]:
    """Return the score of the first `count` conversations of `file` by id, a hash, and a sample of each; {} if empty.

    A sample has the bits of all answers, the ends of turns included, and the UTF-8 bytes of their contents. A long
    conversation loses its beginning, as in `score_requests`.
    """
    rows = _held_out_rows(file)[:count]
    sequences: list[Scorable] = []
    owners: list[int] = []
    for index, row in enumerate(rows):
        for turn, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                tokens_, mask = encode_conversation(tokenizer, row["messages"][: turn + 1])
                end = len(mask) - mask[::-1].index(True)
                start = end - next((n for n, target in enumerate(mask[end - 1 :: -1]) if not target), end)
                sequences.append((tokens_[:end], start))
                owners.append(index)
    bits, sizes, tokens = ([0.0] * len(rows) for _ in range(3))
    for index, likelihood in zip(owners, score_sequences(model, sequences, window, device, ranks=ranks), strict=True):
        bits[index] += likelihood.nll / math.log(2)
        tokens[index] += likelihood.tokens
    for index, row in enumerate(rows):
        answers = (message["content"].strip() for message in row["messages"] if message["role"] == "assistant")
        sizes[index] = float(sum(len(answer.encode("utf-8", "ignore")) for answer in answers))
    if not rows:
        return {}, []
    digest = hashlib.sha256("\n".join(row["id"] for row in rows).encode()).hexdigest()
    score = Score.from_estimate(RESPONSES, ratio(bits, sizes), BITS, "lower", digest, None, sum(sizes))
    columns = zip(rows, bits, sizes, tokens, strict=True)
    return {RESPONSES: score}, [Sample(RESPONSES, row["id"], b, s, int(t), None, None) for row, b, s, t in columns]


def _held_out_rows(file: Path) -> list[dict[str, Any]]:
    """Return the held-out conversations of a file by id, a hash."""
    return sorted(map(json.loads, file.read_text(encoding="utf-8").splitlines()), key=lambda row: row["id"])


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Result of `evaluate_tasks`."""

    scores: dict[str, Score]
    """By key; with `eval/core` if a suite was named."""
    suite: LoadedSuite
    too_long: dict[str, int]
    """Task -> questions that do not fit the window; they are not asked and count as wrong."""


def evaluate(
    recipe: Recipe,
    model: Path,
    tokenizer: Path,
    documents: Path,
    folder: Path,
    *,
    conversations: Path | None = None,
    threads: int = 2,
    device: str = "cpu",
    ranks: EvalRanks | None = None,
) -> dict[str, Any]:
    """Score the model in folder `model` on the curated folder `documents` and write the tables into `folder`.

    Returns {key: value} of every score (keys begin with `eval/`), plus `requests` (digest of all requests and prompts),
    `documents`, `questions`, `document_bytes` (length to which documents are cut), `window` (positions the model sees
    at once: the longest sequence that it was trained on), `skipped` ({task: reason}), `too_long` ({key: questions that
    were not asked and count as wrong}), `unjudged` ({key: questions left out of the score}) and `baselines` (`core 1`:
    table and version behind `eval/core`).
    `conversations` is a file of held-out conversations, whose answers are scored too.
    With `ranks`, several processes call this with the same arguments and share the work; rank 0 writes.
    Raises ValueError if there are no held-out documents, a task is invalid, or model and tokenizer do not match.
    """
    ranks = ranks or EvalRanks()
    with _threads(threads):
        coder = Tokenizer.load(tokenizer)
        if tokenizer_file(model).is_file() and model.resolve() != tokenizer.resolve():
            trained_with = Tokenizer.load(model).digest
            if trained_with != coder.digest:
                raise ValueError(
                    f"model {model} was trained with tokenizer {trained_with[:8]}, {tokenizer} is {coder.digest[:8]}: "
                    "give the tokenizer that the model was trained with"
                )
        coder.conversational |= (model / TEMPLATE_FILE).is_file()
        chosen = read_validation_documents(documents, recipe.evaluate.documents, document_bytes(recipe))
        suite = render_recipe_suite(recipe, chosen)
        network = ranks.load(model, DTYPES[recipe.evaluate.precision], device)
        if network.vocab_size != coder.vocab_size:
            raise ValueError(
                f"model {model} has vocab_size {network.vocab_size}, tokenizer {tokenizer} {coder.vocab_size}: "
                "give the tokenizer that the model was trained with"
            )
        window = network.config.max_seq_len
        results = _run_tasks(network, coder, suite.tasks, window, device, ranks)
        answers: tuple[dict[str, Score], list[Sample]] = {}, []
        if conversations is not None:
            answers = score_responses(network, coder, conversations, recipe.evaluate.questions, window, device, ranks)
        needles = None
        lengths = context_lengths(window)
        if "needle" in suite.suite.built_in and lengths:
            long_documents = read_validation_documents(
                documents, recipe.evaluate.documents, HAYSTACK_BYTES * lengths[-1]
            )
            texts = [document.text for document in long_documents]
            needles = find_needles(network, coder, texts, lengths, recipe.evaluate.needles, device, KINDS, ranks)
        generations = _generations(network, coder, chosen, suite.tasks, conversations, ranks)
    baselines = suite.baselines()
    scores, all_samples = score_table(recipe, suite.tasks, results.samples, baselines)
    for task, gold in zip(suite.tasks, results.gold, strict=True):
        if gold:
            scores[gold_key(task.key)] = gold_score(task, gold)
            all_samples += gold
    scores |= answers[0]
    all_samples += answers[1]
    if needles is not None:
        scores |= needles.scores()
        all_samples += needles.samples()
    if ranks.is_rank0:
        _write_tables(folder, scores, all_samples, suite, results, baselines)
        if results.answers:
            write_answers(results.answers, folder)
        _write_json(generations, folder / GENERATIONS_FILE)
    return {
        **{key: scores[key].value for key in sorted(scores)},
        "requests": requests_digest(chain.from_iterable(task.requests or task.prompts for task in suite.tasks)),
        "documents": len(chosen),
        "questions": sum(task.questions for task in suite.tasks if not TASK_KINDS[task.kind].whole_texts),
        "window": window,
        "document_bytes": document_bytes(recipe),
        "skipped": suite.skipped,
        "too_long": count_too_long(results.answers),
        "unjudged": count_unjudged(results.answers),
        "baselines": suite.baselines_name,
    }


def evaluate_tasks(
    network: Transformer,
    coder: Tokenizer,
    loaded: LoadedSuite,
    folder: Path | None = None,
    *,
    threads: int,
    device: str,
) -> EvaluationResult:
    """Evaluate an fp32 model on `device` on the tasks of `loaded`; write the tables into `folder` if given."""
    with _threads(threads):
        results = _run_tasks(network, coder, loaded.tasks, network.config.max_seq_len, device, EvalRanks())
    baselines = loaded.baselines() if loaded.suite.name else {}
    scores, all_samples = score_table(None, loaded.tasks, results.samples, baselines)
    if folder is not None:
        _write_tables(folder, scores, all_samples, loaded, results, baselines)
        write_answers(results.answers, folder)
    return EvaluationResult(scores, loaded, count_too_long(results.answers))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads until the block ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    use_reproducible_matmul()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass(frozen=True)
class _TaskResults:
    """A model's results on a list of tasks."""

    samples: list[list[Sample]]
    """Of each task."""
    gold: list[list[Sample]]
    """Negative log-likelihoods of the gold answers to each task; empty where the kind has none."""
    answers: list[GeneratedAnswer]


def _run_tasks(
    network: Transformer, coder: Tokenizer, tasks: Sequence[Task], window: int, device: str, ranks: EvalRanks
) -> _TaskResults:
    """Score the requests of all tasks together, then generate answers task by task."""
    requests = [request for task in tasks for request in task.requests]
    kinds = {task.key: TASK_KINDS[task.kind] for task in tasks}
    greedy = frozenset(key for key, kind in kinds.items() if isinstance(kind, ScoredKind) and kind.greedy)
    likelihoods = iter(score_requests(network, coder, requests, window, device, greedy=greedy, ranks=ranks))
    results = _TaskResults([], [], [])
    for task in tasks:
        own = list(islice(likelihoods, len(task.requests)))
        results.gold.append(gold_samples(task, own))
        if isinstance(kinds[task.key], WrittenKind):
            generated = generate_answers(network, coder, task, window, ranks)
            results.answers.extend(generated)
            results.samples.append(answer_samples(task, generated))
        else:
            results.samples.append(samples(task, own))
    return results


def _generations(
    model: Transformer,
    tokenizer: Tokenizer,
    documents: Sequence[ValidationDocument],
    tasks: Sequence[Task],
    conversations: Path | None,
    ranks: EvalRanks,
) -> list[dict[str, str]]:
    """Answer the first held-out conversations, continue the first document of each domain and the first arithmetic
    question; replicas take turns."""
    first = {document.domain: document for document in reversed(documents)}
    given: list[tuple[str, str, str, str | list[int]]] = []
    for row in _held_out_rows(conversations)[:ANSWERED] if conversations is not None else ():
        asked = row["messages"][: 1 + [message["role"] for message in row["messages"]].index("user")]
        given.append((CONVERSATION, row["id"], asked[-1]["content"], encode_chat(tokenizer, asked, True)))
    for domain in sorted(first):
        prompt = first[domain].text[:PROMPT_CHARS]
        given.append((domain, first[domain].id, prompt, prompt))
    requests = [task.requests[0] for task in tasks if task.key == ARITHMETIC]
    given += [(request.task, request.document, request.context, request.context) for request in requests]

    def write() -> list[str]:
        return [_written(model, tokenizer, prompt) for *_, prompt in given[ranks.rank :: ranks.size]]

    texts = chain.from_iterable(zip_longest(*ranks.gather(write)))
    return [
        {"of": source, "id": name, "prompt": shown, "text": text}
        for (source, name, shown, _), text in zip(given, texts, strict=False)
    ]


def _written(model: Transformer, tokenizer: Tokenizer, prompt: str | list[int]) -> str:
    """Return what the model writes after a text, or its likeliest answer in a conversation of these ids."""
    if isinstance(prompt, str):
        return generate(model, tokenizer, prompt, GENERATED_TOKENS, **SAMPLING)
    return "".join(stream(model, tokenizer, prompt, ANSWER_TOKENS, stop_token_ids=(tokenizer.turn_end,)))


def _write_tables(
    folder: Path,
    scores: dict[str, Score],
    all_samples: Sequence[Sample],
    suite: LoadedSuite,
    results: _TaskResults,
    baselines: dict[str, float],
) -> None:
    """Write `scores.parquet`, `samples.parquet` and `tasks.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_scores(scores, folder)
    rows = [dataclasses.asdict(sample) for sample in sorted(all_samples, key=lambda sample: (sample.key, sample.id))]
    pq.write_table(pa.Table.from_pylist(rows, _SAMPLES_SCHEMA), folder / SAMPLES_FILE)
    tasks = [
        {
            "key": task.key,
            "kind": task.kind,
            "version": task.version,
            "shots": task.shots,
            "n": len(task_samples),
            "chance": task.chance,
            "baseline": baselines.get(task.key),
            "average": task.average,
            "digest": task.digest,
            "sources": suite.sources.get(task.key, {}),
        }
        for task, task_samples in zip(suite.tasks, results.samples, strict=True)
    ]
    content = {"suite": suite.suite.name, "baselines": suite.baselines_name, "tasks": tasks, "skipped": suite.skipped}
    _write_json(content, folder / TASKS_FILE)


def _write_json(content: object, path: Path) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
