"""Everything that training carries from step to step: weights, optimizer moments, running average, position.

All of it is named tensors and three numbers, so that it can be saved and loaded on any number of processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llama3.model.initial import build
from llama3.model.transformer import Transformer
from llama3.parallel.mesh import World, whole
from llama3.recipe.schedule import StageSpan
from llama3.recipe.schema import Recipe
from llama3.train.optimizer import adamw


class TrainState:
    """Weights and optimizer of one stage, at `position`."""

    def __init__(self, recipe: Recipe, rows: int, dtype: torch.dtype, world: World, position: int) -> None:
        """Make the state with which a run starts; the weights depend on the recipe's model and seed only."""
        self.model: Transformer = _build(recipe, rows, dtype, world)
        self.optimizer = adamw(self.model, recipe.optimizer)
        self.position = position
        self.sum: dict[str, Tensor] = {}
        """Running sum of the weights at the positions averaged so far, in the weights' own precision."""
        self.averaged = 0
        """How many that were."""

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name; writing into them changes the state."""
        named = dict(self.model.named_parameters())
        found = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
        for name, parameter in named.items():
            found |= {f"optimizer.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return found | {f"average.{name}": value for name, value in self.sum.items()}

    def make_average(self, averaged: int) -> None:
        """Make room for an average over `averaged` positions that is about to be loaded."""
        self.averaged = averaged
        if averaged:
            self.sum = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.model.named_parameters()}

    def add_to_average(self) -> None:
        """Count the present weights into the average."""
        if not self.averaged:
            self.make_average(1)
            self.averaged = 0
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.sum[name].add_(parameter)
        self.averaged += 1

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights, averaged if the stage averages; every process must call it."""
        if self.averaged:
            return {name: whole(value) / self.averaged for name, value in self.sum.items()}
        return {name: whole(parameter.detach()) for name, parameter in self.model.named_parameters()}


def average_positions(span: StageSpan) -> list[int]:
    """Return the positions, at most `average` of them, evenly spread over the stage; the last is its end.

    A stage of fewer steps than that averages over all of its steps.
    """
    if span.stage.average is None:
        return []
    count = min(span.stage.average, span.steps)
    return [_position_after(span, -(-span.steps * number // count)) for number in range(1, count + 1)]


def _position_after(span: StageSpan, steps: int) -> int:
    for segment in span.segments:
        if steps <= segment.steps:
            return segment.start + steps * segment.batch
        steps -= segment.steps
    raise AssertionError("more steps than the stage has")


def _build(recipe: Recipe, rows: int, dtype: torch.dtype, world: World) -> Transformer:
    if world.size == 1:
        return build(recipe.model, rows, recipe.seed, dtype, world.device)
    from llama3.parallel.fsdp import build_sharded  # 0.7 s of imports that one process does not need

    return build_sharded(recipe.model, rows, recipe.seed, dtype, world)
