"""One text: greedy, sampled, stopped, and longer than the model's window."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from herd.llama3.evaluate.generate import generate, stream
from herd.llama3.model.transformer import Transformer, build_model
from herd.llama3.recipe.sections import Model
from herd.llama3.tokens.tokenizer import Tokenizer

SPEC = Model(layers=1, dim=16, ffn=32, heads=2, kv_heads=1, max_seq_len=12, tied_embeddings=False)
TOKENIZER = Tokenizer([bytes([value]) for value in range(256)])


@pytest.fixture
def model() -> Transformer:
    made = build_model(SPEC, TOKENIZER.vocab_size, 5, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.0)
    return made.eval()


def favour(model: Transformer, token: int, amount: float = 1e4) -> None:
    """Make `token` by far the likeliest, whatever stands before: its output row follows the constant first feature."""
    assert model.output is not None
    with torch.no_grad():
        model.embedding.weight[:, 0] = 100.0
        model.output.weight[token, 0] += amount


def recomputed(model: Transformer, tokens: list[int]) -> int:
    """Return the likeliest next token that may be written, from the whole text."""
    with torch.inference_mode():
        logits_V = model(torch.tensor([tokens]), None)[0, -1]
    return max([*range(256), TOKENIZER.end], key=lambda token: float(logits_V[token]))


def test_greedy_takes_the_likeliest_byte_each_time(model: Transformer) -> None:
    text = generate(model, TOKENIZER, "ab", 5)
    tokens = [TOKENIZER.begin, *TOKENIZER.encode("ab")]
    for _ in range(5):
        tokens.append(recomputed(model, tokens))
    assert TOKENIZER.end not in tokens
    assert text == bytes(tokens[3:]).decode(errors="replace")


def test_sampling_is_fixed_by_the_seed(model: Transformer) -> None:
    texts = [generate(model, TOKENIZER, "ab", 9, 1.0, 0.95, seed) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_a_tiny_nucleus_is_greedy(model: Transformer) -> None:
    assert generate(model, TOKENIZER, "ab", 8, 1.0, 1e-6) == generate(model, TOKENIZER, "ab", 8)


def test_the_nucleus_bounds_what_is_drawn() -> None:
    """Logits of 60 %, 30 % and 10 % and top_p 0.7 leave the first two, at 2 to 1."""
    model = build_model(SPEC, TOKENIZER.vocab_size, 0, torch.float32, torch.device("cpu"))
    assert model.output is not None
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.embedding.weight[:, 0] = 1.0
        for parameter in model.layers.parameters():
            parameter.zero_()
        model.output.weight.fill_(0.0)
        model.output.weight[:, 0] = -1e3
        scale = float(model.norm(model.embedding.weight[:1])[0, 0].detach())
        for token, share in zip(b"abc", (0.6, 0.3, 0.1), strict=True):
            model.output.weight[token, 0] = torch.tensor(share).log() / scale
    text = "".join(generate(model, TOKENIZER, "", 1, 1.0, 0.7, seed) for seed in range(300))
    assert set(text) == {"a", "b"}
    assert 0.58 <= text.count("a") / 300 <= 0.75


def test_generation_stops_at_the_end_token(model: Transformer) -> None:
    favour(model, TOKENIZER.end)
    assert generate(model, TOKENIZER, "ab", 50) == ""


def test_other_special_tokens_are_never_written(model: Transformer) -> None:
    favour(model, TOKENIZER.begin)
    favour(model, TOKENIZER.vocab_size - 1)
    favour(model, ord("x"), 1e3)
    for temperature in (0.0, 1.0):
        assert generate(model, TOKENIZER, "ab", 5, temperature) == "xxxxx"


def test_text_outgrows_the_longest_sequence(model: Transformer) -> None:
    favour(model, ord("x"))
    assert generate(model, TOKENIZER, "a" * 30, 20) == "x" * 20


def test_a_text_that_outgrew_goes_on_from_the_last_half_of_what_fits(model: Transformer) -> None:
    tokens = [TOKENIZER.begin, *TOKENIZER.encode("abcdefgh")]
    text = generate(model, TOKENIZER, "abcdefgh", 30)
    context = list(tokens)
    for _ in range(30):
        if len(context) > SPEC.max_seq_len:
            context = context[-SPEC.max_seq_len // 2 :]
        context.append(recomputed(model, context))
        tokens.append(context[-1])
    assert text == bytes(tokens[9:]).decode(errors="replace")


def test_a_stream_is_the_text_in_pieces(model: Transformer) -> None:
    pieces = list(stream(model, TOKENIZER, "ab", 9, 1.0, 0.95, 3))
    assert len(pieces) == 9
    assert "".join(pieces) == generate(model, TOKENIZER, "ab", 9, 1.0, 0.95, 3)


def test_streams_of_one_model_do_not_meet(model: Transformer) -> None:
    """They take turns, and the model is asked in between."""
    alone = [list(stream(model, TOKENIZER, prompt, 6)) for prompt in ("ab", "xyz")]
    first, second = (stream(model, TOKENIZER, prompt, 6) for prompt in ("ab", "xyz"))
    turns = [(next(first), next(second), recomputed(model, [1, 2, 3])) for _ in range(6)]
    assert [piece for piece, _, _ in turns] == alone[0]
    assert [piece for _, piece, _ in turns] == alone[1]
    assert len({token for _, _, token in turns}) == 1


def test_a_stop_text_ends_the_text_before_it(model: Transformer) -> None:
    text = generate(model, TOKENIZER, "ab", 9)
    stop = text[3:5]
    assert "".join(stream(model, TOKENIZER, "ab", 9, until=[stop, "never"])) == text[: text.index(stop)]


def test_a_penalty_counts_the_prompt_and_what_was_cut_off(model: Transformer) -> None:
    """The favorite comes once; a byte of the prompt never, though the window has left it behind."""
    favour(model, ord("x"), 5e3)
    favour(model, ord("a"), 6e3)
    text = generate(model, TOKENIZER, "a" * 30, 40, repetition_penalty=1e6)
    assert text.count("x") == 1
    assert "a" not in text
    assert generate(model, TOKENIZER, "a" * 30, 40) == "a" * 40


def test_one_of_one_is_greedy(model: Transformer) -> None:
    assert generate(model, TOKENIZER, "ab", 8, 1.5, top_k=1) == generate(model, TOKENIZER, "ab", 8)


def test_the_tokenizer_of_another_model_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match="vocab_size 512, the tokenizer 513"):
        stream(model, Tokenizer([*TOKENIZER.base, b"ab"]), "a", 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": -1}, "max_tokens -1 must be 0 or more"),
        ({"until": [""]}, "stop has an empty text"),
        ({"temperature": -0.1}, "temperature -0.1 must be 0 or more"),
        ({"top_k": -1}, "top_k -1 must be 0 or more"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0 must be above 0"),
        ({"top_p": 0.0}, r"top_p 0.0 must be in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p 1.1 must be in \(0, 1\]"),
    ],
)
def test_settings_without_meaning_are_refused_at_once(
    model: Transformer, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stream(model, TOKENIZER, "a", **{"max_tokens": 1, **settings})
