"""The training state: weights, optimizer moments, running average, position.

All of it is named tensors and three numbers, so it can be saved and loaded under any layout. A process holds its part:
some layers if there is a pipeline, slices of matrices, shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from llama3.model.init import empty, initial_value
from llama3.model.linear import use_float8
from llama3.model.transformer import Transformer
from llama3.parallel.mesh import ParallelContext
from llama3.recipe.schema import Recipe
from llama3.train.optimizer import adamw
from llama3.train.precision import Precision


class TrainState:
    """Weights and optimizer of one stage, at `position`."""

    def __init__(
        self,
        recipe: Recipe,
        rows: int,
        precision: Precision,
        world: ParallelContext,
        position: int,
        exact: bool = False,
    ) -> None:
        """Allocate weights and moments; the weights are not initialized (see `reset`, `fill` and `load_state`).

        `exact` sums gradients in fp64, so that they do not depend on the number of data-parallel processes.
        """
        self.spec, self.rows = recipe.model, rows
        self.parts: Mapping[int, Transformer]
        """This process's pipeline stages by number; without a pipeline the whole model, number 0."""
        if world.mesh is None:
            model = empty(recipe.model, rows).to(precision.master).to_empty(device=world.device)
            model.compute, model.recompute = precision.compute, world.layout.recompute
            if precision.float8:
                use_float8(model.layers)
            if world.layout.compile:
                for block in model.layers.values():
                    block.compile()
            self.parts = {0: model}
        else:
            from llama3.parallel.parallelize import empty_parts  # 0.7 s of imports that one process does not need

            self.parts = empty_parts(
                recipe.model, rows, world, precision.master, precision.compute, exact, precision.float8
            )
            for part in self.parts.values():
                part.to_empty(device=world.device)
        for part in self.parts.values():
            part.z_loss = recipe.z_loss
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for part in self.parts.values() for name, parameter in part.named_parameters()
        }
        self.optimizer = adamw(self.parameters, recipe.optimizer)
        self.position = position
        self.sum: dict[str, Tensor] = {}
        """Running sum of the weights at the positions averaged so far, in the weights' own precision."""
        self.averaged = 0
        """Divisor of the sum: the number of positions in it; 1 for an exponential moving average."""

    def reset(self, recipe: Recipe, position: int, world: ParallelContext) -> None:
        """Set the initial state of a run: weights that depend on the recipe's model and seed only."""
        self.fill(lambda name, shape: initial_value(recipe.model, recipe.seed, name, shape), world)
        for moments in self.optimizer.state.values():
            for value in moments.values():
                value.zero_()
        self.make_average(0)
        self.position = position

    def fill(self, value: Callable[[str, torch.Size], Tensor], world: ParallelContext) -> None:
        """Set every weight to this process's share of `value(name, global shape)`."""
        if world.mesh is None:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(value(name, parameter.shape))
            return
        from llama3.parallel.parallelize import fill

        fill(self.parts.values(), value, world)

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
            self.sum = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.parameters.items()}

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
