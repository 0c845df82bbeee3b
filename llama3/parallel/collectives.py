"""Collectives as plain functions of tensors, the same on torch 2.11 and 2.13, and traceable by torch.compile.

torch's own wrappers changed names between the two versions and warn; the operators below them did not. Each call waits
for its result where it stands; under torch.compile the inductor moves the waits and may overlap them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor


def all_gather(part: Tensor, dim: int, group: Any) -> Tensor:
    """Return the parts of all processes of `group` joined along `dim`, in the order of ranks."""
    size = group.size()
    flat = torch.ops._c10d_functional.all_gather_into_tensor(part.contiguous(), size, group.group_name)
    joined: Tensor = torch.ops._c10d_functional.wait_tensor(flat)
    if dim == 0:
        return joined
    if part.shape[0] == 1 and dim == 1:  # the parts lie one after another already
        return joined.reshape(1, -1, *part.shape[2:])
    return torch.cat(joined.chunk(size), dim=dim)


def reduce_scatter(whole: Tensor, dim: int, group: Any) -> Tensor:
    """Return this process's part along `dim` of the sum of `whole` over `group`."""
    size = group.size()
    stacked = whole if dim == 0 else torch.cat(whole.chunk(size, dim=dim))
    part = torch.ops._c10d_functional.reduce_scatter_tensor(stacked.contiguous(), "sum", size, group.group_name)
    done: Tensor = torch.ops._c10d_functional.wait_tensor(part)
    return done


def all_reduce(x: Tensor, operation: Literal["sum", "max"], group: Any) -> Tensor:
    """Return the elementwise sum or maximum of `x` over `group`, as a new tensor."""
    total: Tensor = torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(x.contiguous(), operation, group.group_name)
    )
    return total
