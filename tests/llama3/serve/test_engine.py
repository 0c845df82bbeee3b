"""Texts that come and go while others are decoded: each is what it would be alone, and none waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from queue import Queue
from random import Random
from typing import Any

import pytest
import torch

from herd.llama3.evaluate import generate as writing
from herd.llama3.evaluate.generate import GeneratedText, IncrementalDecoder, ModelRunner, Sampler, TextStream, generate
from herd.llama3.evaluate.scoring import score_sequences
from herd.llama3.model.transformer import Transformer
from herd.llama3.recipe.sections import Model
from herd.llama3.serve import engine as engines
from herd.llama3.serve.engine import BatchEngine, Generation, QueueFull
from herd.llama3.tokens.tokenizer import Tokenizer
from tests.llama3.evaluate.test_generate_batch import SPECS, TOKENIZER, made

LONG = Model(layers=1, dim=16, ffn=16, heads=2, kv_heads=1, max_seq_len=100_000)
WAIT_S = 60


class Text:
    """A text that is decoded, and what was delivered of it."""

    def __init__(
        self, prompt: str, tokens: int, temperature: float = 0.0, seed: int = 0, stop: tuple[str, ...] = (), **more: Any
    ) -> None:
        self.delivered: Queue[tuple[str, str]] = Queue()
        self.options = (prompt, tokens, temperature, 0.95, seed, stop)
        sampler = Sampler.for_tokenizer(TOKENIZER, temperature, 0.95)
        ids = [TOKENIZER.begin, *TOKENIZER.encode(prompt)]
        text = GeneratedText(TOKENIZER, ids, tokens, Random(str(seed)), TextStream(stop))
        self.generation = Generation(text, sampler, lambda *piece: self.delivered.put(piece), **more)

    def wait(self) -> tuple[str, str]:
        """Return the whole text and its finish reason."""
        whole, reason = "", ""
        while not reason:
            piece, reason = self.delivered.get(timeout=WAIT_S)
            whole += piece
        return whole, reason


NewEngine = Callable[..., BatchEngine]


@pytest.fixture
def start() -> Iterator[NewEngine]:
    """Starts engines, which end with the test."""
    started: list[BatchEngine] = []

    def start(model: Transformer, **options: Any) -> BatchEngine:
        started.append(BatchEngine(model, TOKENIZER, **options))
        return started[-1]

    yield start
    for engine in started:
        engine.stop()
        assert not engine.alive


def await_idle(engine: BatchEngine, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while engine.running or engine.waiting:
        assert time.monotonic() < deadline, f"{engine.running} are decoded, {engine.waiting} wait"
        time.sleep(0.01)


def test_a_text_does_not_depend_on_those_beside_it(start: NewEngine) -> None:
    """At all temperatures, with stop texts, more texts than rows, and joins at any moment."""
    model, dice = made(SPECS["scaled"]), Random(1)
    engine, texts = start(model, max_batch=4, queue=1000), []
    for number in range(25):
        prompt = "".join(dice.choice("abc 123") for _ in range(dice.randint(0, 40)))
        stop = (dice.choice("abc"),) if number % 4 == 0 else ()
        texts.append(Text(prompt, dice.randint(1, 50), dice.choice([0.0, 1.0, 1.5]), number, stop))
        engine.submit([texts[-1].generation])
        time.sleep(dice.random() * 0.004)
    reasons = set()
    for text in texts:
        whole, reason = text.wait()
        reasons.add(reason)
        assert whole == generate(model, TOKENIZER, *text.options)
        assert (len(text.generation.text.written) == text.options[1]) or reason == "stop"
    assert reasons == {"stop", "length"}
    await_idle(engine)


def test_a_canceled_text_leaves_batch_and_queue(start: NewEngine) -> None:
    engine = start(made(LONG), max_batch=1, queue=1)
    running, waiting = Text("a", 90_000), Text("b", 90_000)
    engine.submit([running.generation])
    running.delivered.get(timeout=WAIT_S)
    engine.submit([waiting.generation])
    with pytest.raises(QueueFull, match="1 texts are decoded and 1 wait"):
        engine.submit([Text("c", 1).generation])
    engine.cancel(waiting.generation)
    assert engine.waiting == 0
    engine.cancel(running.generation)
    await_idle(engine)
    after = Text("c", 3)
    engine.submit([after.generation])
    assert after.wait()[1]
    assert waiting.delivered.empty()


def test_a_long_prompt_is_read_between_the_tokens_of_others(start: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PREFILL_TOKENS", 100)
    model = made(LONG)
    engine = start(model, max_batch=2, queue=2)
    running, long = Text("a", 90_000), Text("ab" * 1000, 4)
    engine.submit([running.generation])
    running.delivered.get(timeout=WAIT_S)
    tokens, read = list[int](), IncrementalDecoder.read

    def counted(self: IncrementalDecoder, chunk: list[int]) -> torch.Tensor:
        tokens.append(len(running.generation.text.tokens))
        return read(self, chunk)

    monkeypatch.setattr(IncrementalDecoder, "read", counted)
    engine.submit([long.generation])
    whole, _ = long.wait()
    assert [later - earlier for earlier, later in pairwise(tokens)] == [1] * 20
    engine.cancel(running.generation)
    assert whole == generate(model, TOKENIZER, *long.options)


def test_a_prompt_is_read_once_and_whole_if_another_begins_differently(
    start: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, embed = list[int](), Transformer._embed

    def counted(self: Transformer, tokens_BS: torch.Tensor) -> torch.Tensor:
        read.append(tokens_BS.shape[1])
        return embed(self, tokens_BS)

    monkeypatch.setattr(Transformer, "_embed", counted)
    engine = start(made(SPECS["grouped"]))
    for prompt in ("abc" * 9, "abc" * 9, "abc" * 9 + "d", "x" * 9):
        text = Text(prompt, 1)
        engine.submit([text.generation])
        text.wait()
    assert read == [28, 1, 1, 10]


@torch.inference_mode()
def check_likelihoods(model: Transformer, generation: Generation) -> None:
    """Compare with one forward pass over the whole text, and the sum with the evaluator's."""
    tokens, top = generation.text.tokens, generation.top
    begin = 1 if generation.echo else len(tokens) - len(generation.text.written)
    assert [each.token for each in generation.likelihoods] == tokens[begin:]
    logprobs_SV = model(torch.tensor([tokens])).double().log_softmax(-1)[0]
    for place, each in enumerate(generation.likelihoods, begin):
        logprobs_V = logprobs_SV[place - 1]
        assert each.logprob == pytest.approx(float(logprobs_V[each.token]), abs=1e-5)
        best = logprobs_V.topk(min(top or 0, model.vocab_size))
        assert [value for _, value in each.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert [float(logprobs_V[token]) for token, _ in each.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert dict(each.top).get(each.token, each.logprob) == each.logprob, "one number for one token"
    (scored,) = score_sequences(model, [(tokens, begin)], model.config.max_seq_len)
    assert -sum(each.logprob for each in generation.likelihoods) == pytest.approx(scored.nll, abs=1e-5)


def test_likelihoods_do_not_depend_on_other_texts(start: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts that begin alike or not, in chunks or whole, with and without a text after them."""
    monkeypatch.setattr(engines, "PREFILL_TOKENS", 7)
    monkeypatch.setattr(writing, "LOGITS", 3 * 512)
    model, dice, texts = made(SPECS["scaled"]), Random(2), []
    engine = start(model, max_batch=4, queue=1000)
    beginnings = ["".join(dice.choice("abc 123") for _ in range(30)) for _ in range(2)]
    for number in range(40):
        prompt = dice.choice(beginnings)[: dice.randint(0, 30)] + "".join(dice.choice("ab") for _ in range(number % 4))
        more: dict[str, Any] = {"top": dice.choice([0, 1, 1, 5, 9999]), "echo": number % 5 != 0}
        if number % 7 == 0:
            more = {}
        texts.append(Text(prompt, dice.choice([0, 0, 1, 12]), dice.choice([0.0, 1.5]), number, **more))
        engine.submit([texts[-1].generation])
        time.sleep(dice.random() * 0.004)
    for text in texts:
        whole, reason = text.wait()
        assert whole == generate(model, TOKENIZER, *text.options)
        assert reason in ("stop", "length")
        if text.generation.top is None:
            assert text.generation.likelihoods == []
        else:
            check_likelihoods(model, text.generation)
    await_idle(engine)


def test_the_choices_of_a_question_read_it_once(start: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    read, embed = list[int](), Transformer._embed

    def counted(self: Transformer, tokens_BS: torch.Tensor) -> torch.Tensor:
        read.append(tokens_BS.shape[1])
        return embed(self, tokens_BS)

    monkeypatch.setattr(Transformer, "_embed", counted)
    model = made(SPECS["grouped"])
    engine = start(model)
    texts = [Text("abc" * 9 + choice, new, top=1, echo=True) for choice, new in (("xy", 0), ("xz", 1), ("xz", 0))]
    for text in texts:
        engine.submit([text.generation])
        text.wait()
    assert read == [29, 1, 1]  # the last token of a prompt is not read to score it
    monkeypatch.undo()
    for text in texts:
        check_likelihoods(model, text.generation)


def test_a_crowd_of_prompts_is_taken_while_nothing_waits(start: NewEngine) -> None:
    model = made(SPECS["grouped"])
    engine = start(model, max_batch=2, queue=3)
    crowd = [Text(f"{number}", 0, top=1, echo=True) for number in range(200)]
    engine.submit([text.generation for text in crowd])
    if engine.waiting:
        with pytest.raises(QueueFull):
            engine.submit([Text("a", 1).generation for _ in range(9)])
    for text in crowd:
        assert text.wait() == ("", "length")
        check_likelihoods(model, text.generation)


def test_others_pass_the_remainder_of_a_crowd(start: NewEngine) -> None:
    engine, ended = start(made(SPECS["grouped"]), max_batch=1, queue=2), list[str]()
    crowd = [Text("ab", 40) for _ in range(60)]
    for number, text in enumerate(crowd):
        text.generation.deliver = lambda _, reason, number=number: ended.append(f"crowd {number}") if reason else None
    engine.submit([text.generation for text in crowd])
    with pytest.raises(QueueFull, match="texts are decoded and"):
        engine.submit([Text("c", 1).generation for _ in range(4)])
    single = Text("xy", 1)
    single.generation.deliver = lambda _, reason: ended.append("single") if reason else None
    engine.submit([single.generation])
    engine.cancel(crowd[-1].generation)
    await_idle(engine, 60)
    assert len(ended) == 60
    assert ended.index("single") < 30
    assert "crowd 59" not in ended


def test_memory_bounds_the_batch(start: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for 100 positions: three texts of 30 go together, one of 200 alone."""
    monkeypatch.setattr(writing, "cached_positions", lambda model: 100)
    model, most, allocated = made(LONG), [], []
    engine = start(model, max_batch=8, queue=100)
    decode = engine._decode

    def counted() -> None:
        most.append(len(engine._active))
        for store, _ in engine.runner.batch._stores[:1]:
            allocated.append(store.shape[0] * store.shape[2])
        decode()

    monkeypatch.setattr(engine, "_decode", counted)
    texts = [Text("a" * n, 29 - n) for n in (9, 8, 7, 6)] + [Text("a", 198), Text("a" * 3, 20)]
    engine.submit([text.generation for text in texts])
    for text in texts:
        assert text.wait()[0] == generate(model, TOKENIZER, *text.options)
    assert max(most) == 3
    assert sorted(set(allocated))[-1] == 200
    assert sorted(set(allocated))[-2] <= 100


def test_an_error_ends_the_texts_in_the_batch_and_nothing_else(
    start: NewEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, step = start(made(SPECS["grouped"]), max_batch=2, queue=9), ModelRunner.decode
    texts = [Text("a" * number, 20) for number in range(4)]
    calls = iter(range(1000))

    def broken(*words: Any) -> None:
        if next(calls) == 5:
            raise RuntimeError("out of memory")
        step(*words)

    monkeypatch.setattr(ModelRunner, "decode", broken)
    engine.submit([text.generation for text in texts])
    assert [text.wait()[1] for text in texts] == ["error", "error", "length", "length"]
    assert "out of memory" in caplog.text
    assert engine.alive


def test_a_prompt_that_cannot_be_read_ends_alone(
    start: NewEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, texts = start(made(SPECS["grouped"]), max_batch=1, queue=9), [Text("a", 2), Text("b", 2), Text("c", 2)]
    read = IncrementalDecoder.read

    def broken(self: IncrementalDecoder, tokens: list[int]) -> torch.Tensor:
        if tokens[-1] == ord("b"):
            raise RuntimeError("out of memory")
        return read(self, tokens)

    monkeypatch.setattr(IncrementalDecoder, "read", broken)
    engine.submit([text.generation for text in texts])
    assert [text.wait()[1] for text in texts] == ["length", "error", "length"]


def test_what_is_unfinished_at_the_end_is_told(start: NewEngine) -> None:
    engine = start(made(LONG), max_batch=1, queue=1)
    texts = [Text("a", 90_000), Text("b", 90_000)]
    engine.submit([text.generation for text in texts])
    texts[0].delivered.get(timeout=WAIT_S)
    engine.stop()
    assert [text.wait()[1] for text in texts] == ["error", "error"]
    with pytest.raises(QueueFull):
        engine.submit([Text("c", 1).generation])


def test_wrong_numbers_are_refused(start: NewEngine) -> None:
    model = made(SPECS["grouped"])
    for options, message in (({"max_batch": 0}, "max_batch 0 must be 1"), ({"queue": -1}, "queue -1 must be 0")):
        with pytest.raises(ValueError, match=message):
            BatchEngine(model, TOKENIZER, **options)
    with pytest.raises(ValueError, match="the tokenizer 513"):
        BatchEngine(model, Tokenizer([*TOKENIZER.base, b"ab"]))
    engine = start(model)
    for text in (Text("a", -1), Text("a" * 90, 6)):
        with pytest.raises(ValueError, match="at most the model's 96 positions"):
            engine.submit([Text("a", 1).generation, text.generation])
    assert engine.running + engine.waiting == 0
    fits = Text("a" * 89, 6)
    engine.submit([fits.generation])
    assert fits.wait()[1] == "length"
