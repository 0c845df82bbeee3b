"""Keys and values that are kept: every way of reading a text in parts gives what reading it whole gives."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.model.kv_cache import BatchCache, Cache, PaddedCache, with_cache
from herd.llama3.model.transformer import Transformer, build_model
from herd.llama3.recipe.sections import Model, RopeScaling

VOCAB_SIZE = 40
CONFIG = Model(
    layers=2,
    dim=32,
    ffn=48,
    heads=4,
    kv_heads=2,
    max_seq_len=64,
    rope_theta=50.0,
    rope_scaling=RopeScaling(original=16),
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    made = build_model(CONFIG, VOCAB_SIZE, 3, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(12.0 if parameter.ndim > 1 else 1.0)
    return made.eval()


def some(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, due: torch.Tensor) -> bool:
    return bool((found - due).abs().max() <= 1e-5 * due.abs().max())


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
@torch.inference_mode()
def test_a_text_in_parts_is_the_text(model: Transformer, sizes: list[int]) -> None:
    tokens_1S, cache = some(sum(sizes)), Cache(sum(sizes))
    twin = with_cache(model, cache)
    parts = [twin(part, cache.visible(part.shape[1], part.device)) for part in tokens_1S.split(sizes, 1)]
    assert close(torch.cat(parts, 1), model(tokens_1S))


@torch.inference_mode()
def test_a_text_is_cut_and_continued(model: Transformer) -> None:
    cache = Cache(20)
    twin, begin, other = with_cache(model, cache), some(12), some(8, seed=1)
    twin(begin)
    cache.cut(7)
    found = twin(other, cache.visible(8, other.device))
    assert close(found, model(torch.cat([begin[:, :7], other], 1))[:, 7:])


@torch.inference_mode()
def test_sequences_of_different_lengths_go_on_together(model: Transformer) -> None:
    texts = [some(length, length) for length in (3, 9, 6)]
    together = PaddedCache(15, 4, 9)
    for row, text in enumerate(texts):
        cache = Cache(9)
        with_cache(model, cache)(text)
        together.put(slice(row, row + 1 + (row == 2)), cache)
    texts.append(texts[-1])
    twin = with_cache(model, together)
    for step in range(6):
        if step == 3:
            together.keep(torch.tensor([3, 0]))
            texts = [texts[3], texts[0]]
        new = torch.cat([some(1, 100 * step + row) for row in range(len(texts))])
        texts = [torch.cat([text, one.unsqueeze(0)], 1) for text, one in zip(texts, new, strict=True)]
        logits_B1V = twin(new, together.visible(1, new.device))
        for row, text in enumerate(texts):
            assert close(logits_B1V[row, 0], model(text)[0, -1])


@given(st.lists(st.one_of(st.integers(1, 12), st.just(0), st.integers(-9, -1)), min_size=1, max_size=30))
@torch.inference_mode()
def test_sequences_join_and_leave_between_tokens(model: Transformer, events: list[int]) -> None:
    """Above 0: a text of that length joins; below: one leaves; 0: a token for each, compared with the whole texts."""
    together, texts = BatchCache(), list[torch.Tensor]()
    twin = with_cache(model, together)
    for number, event in enumerate([*events, 0]):
        if event > 0:
            texts.append(some(event, number))
            cache = Cache(event + 40)  # larger than the batch's
            with_cache(model, cache)(texts[-1])
            together.join(cache, event + len(events) + 1, 4)
        elif event < 0 and texts:
            row = event % len(texts)
            together.leave(row)
            texts[row] = texts[-1]
            texts.pop()
        elif texts:
            new = torch.cat([some(1, 100 * number + row) for row in range(len(texts))])
            texts = [torch.cat([text, one.unsqueeze(0)], 1) for text, one in zip(texts, new, strict=True)]
            logits_B1V = twin(new, together.visible(1, new.device))
            for row, text in enumerate(texts):
                assert close(logits_B1V[row, 0], model(text)[0, -1])
        assert len(together) == len(texts)
        assert together.length == max((text.shape[1] for text in texts), default=0)


def test_a_full_cache_says_so(model: Transformer) -> None:
    cache = Cache(5)
    twin = with_cache(model, cache)
    twin(some(4))
    with pytest.raises(ValueError, match="room for 5 tokens cannot hold 6"):
        twin(some(2))


def test_padded_sequences_take_one_token_at_a_time() -> None:
    with pytest.raises(ValueError, match="2 tokens at once cannot follow"):
        PaddedCache(8, 2, 3).visible(2, torch.device("cpu"))
    with pytest.raises(ValueError, match="2 tokens at once cannot follow"):
        BatchCache().visible(2, torch.device("cpu"))


def test_the_model_that_is_read_with_shares_weights_and_leaves_the_other_alone(model: Transformer) -> None:
    cache = Cache(8)
    twin = with_cache(model, cache)
    assert [a is b for a, b in zip(twin.parameters(), model.parameters(), strict=True)] == [True] * len(
        list(model.parameters())
    )
    before = model(some(4))
    twin(some(4))
    assert cache.length == 4
    assert torch.equal(model(some(4)), before)
    assert twin.state_dict().keys() == model.state_dict().keys()


@torch.inference_mode()
def test_compiled_layers_are_read_with_as_they_are(model: Transformer) -> None:
    """A compiled layer calls the module that it was compiled for, which knows nothing of the cache."""
    tokens, compiled, cache = some(6), deepcopy(model), Cache(6)
    for layer in compiled.layers.values():
        layer.compile(backend="eager")
    twin = with_cache(compiled, cache)
    twin(tokens[:, :5])
    assert close(twin(tokens[:, 5:], cache.visible(1, tokens.device)), model(tokens)[:, 5:])
