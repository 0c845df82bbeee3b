"""Many prompts at once: each answer is what it would be alone, and what computing everything anew would give."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from herd.llama3.evaluate import generate as engine
from herd.llama3.evaluate.generate import IncrementalDecoder, generate, generate_batch
from herd.llama3.evaluate.generation_settings import GenerationSettings
from herd.llama3.evaluate.task import Prompt
from herd.llama3.model.transformer import Transformer, build_model
from herd.llama3.parallel import memory
from herd.llama3.recipe.sections import Model, RopeScaling
from herd.llama3.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer([bytes([value]) for value in range(256)])
SPECS = {
    "grouped": Model(layers=2, dim=32, ffn=48, heads=4, kv_heads=2, max_seq_len=96),
    "each its own": Model(layers=2, dim=32, ffn=48, heads=4, kv_heads=4, max_seq_len=96),
    "one for all, tied": Model(layers=2, dim=32, ffn=48, heads=4, kv_heads=1, max_seq_len=96, tied_embeddings=True),
    "scaled": Model(
        layers=2,
        dim=32,
        ffn=48,
        heads=4,
        kv_heads=2,
        max_seq_len=96,
        rope_theta=50.0,
        rope_scaling=RopeScaling(original=16),
    ),
}
SHOTS = "2+2=4\n3+5=8\n"
CONTEXTS = [f"{SHOTS}{text}" for text in ("1+1=", "12+30=", "7", "what is 9+9? ", "1+1")] + ["", "x" * 40]
PROMPTS = [Prompt("eval/sums", str(number), context, ()) for number, context in enumerate(CONTEXTS)]


def made(config: Model) -> Transformer:
    """Return a model whose likeliest token is far from a tie."""
    model = build_model(config, TOKENIZER.vocab_size, 5, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12.0 if parameter.ndim > 1 else 1.0)
    return model.eval()


def recomputed(model: Transformer, tokens: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
    """Return `count` greedy tokens after `tokens`, reading the whole text for each, and the logits of each step."""
    given, logits = len(tokens), []
    for _ in range(count):
        with torch.inference_mode():
            logits.append(model(torch.tensor([tokens]), None)[0, -1])
        tokens = [*tokens, max([*range(256), TOKENIZER.end], key=logits[-1].tolist().__getitem__)]
        if tokens[-1] == TOKENIZER.end:
            break
    return tokens[given:], logits


@pytest.mark.slow
@pytest.mark.parametrize("config", SPECS.values(), ids=SPECS)
def test_greedy_answers_are_those_of_recomputation(config: Model) -> None:
    model = made(config)
    answers = generate_batch(model, TOKENIZER, PROMPTS, GenerationSettings(max_tokens=40), 0)
    for prompt, (text,) in zip(PROMPTS, answers, strict=True):
        tokens, _ = recomputed(model, [TOKENIZER.begin, *TOKENIZER.encode(prompt.context)], 40)
        assert text == TOKENIZER.decode(tokens), prompt.context


@pytest.mark.parametrize("config", SPECS.values(), ids=SPECS)
@torch.inference_mode()
def test_logits_of_every_step_are_those_of_recomputation(config: Model) -> None:
    model = made(config)
    reader = IncrementalDecoder(model, 96)
    for context in CONTEXTS:
        tokens = [TOKENIZER.begin, *TOKENIZER.encode(context)]
        following, due = recomputed(model, tokens, 30)
        for token, logits_V in zip(following, due, strict=True):
            found_V = reader.read(tokens)[0]
            assert (found_V - logits_V).abs().max() <= 1e-5 * logits_V.abs().max()
            tokens.append(token)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the list that will have the batch and tokens of each call of a model."""
    shapes: list[tuple[int, int]] = []
    embed = Transformer._embed

    def counted(self: Transformer, tokens_BS: torch.Tensor) -> torch.Tensor:
        batch, tokens = tokens_BS.shape
        shapes.append((batch, tokens))
        return embed(self, tokens_BS)

    monkeypatch.setattr(Transformer, "_embed", counted)
    return shapes


def test_what_texts_have_in_common_is_read_once(read: list[tuple[int, int]]) -> None:
    generate_batch(made(SPECS["grouped"]), TOKENIZER, PROMPTS[:3], GenerationSettings(max_tokens=2), 0)
    lengths = sorted((1 + len(context) for context in CONTEXTS[:3]), reverse=True)
    shared = 1 + len(SHOTS)
    assert read[0] == (1, lengths[0])
    assert sum(tokens for _, tokens in read[1:3]) <= lengths[1] + lengths[2] - 2 * shared + 1
    assert read[3:] == [(3, 1)]


