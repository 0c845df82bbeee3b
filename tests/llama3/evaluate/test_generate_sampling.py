"""The choice of a token: shares, nucleus, and broken logits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.evaluate.generate import Sampler
from herd.llama3.tokens.chat import special_id
from herd.llama3.tokens.chat_template import TEMPLATE
from herd.llama3.tokens.tokenizer import TEMPLATE_FILE, Tokenizer

END = 6
SHARES = torch.tensor([0.05, 0.5, 0.0, 0.3, 0.1, 0.0, 0.05, 0.0])
"""Of 4 tokens of text and 4 special ones, of which the third is the end."""


def counts(temperature: float, top_p: float, logits_V: torch.Tensor, base: int = 5, draws: int = 4000) -> Counter[int]:
    dice = [Random(str(number)) for number in range(draws)]
    return Counter(Sampler(base, END, temperature, top_p).pick(logits_V.expand(draws, -1), dice))


def test_tokens_come_by_their_shares() -> None:
    found = counts(1.0, 1.0, SHARES.log())
    assert set(found) == {0, 1, 3, 4, 6}
    for token, share in enumerate(SHARES.tolist()):
        assert abs(found[token] / 4000 - share) < 0.03


def test_temperature_sharpens() -> None:
    found = counts(0.5, 1.0, SHARES.log())
    assert abs(found[1] / 4000 - 0.25 / (SHARES**2).sum().item()) < 0.03


@pytest.mark.parametrize(("top_p", "nucleus"), [(0.5, {1}), (0.51, {1, 3}), (0.8, {1, 3}), (0.85, {1, 3, 4})])
def test_the_nucleus_is_the_smallest_set_that_holds_top_p(top_p: float, nucleus: set[int]) -> None:
    assert set(counts(1.0, top_p, SHARES.double().log())) == nucleus


def test_special_tokens_but_the_end_are_never_chosen() -> None:
    logits_V = torch.tensor([0.0, 1.0, 0.0, 0.0, 9.0, 9.0, 0.5, 9.0])
    assert set(counts(1.0, 1.0, logits_V, base=4)) == {0, 1, 2, 3, END}
    assert set(counts(0.0, 1.0, logits_V, base=4)) == {1}


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.floats(0.01, 1.0), st.floats(0, 1, exclude_max=True))
def test_what_is_chosen_has_a_share(seed: int, temperature: float, top_p: float, drawn: float) -> None:
    logits_V = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * 30
    (token,) = Sampler(34, 36, temperature, top_p).pick(logits_V.unsqueeze(0), [Fixed(drawn)])
    allowed = [*range(34), 36]
    shares = torch.softmax(logits_V[allowed].double() / temperature, -1)
    assert shares[allowed.index(token)] > 0


def test_the_largest_number_of_the_dice_takes_a_token_with_a_share() -> None:
    class Last(Random):
        def random(self) -> float:
            return 1 - 2**-53

    for seed in range(300):
        logits_V = torch.randn(9, generator=torch.Generator().manual_seed(seed))
        for top_p in (0.5, 1.0):
            (token,) = Sampler(7, 8, 1.0, top_p).pick(logits_V.unsqueeze(0), [Last()])
            assert token in (8, *range(7))


def test_a_tiny_temperature_takes_the_likeliest() -> None:
    assert set(counts(1e-40, 1.0, SHARES.log(), draws=9)) == {1}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_of_a_broken_model_give_some_token(value: float) -> None:
    broken_BV = torch.stack([torch.full((8,), value), SHARES.log()])
    for top_p in (0.5, 1.0):
        token, sound = Sampler(5, END, 1.0, top_p).pick(broken_BV, [Random(1), Random(1)])
        assert token in (0, 1, 2, 3, 4, END)
        assert sound in (0, 1, 3, 4, END)


@pytest.mark.parametrize(
    "settings",
    [
        *({"temperature": value} for value in (-0.1, float("nan"), float("inf"))), {"top_p": 0.0}, {"top_p": 1.1},
        {"top_k": -1}, *({"repetition_penalty": value} for value in (0.0, -1.0, float("nan"), float("inf"))),
    ],
    ids=str,
)  # fmt: skip
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    ((field, value),) = settings.items()
    with pytest.raises(ValueError, match=f"^{field} {value} must be"):
        Sampler(5, END, **settings)


def test_top_k_keeps_that_many_and_equals_of_the_last() -> None:
    for top_k, kept in ((1, {1}), (2, {1, 3}), (3, {1, 3, 4}), (4, {0, 1, 3, 4, 6}), (99, {0, 1, 3, 4, 6})):
        dice = [Random(str(number)) for number in range(2000)]
        found = Counter(Sampler(5, END, 1.0, 1.0, top_k).pick(SHARES.log().expand(2000, -1), dice))
        assert set(found) == kept
    assert abs(found[1] / 2000 - 0.5) < 0.04


def test_a_special_token_is_chosen_where_it_ends_the_text() -> None:
    logits_V = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 8.0, 0.5, 9.0])
    for more, token in (((), 1), ((5,), 5), ((5, 7), 7)):
        assert Sampler(4, END, stop_token_ids=more).pick(logits_V.unsqueeze(0), [Random(1)]) == [token]


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
def test_shares_are_those_of_transformers(top_p: float, top_k: int, penalty: float) -> None:
    """Each token is drawn by a number in the middle of its share of transformers' distribution, by both orders."""
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(top_k)
    for _ in range(20):
        logits_V = torch.randn(60, generator=generator) * 4
        read = torch.randint(60, (25,), generator=generator)
        processors = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(0.7)])
        if penalty != 1:
            processors.insert(0, transformers.RepetitionPenaltyLogitsProcessor(penalty))
        if top_k:
            processors.append(transformers.TopKLogitsWarper(top_k))
        if top_p < 1:
            processors.append(transformers.TopPLogitsWarper(top_p))
        shares_V = processors(read.unsqueeze(0), logits_V.unsqueeze(0)).double().softmax(-1)[0]
        order = shares_V.argsort(descending=True, stable=True) if top_p < 1 else torch.arange(60)
        ends = shares_V[order].cumsum(-1)
        drawn = [(token, end - share / 2) for token, end, share in zip(order, ends, shares_V[order], strict=True)]
        wanted = [(int(token), float(number)) for token, number in drawn if shares_V[token] > 1e-6]
        dice = [Fixed(number) for _, number in wanted]
        sampler = Sampler(60, 0, 0.7, top_p, top_k, penalty)
        found = sampler.pick(logits_V.expand(len(wanted), -1), dice, [read.tolist()] * len(wanted))
        assert found == [token for token, _ in wanted]


class Fixed(Random):
    def __init__(self, number: float) -> None:
        super().__init__(0)
        self.number = number

    def random(self) -> float:
        return self.number


def test_a_text_of_a_chat_model_ends_as_its_turns_do(tmp_path: Path) -> None:
    """transformers ends it so too: both are in the export's generation_config.json."""
    Tokenizer([bytes([value]) for value in range(256)]).save(tmp_path)
    logits = torch.zeros(1, 512)
    logits[0, special_id(Tokenizer.load(tmp_path), "<|eot_id|>")] = 9.0
    logits[0, 65] = 5.0
    assert Sampler.for_tokenizer(Tokenizer.load(tmp_path), 0.0, 1.0).pick(logits, [Random(0)]) == [65]
    (tmp_path / TEMPLATE_FILE).write_text(TEMPLATE)
    told = Tokenizer.load(tmp_path)
    assert Sampler.for_tokenizer(told, 0.0, 1.0).pick(logits, [Random(0)]) == [told.turn_end]
    assert told.ends == (told.end, told.turn_end)
