"""Text from a model: greedy or sampled continuation of a prompt.

The model keeps no cache of keys and values, so every token runs the sequence again: time grows with the square of the
length, which is fine for the samples beside an evaluation and a look from the command line, and not for serving.
Sampling happens on the CPU from a generator of its own, so equal arguments give equal text on one machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llama3.model.transformer import Transformer
from llama3.recipe.section import SPECIAL_TOKENS
from llama3.tokens.tokenizer import Tokenizer


@torch.inference_mode()
def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """Return what the model writes after `prompt` (not the prompt itself), at most `max_tokens` tokens.

    Stops at the end token. Temperature 0 takes the likeliest token; above, tokens are drawn from the smallest set
    that holds `top_p` of the probability (nucleus sampling, arXiv 1904.09751). Special tokens are never written.
    A text that outgrows the model's longest sequence is continued from its last tokens. A character whose bytes
    were cut off at the end appears as U+FFFD.
    Raises ValueError if max_tokens or temperature is negative or top_p is not in (0, 1].
    """
    if max_tokens < 0 or temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"max_tokens {max_tokens} and temperature {temperature} must be 0 or more and top_p {top_p} in (0, 1]"
        )
    device = next(model.parameters()).device
    dice = torch.Generator().manual_seed(seed)
    tokens = [tokenizer.begin, *tokenizer.encode(prompt)]
    given = len(tokens)
    for _ in range(max_tokens):
        context_1S = torch.tensor([tokens[-model.spec.max_seq :]], device=device)
        logits_V = model(context_1S, None)[0, -1].float().cpu()
        token = _choose(_writable(logits_V, tokenizer), temperature, top_p, dice)
        if token == tokenizer.end:
            break
        tokens.append(token)
    return tokenizer.decode(tokens[given:])


def _writable(logits_V: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Return the logits with every special token but the end impossible."""
    allowed_V = logits_V.clone()
    allowed_V[tokenizer.rows - SPECIAL_TOKENS :] = -torch.inf
    allowed_V[tokenizer.end] = logits_V[tokenizer.end]
    return allowed_V


def _choose(logits_V: Tensor, temperature: float, top_p: float, dice: torch.Generator) -> int:
    if temperature == 0 or not logits_V.max().isfinite():  # of a broken model; the gate refuses it by its scores
        return int(logits_V.argmax())
    ordered_V, order_V = torch.softmax(logits_V / temperature, -1).sort(descending=True, stable=True)
    before_V = ordered_V.cumsum(0) - ordered_V
    nucleus_V = ordered_V * (before_V < top_p)
    return int(order_V[torch.multinomial(nucleus_V, 1, generator=dice)])
