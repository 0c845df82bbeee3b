"""The last product and its cross entropy, forward and backward, in the plain way and in herd's (see `train_side`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from herd.llama3.model.loss import token_nll


def stepper(shape: Mapping[str, Any], bf16: bool) -> Callable[[], float]:
    """Return a function that leaves gradients of hidden states and weights and returns the loss; `plain` says how."""
    generator = torch.Generator().manual_seed(0)
    hidden_BSD = torch.randn(1, shape["tokens"], shape["dim"], generator=generator)
    hidden_BSD = hidden_BSD.to(torch.bfloat16 if bf16 else torch.float32).requires_grad_()
    weight_VD = (0.02 * torch.randn(shape["vocab_size"], shape["dim"], generator=generator)).requires_grad_()
    targets_BS = torch.randint(0, shape["vocab_size"], (1, shape["tokens"]), generator=generator)

    def step() -> float:
        if shape["plain"]:
            logits_TV = (hidden_BSD @ weight_VD.to(hidden_BSD.dtype).T).flatten(0, 1)
            loss = F.cross_entropy(logits_TV.float(), targets_BS.flatten())
            del logits_TV
        else:
            loss = token_nll(hidden_BSD, weight_VD, targets_BS).sum() / shape["tokens"]
        torch.autograd.backward(loss)
        hidden_BSD.grad = weight_VD.grad = None
        return float(loss.detach())

    return step
