"""AdamW and gradient clipping (Llama 3, section 3.4.1): weight decay on matrices, none on norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llama3.parallel.mesh import local
from llama3.recipe.schema import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """Return the optimizer with its state already made, so that a checkpoint has somewhere to be loaded into."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    for parameter in model.parameters():
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.zeros((), device=local(parameter).device), **moments}
    return optimizer


def squared_norm(model: nn.Module) -> Tensor:
    """Return the sum of squares, fp64, of the gradients that this process holds."""
    squares = [torch.linalg.vector_norm(gradient, dtype=torch.float64).square() for gradient in _gradients(model)]
    return torch.stack(squares).sum()


def clip(model: nn.Module, norm: float, largest: float) -> None:
    """Scale all gradients down so that their norm, now `norm`, is at most `largest`."""
    if norm > largest:
        torch._foreach_mul_(_gradients(model), largest / norm)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
