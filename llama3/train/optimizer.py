"""AdamW and gradient clipping (Llama 3, section 3.4.1): decay on matrices, none on norms and embeddings unless asked.

The update never waits for the host: scale and verdict are tensors, and a step found bad changes nothing (`found_inf` of
the fused kernel leaves weights, moments and step counts as they were).
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
    """Return the optimizer with its state already made, so that a checkpoint has somewhere to be loaded into."""
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
    """Return the sum of squares, fp64, of the gradients that this process holds and counts.

    What several processes hold alike (norms under tensor parallelism, all weights under HSDP) is counted by the first.
    """
    held = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = [torch.linalg.vector_norm(local(g), dtype=torch.float64).square() for g in held if _counts(g)]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=local(held[0]).device)


def scale(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by a number on the device."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))


def _counts(gradient: Any) -> bool:
    if not hasattr(gradient, "placements"):  # plain; DTensor itself takes 0.7 s to import
        return True
    axes = zip(gradient.device_mesh.get_coordinate(), gradient.placements, strict=True)
    return all(place == 0 for place, where in axes if where.is_replicate())