def test_samples_of_a_prompt_share_its_reading(read: list[tuple[int, int]]) -> None:
    generate_batch(
        made(SPECS["grouped"]), TOKENIZER, PROMPTS[:1], GenerationSettings(max_tokens=2, temperature=1.0, samples=5), 0
    )
    assert read == [(1, 1 + len(CONTEXTS[0])), (5, 1)]


def test_sampled_answers_do_not_depend_on_the_batch() -> None:
    model, writing = made(SPECS["grouped"]), GenerationSettings(max_tokens=20, temperature=1.5, top_p=0.95, samples=3)
    together = generate_batch(model, TOKENIZER, PROMPTS, writing, 7)
    assert [len(set(texts)) for texts in together] == [3] * len(PROMPTS)
    assert together == [generate_batch(model, TOKENIZER, [prompt], writing, 7)[0] for prompt in PROMPTS]
    assert generate_batch(model, TOKENIZER, PROMPTS[::-1], writing, 7) == together[::-1]
    assert [texts[:1] for texts in together] == generate_batch(
        model, TOKENIZER, PROMPTS, replace(writing, samples=1), 7
    )
    assert together != generate_batch(model, TOKENIZER, PROMPTS, writing, 8)


def test_answers_end_at_stop_texts_and_leave_the_batch(read: list[tuple[int, int]]) -> None:
    model = made(SPECS["grouped"])
    whole = [text for (text,) in generate_batch(model, TOKENIZER, PROMPTS, GenerationSettings(max_tokens=40), 0)]
    stops = (whole[0][2:4], whole[3][10:12], whole[6][5])
    read.clear()
    answers = generate_batch(model, TOKENIZER, PROMPTS, GenerationSettings(max_tokens=40, until=stops), 0)
    assert [text for (text,) in answers] == [before(text, stops) for text in whole]
    rows = [batch for batch, _ in read[len(PROMPTS) :]]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] == len(PROMPTS) > rows[-1]


def before(text: str, stops: tuple[str, ...]) -> str:
    """Return what stands before the first of `stops` to be complete."""
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


def test_one_answer_is_what_generate_writes() -> None:
    model = made(SPECS["scaled"])
    assert generate_batch(model, TOKENIZER, PROMPTS[:1], GenerationSettings(max_tokens=30), 0) == [
        (generate(model, TOKENIZER, PROMPTS[0].context, 30),)
    ]


def test_small_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, writing = made(SPECS["grouped"]), GenerationSettings(max_tokens=12, temperature=1.0, samples=2)
    whole = generate_batch(model, TOKENIZER, PROMPTS, writing, 0)
    monkeypatch.setitem(memory.DECODED, "cpu", 3)
    assert generate_batch(model, TOKENIZER, PROMPTS, writing, 0) == whole
    monkeypatch.setitem(memory.CACHED, "cpu", 1)
    assert generate_batch(model, TOKENIZER, PROMPTS, writing, 0) == whole


def test_batches_keep_to_both_limits_and_take_everything() -> None:
    dice = Random(1)
    read = [[0] * dice.randint(1, 50) for _ in range(40)]
    batches = list(engine._batches(read, GenerationSettings(max_tokens=10, samples=2), 12, 300))
    assert sorted(index for batch in batches for index in batch) == list(range(40))
    for batch in batches:
        answers = 2 * len(batch)
        assert len(batch) == 1 or (answers <= 12 and answers * (10 + max(len(read[i]) for i in batch)) <= 300)
    assert max(map(len, batches)) == 6
    lengths = [len(read[index]) for batch in batches for index in batch]
    assert lengths == sorted(lengths, reverse=True)


def test_no_prompts_no_answers() -> None:
    assert generate_batch(made(SPECS["grouped"]), TOKENIZER, [], GenerationSettings(), 0) == []


def test_a_prompt_without_room_is_named() -> None:
    long = Prompt("eval/sums", "q7", "x" * 60, ())
    with pytest.raises(
        ValueError, match=r"eval/sums: prompt q7 of 61 tokens and writing.max_tokens 36 .* 96 positions"
    ):
        generate_batch(made(SPECS["grouped"]), TOKENIZER, [*PROMPTS[:2], long], GenerationSettings(max_tokens=36), 0)
    assert generate_batch(made(SPECS["grouped"]), TOKENIZER, [long], GenerationSettings(max_tokens=35), 0)


def test_settings_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match=r"writing.samples 2 at temperature 0"):
        generate_batch(made(SPECS["grouped"]), TOKENIZER, PROMPTS, GenerationSettings(samples=2), 0)
