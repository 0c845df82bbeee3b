"""A small state that is cut in every way a checkpoint must know, and what tests do with it in other processes."""

from __future__ import annotations

import importlib
import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.mesh import ParallelContext, full_tensor, init_distributed, to_local
from herd.llama3.parallel.parallelize import empty_model_parts
from herd.llama3.recipe.sections import Keep, Model
from herd.llama3.train.checkpoint import dcp, storage
from herd.llama3.train.checkpoint.manager import Checkpoints, SaveFailed

SHAPES = {"wide": (12, 6), "odd": (7, 3), "few": (2, 5), "vector": (9,), "half": (64, 16)}
ALONE = ParallelContext(0, 1, torch.device("cpu"))
"""This process, without others."""


def value(name: str, position: int) -> Tensor:
    """What the tensor `name` holds at `position`: a function of both, on every layout."""
    if name == "step":
        return torch.tensor(float(position))
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + position)
    drawn = torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)
    return drawn.to(torch.bfloat16) if name == "half" else drawn


class State:
    """Tensors plain, or cut over `world`: all vocab_size over all processes, or over half of them with replicas."""

    def __init__(self, world: ParallelContext = ALONE, position: int = 0, config: Model | None = None) -> None:
        self.world, self.position, self.averaged, self.vocab_size, self.loaded_seq_len = world, 0, 0, 12, 0
        self.config = config or Model(layers=1, dim=8, ffn=8, heads=1, kv_heads=1, max_seq_len=8)
        self.held = {name: self._cut(name, value(name, 0)) for name in [*SHAPES, "step"]}
        self.sum: dict[str, Tensor] = {}
        self.train_to(position)

    def train_to(self, position: int) -> None:
        """Change every tensor in place, as an optimizer does."""
        for name, tensor in self.held.items():
            to_local(tensor).copy_(to_local(self._cut(name, value(name, position))))
        for tensor in self.sum.values():
            to_local(tensor).fill_(position)
        self.position = position

    def tensors(self) -> dict[str, Tensor]:
        return {**self.held, **{f"average.{name}": tensor for name, tensor in self.sum.items()}}

    def make_average(self, averaged: int) -> None:
        self.averaged = averaged
        self.sum = {"wide": torch.zeros_like(self.held["wide"])} if averaged else {}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every tensor whole; all processes must call it."""
        return {name: full_tensor(tensor).to(torch.float64).numpy().copy() for name, tensor in self.tensors().items()}

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        if self.world.size == 1 or name == "step":
            return tensor
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        if name == "vector":
            return distribute_tensor(tensor, self.world.mesh["shard"], [Replicate()])
        if name == "wide" and self.world.size == 4:
            pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "row"))
            return distribute_tensor(tensor, pairs, [Replicate(), Shard(0)])
        return distribute_tensor(tensor, self.world.mesh["shard"], [Shard(0)])


def expected(position: int) -> dict[str, np.ndarray]:
    return {name: value(name, position).to(torch.float64).numpy() for name in [*SHAPES, "step"]}


def assert_holds(arrays: dict[str, np.ndarray], position: int) -> None:
    """Every bit is as it was at `position`."""
    for name, array in expected(position).items():
        assert np.array_equal(arrays[name], array), name


def opened(folder: Path, world: ParallelContext = ALONE, last: int = 3, **more: Any) -> Checkpoints:
    return Checkpoints(folder, Keep(last=last), world, **more)


def save_in_the_background(
    folder: Path, positions: list[int], uri: str | None = None, copied: int = dcp.COPIED
) -> list[int]:
    """Save at each of `positions` and change the state at once; return what was committed, in order."""
    dcp.COPIED = copied
    with init_distributed("cpu", 30) as world:
        state, checkpoints = State(world), opened(folder, world, uri=uri)
        done = []
        for position in positions:
            state.train_to(position)
            checkpoints.begin(state, "main")
            state.train_to(position + 1)
            done += checkpoints.poll()
        done += checkpoints.finish()
        return [saved.position for saved in done]


def resume(folder: Path, uri: str | None = None) -> tuple[int, tuple[str, ...], dict[str, np.ndarray]]:
    """Load the newest good checkpoint into a fresh state."""
    with init_distributed("cpu", 30) as world:
        state = State(world)
        found = opened(folder, world, uri=uri).resume(state)
        return state.position, found.skipped, state.arrays()


def resume_and_list(
    folder: Path, copied: int = dcp.COPIED, uri: str | None = None, environment: dict[str, str] | None = None
) -> tuple[list[int], list[int], Any]:
    """Load as one of two processes of a machine; return whose files it opened, whose are there, and every tensor."""
    os.environ.update(environment or {})
    dcp.COPIED = copied
    with init_distributed("cpu", 30) as world:
        opened_files, on_machine = set[str](), set[str]()
        state, read, release = State(world), dcp.read_header, storage.RemoteCheckpointStore.release

        def record_file(path: Path) -> Any:
            opened_files.add(path.name)
            return read(path)

        def record_machine(store: storage.RemoteCheckpointStore, path: Path) -> None:
            world.barrier()
            on_machine.update(file.name for file in path.iterdir())
            world.barrier()
            release(store, path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dcp, "read_header", record_file)
            patch.setattr(storage.RemoteCheckpointStore, "release", record_machine)
            patch.setattr("socket.gethostname", lambda: f"machine{world.rank // 2}")
            opened(folder, world, uri=uri).resume(state)
        writers = [sorted({int(name.split("-")[0]) for name in names}) for names in (opened_files, on_machine)]
        return writers[0], writers[1], state.arrays()


def parts_written(layout: dict[str, int]) -> tuple[int, dict[tuple[str, tuple[int, ...]], int]]:
    """Return the pipeline rank, and the bytes that this process writes of a model's parts, by name and offsets."""
    dcp.COPIED = 0
    config = Model(layers=4, dim=64, ffn=224, heads=8, kv_heads=4, max_seq_len=64)
    with init_distributed("cpu", 30, Layout(**layout)) as world:
        parts = empty_model_parts(config, 512, world, torch.float32, None)
        tensors: dict[str, Any] = {name: one for part in parts.values() for name, one in part.named_parameters()}
        mine = dcp.shards_to_write(tensors, world.rank)
        written = {(item.index.fqn, tuple(item.index.offset or ())): dcp.size_of(item) for item in mine}
        return world.axis("pp").rank, written


