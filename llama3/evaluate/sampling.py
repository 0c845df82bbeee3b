"""Choosing the next token: the likeliest, or drawn from the smallest set that holds `top_p` of the probability.

Each text has dice of its own, so what is drawn for it does not depend on the texts beside it in a batch. One number is
drawn a token, and the token is where it falls in the cumulated probabilities; these are summed in fp64, or the
sum over 128,000 tokens would round rare ones away. What this gives up: a nucleus sorts the whole vocabulary.

Shapes: B texts, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from llama3.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:  # recipes are checked without torch
    from torch import Tensor


@dataclass(frozen=True)
class Sampler:
    """How tokens are chosen for the texts of one tokenizer. Raises ValueError for settings without meaning."""

    base: int
    """Tokens that are text; the rows after them are special tokens, which are never written."""
    end: int
    """The special token that may be chosen."""
    temperature: float = 0.0
    """0 takes the likeliest token, the first of equals."""
    top_p: float = 1.0
    """Nucleus sampling, arXiv 1904.09751."""

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_p)

    @classmethod
    def of(cls, tokenizer: Tokenizer, temperature: float, top_p: float) -> Sampler:
        """Return the sampler for texts of `tokenizer`."""
        return cls(len(tokenizer.base), tokenizer.end, temperature, top_p)

    def pick(self, logits_BV: Tensor, dice: Sequence[Random]) -> list[int]:
        """Return the next token of each text; one number of each text's dice is used unless temperature is 0."""
        allowed_BV = self._allowed(logits_BV.float())
        if self.temperature == 0:
            greedy: list[int] = allowed_BV.argmax(-1).tolist()
            return greedy
        import torch

        drawn_B1 = torch.tensor([[one.random()] for one in dice], dtype=torch.float64, device=logits_BV.device)
        picked_B = self._drawn(allowed_BV, drawn_B1)
        # not finite: the logits of a broken model, which is refused by its scores and must not break its evaluation
        finite_B = allowed_BV.amax(-1).isfinite()
        picked: list[int] = torch.where(finite_B, picked_B, allowed_BV.argmax(-1)).tolist()
        return picked

    def _allowed(self, logits_BV: Tensor) -> Tensor:
        """Return the logits with every special token but the end impossible."""
        allowed_BV = logits_BV.clone()
        allowed_BV[:, self.base :] = float("-inf")
        allowed_BV[:, self.end] = logits_BV[:, self.end]
        return allowed_BV

    def _drawn(self, logits_BV: Tensor, drawn_B1: Tensor) -> Tensor:
        below_BV = logits_BV - logits_BV.amax(-1, keepdim=True)  # first: a tiny temperature makes large logits infinite
        shares_BV = (below_BV / self.temperature).softmax(-1).double()
        if self.top_p == 1:
            return _at(shares_BV, drawn_B1)
        shares_BV, order_BV = shares_BV.sort(dim=-1, descending=True, stable=True)
        before_BV = shares_BV.cumsum(-1) - shares_BV
        place_B = _at(shares_BV * (before_BV < self.top_p), drawn_B1)
        return order_BV.gather(-1, place_B.unsqueeze(-1)).squeeze(-1)


def check_sampling(temperature: float, top_p: float) -> None:
    """Raise ValueError unless temperature is 0 or more and top_p in (0, 1]."""
    if not temperature >= 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"temperature {temperature} must be 0 or more and top_p {top_p} in (0, 1]; "
            "temperature 0 takes the likeliest token, top_p 1 draws from all"
        )


def _at(shares_BV: Tensor, drawn_B1: Tensor) -> Tensor:
    """Return the index at which each number of [0, 1) falls in the cumulated shares, which need not sum to 1."""
    import torch

    sums_BV = shares_BV.cumsum(-1)
    at_B1 = torch.searchsorted(sums_BV, drawn_B1 * sums_BV[:, -1:], right=True)
    return at_B1.squeeze(-1).clamp(max=shares_BV.shape[-1] - 1)  # past the end only where shares are not finite
