"""AdamW and gradient clipping (Llama 3, section 3.4.1): decay on matrices, on norms and embeddings only if asked.

The update never waits for the host: the scale is a tensor, and so is the flag of a bad step, which changes nothing
(`found_inf` of the fused kernel leaves weights, moments and step counts as they were).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llama3.parallel.mesh import local
from llama3.recipe.sections import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(named: Mapping[str, nn.Parameter], settings: Optimizer) -> torch.optim.AdamW:
    """Return the optimizer with its state already allocated, so that a checkpoint can be loaded into it."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        groups.setdefault(settings.weight_decay if _decays(name, parameter, settings) else 0.0, []).append(parameter)
    lists = [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
    optimizer = torch.optim.AdamW(lists, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    for parameter in named.values():
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.zeros((), device=local(parameter).device), **moments}
    return optimizer


def _decays(name: str, parameter: nn.Parameter, settings: Optimizer) -> bool:
    if parameter.ndim == 1:
        return settings.decay_norms
    return settings.decay_embeddings or not name.startswith("embedding")


def squared_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the sum of squares, fp64, of this process's gradients; replicas are counted by their first process."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = [torch.linalg.vector_norm(local(grad), dtype=torch.float64).square() for grad in grads if _counts(grad)]
    if not squares:
        return torch.zeros((), dtype=torch.float64, device=local(grads[0]).device)
    return torch.stack(squares).sum()


def scale(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by a number on the device."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))


def _counts(gradient: Any) -> bool:
    if not hasattr(gradient, "placements"):  # a plain tensor; isinstance would need DTensor, 0.7 s to import
        return True
    axes = zip(gradient.device_mesh.get_coordinate(), gradient.placements, strict=True)
    return all(rank == 0 for rank, placement in axes if placement.is_replicate())