def save_with(environment: dict[str, str], folder: Path, positions: list[int], uri: str) -> list[int]:
    """Save to an object store that `environment` names."""
    os.environ.update(environment)
    return save_in_the_background(folder, positions, uri)


def resume_with(environment: dict[str, str], folder: Path, uri: str) -> tuple[int, tuple[str, ...], Any]:
    """Load from it."""
    os.environ.update(environment)
    return resume(folder, uri)


def fail_then_recover(folder: Path) -> dict[str, Any]:
    """Save at 5; then process 1 cannot write until training was given up once; then save at 10."""
    lines: list[str] = []
    result: dict[str, Any] = {"lines": lines}
    with init_distributed("cpu", 30) as world:
        state, checkpoints = State(world, 5), opened(folder, world, log=lines.append)
        checkpoints.save(state, "main")
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        for position in range(6, 10):
            state.train_to(position)
            try:
                checkpoints.begin(state, "main")
            except SaveFailed as error:
                result |= {"given up": str(error), "given up at": position}
                break
            world.barrier()
        result["after failure"] = checkpoints.positions()
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        world.barrier()
        state.train_to(10)
        checkpoints.failures.clear()
        checkpoints.save(state, "main")
        world.barrier()
        return {**result, "at the end": checkpoints.positions(), "hidden": [path.name for path in folder.glob(".*")]}


def die_while_saving(folder: Path, target: str, calls: int, after: bool, rank: int = 0) -> None:
    """Save at 5; save at 6 in the background and die by SIGKILL at a call that the thread makes."""
    with init_distributed("cpu", 30) as world:
        state, checkpoints = State(world, 5), opened(folder, world, last=1)
        checkpoints.save(state, "main")
        if world.rank == rank:
            deadly(target, calls, after)
        state.train_to(6)
        checkpoints.begin(state, "main")
        checkpoints.finish()


def deadly(target: str, calls: int, after: bool) -> None:
    """Make call number `calls` of `target` (`module:name`) kill this process, before or after it."""
    module_name, name = target.split(":")
    module = importlib.import_module(module_name)
    original, count = getattr(module, name), 0

    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        mine = count == calls
        if mine and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        value = original(*arguments, **keywords)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    setattr(module, name, call)
