"""The training state: weights in their number formats, AdamW (Llama 3, section 3.4.1), running average, position.

Named tensors and three numbers, saved and loaded under any layout. A process holds its shards of them: the layers of
its pipeline stages, slices of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from herd.llama3.model.linear import check_device, use_float8
from herd.llama3.model.param_table import param_row
from herd.llama3.model.transformer import Transformer, empty_model, initial_value
from herd.llama3.parallel.mesh import ParallelContext, to_local
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Model, Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
FP32_SUM_TERMS = 1024
"""Number of weights whose sum keeps the weights' own precision: it is then wrong by less than 1e-4."""
EXACT_ENOUGH = 1e-3
"""Largest allowed error of a 512-term fp32 product of unit normals: fp32 gives less than 2e-4, bf16 inputs 0.4."""


@dataclass(frozen=True)
class Precision:
    """`master` is the type of weights, gradients and optimizer state; activations and products are in `compute`."""

    master: torch.dtype
    compute: torch.dtype | None = None
    """None: as `master`."""
    float8: bool = False
    """Whether products in the blocks are in float8 (see `herd.llama3.model.linear`)."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, device: torch.device) -> Precision:
        """Return the formats of `recipe.precision`; set torch's fp32 products. Raises ValueError if fp8 is missing."""
        if recipe.precision == "fp32" and device.type == "cpu":
            fast_fp32()
        if recipe.precision == "fp64":
            return cls(torch.float64)
        float8 = recipe.precision == "fp8"
        if float8:
            check_device(device)
        return cls(torch.float32, torch.bfloat16 if float8 or recipe.precision == "bf16" else None, float8)


def fast_fp32() -> None:
    """Select the faster of torch's two libraries for fp32 products, if its products really are fp32 on this CPU.

    MKL uses its fastest kernels on Intel only: there oneDNN takes 1.2 times its CPU time, elsewhere MKL 2.3 times that
    of oneDNN. The choice is by vendor and not by measuring, so that a restarted run makes the same choice.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    vendor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "")
    torch.set_float32_matmul_precision("highest" if vendor == "GenuineIntel" else "medium")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, dtype=torch.float64, generator=generator) for _ in range(2))
    if float((a.float() @ b.float() - a @ b).abs().max()) > EXACT_ENOUGH:
        torch.set_float32_matmul_precision("highest")


def adamw(named: Mapping[str, nn.Parameter], settings: Optimizer, fused: bool = True) -> torch.optim.AdamW:
    """Return the optimizer with its state already allocated, so that a checkpoint can be loaded into it.

    On a CPU the bits of a fused step depend on the size of a shard: torch's kernel rounds the last elements, too few
    for a vector, otherwise than the rest.
    """
    decays = {"matrix": True, "norm": settings.decay_norms, "embedding": settings.decay_embeddings}
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        groups.setdefault(settings.weight_decay if decays[param_row(name).kind] else 0.0, []).append(parameter)
    lists = [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
    optimizer = torch.optim.AdamW(lists, lr=0.0, betas=settings.betas, eps=settings.eps, fused=fused)
    for parameter in named.values():
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.zeros((), device=to_local(parameter).device), **moments}
    return optimizer


class TrainState:
    """Weights and optimizer of one stage, at `position`."""

    def __init__(
        self,
        recipe: Recipe,
        vocab_size: int,
        precision: Precision,
        world: ParallelContext,
        position: int,
        exact: bool = False,
    ) -> None:
        """Allocate weights and moments; the weights are not initialized (see `reset`, `fill` and `load_state`).

        With `exact`, gradients (sums in fp64) and the update do not depend on the number of data-parallel processes.
        """
        self._shape, self._schedule, self._start = recipe.model, recipe.schedule, position
        self.vocab_size = vocab_size
        self.model_parts: Mapping[int, Transformer]
        """This process's pipeline stages by number; without a pipeline the whole model, number 0."""
        if world.mesh is None:
            model = empty_model(recipe.model, vocab_size).to(precision.master).to_empty(device=world.device)
            model.compute, model.recompute = precision.compute, world.layout.recompute
            if precision.float8:
                use_float8(model.layers)
            if world.layout.compile:
                for block in model.layers.values():
                    block.compile()
            self.model_parts = {0: model}
        else:
            # 0.7 s of imports that one process does not need
            from herd.llama3.parallel.parallelize import empty_model_parts

            self.model_parts = empty_model_parts(
                recipe.model, vocab_size, world, precision.master, precision.compute, exact, precision.float8
            )
            for model in self.model_parts.values():
                model.to_empty(device=world.device)
        for model in self.model_parts.values():
            model.z_loss = recipe.z_loss
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for model in self.model_parts.values() for name, parameter in model.named_parameters()
        }
        self.optimizer = adamw(self.parameters, recipe.optimizer, fused=not exact or world.device.type != "cpu")
        self.position = position
        self.loaded_seq_len = 0
        """Longest sequence that the weights were trained on when they were loaded; 0: initial weights."""
        self.sum: dict[str, Tensor] = {}
        """Running sum of the weights at the positions averaged so far, in fp64 from FP32_SUM_TERMS on.

        In fp32 the sum over 711K steps (`polyak`) is wrong by up to 1 %, and a running mean no longer moves.
        """
        self.averaged = 0
        """Divisor of the sum: the number of positions in it; 1 for an exponential moving average."""

    @property
    def config(self) -> Model:
        """The model as it is at `position`: its longest sequence is the longest that it was trained on."""
        trained = self._schedule.longest(self._start, max(self.position, self._start + 1))
        return self._shape.model_copy(update={"max_seq_len": max(self.loaded_seq_len, trained)})

    def reset(self, recipe: Recipe, position: int, world: ParallelContext) -> None:
        """Set the initial state of a run: weights that depend on the recipe's model and seed only."""
        self.fill(lambda name, shape: initial_value(recipe.model, recipe.seed, name, shape), world)
        for moments in self.optimizer.state.values():
            for value in moments.values():
                value.zero_()
        self.make_average(0)
        self.position, self.loaded_seq_len = position, 0

    def fill(self, value: Callable[[str, torch.Size], Tensor], world: ParallelContext) -> None:
        """Set every weight to this process's share of `value(name, global shape)`."""
        if world.mesh is None:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(value(name, parameter.shape))
            return
        from herd.llama3.parallel.parallelize import fill

        fill(self.model_parts.values(), value, world)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name; writing into them changes the state."""
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            tensors |= {f"optimizer.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return tensors | {f"average.{name}": value for name, value in self.sum.items()}

    def make_average(self, averaged: int) -> None:
        """Allocate an average over `averaged` positions that is about to be loaded; 0 removes it."""
        self.averaged = averaged
        self.sum = {}
        if averaged:
            exact = torch.float64 if averaged >= FP32_SUM_TERMS else None
            self.sum = {
                name: torch.zeros_like(parameter, dtype=exact, requires_grad=False)
                for name, parameter in self.parameters.items()
            }

    def add_to_average(self, decay: float | None = None) -> None:
        """Add the present weights to the sum, or with `decay` to an exponential moving average."""
        first = not self.averaged
        if first:
            self.make_average(1)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if decay is None or first:
                    self.sum[name].add_(parameter)
                else:
                    self.sum[name].lerp_(parameter, 1 - decay)
        if decay is None and not first:
            self.averaged += 1
            if self.averaged == FP32_SUM_TERMS:
                self.sum = {name: total.double() for name, total in self.sum.items()}
