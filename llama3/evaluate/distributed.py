"""Several processes that evaluate one model: replicas share the batches, and the processes of a replica the weights.

A replica splits the model over tensor-parallel and pipeline ranks ([dp, pp, cp, tp], as in training) and reads its
shards straight from the model's files, so no process holds all weights. Pipeline stages work on different batches at
the same time, because no stage waits for a score; a decoded token passes through all of them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from llama3.model.attention import AttentionMask
from llama3.model.files import load_model, open_model
from llama3.model.param_table import param_row
from llama3.model.transformer import Head, Transformer
from llama3.parallel.comms import InferenceComms
from llama3.parallel.mesh import Axis, ParallelContext
from llama3.parallel.pipeline_schedule import split_layers
from llama3.recipe.sections import Model
from storage.filesystem import write_atomic

IN_FLIGHT = 2
"""Outputs of a pipeline stage that the next one may not have received yet; each is [B, S, D]."""


class EvalRanks:
    """The processes that share the work; by default this one alone."""

    def __init__(self, world: ParallelContext | None = None, done: Path | None = None) -> None:
        """`done` is a folder for the results of finished work, from which a later attempt continues; None: none."""
        self._world = world or ParallelContext(0, 1, torch.device("cpu"))
        self.rank, self.size, _ = self._world.axis("dp")
        """Rank of this process's replica, and the number of replicas."""
        pipeline = self._world.axis("pp")
        self.leads = self._world.is_tp_rank0 and pipeline.rank == pipeline.size - 1
        """Whether this process has the results of its replica."""
        self.is_rank0 = self._world.is_rank0
        """Whether this process writes the files."""
        self._done, self._calls = done, 0

    def load(self, folder: Path, dtype: torch.dtype, device: str) -> Transformer:
        """Return this process's part of the model in `folder`, which may be a checkpoint of a stage in progress.

        Raises ValueError as `load_model` and `load_shard` do.
        """
        if self._world.layout.model_parallel == 1:
            return load_model(folder, dtype, device)
        return load_shard(folder, self._world, dtype)

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        """Return what `work` returns in each replica, in order: plain JSON values. All processes must call.

        Calls are numbered. What an earlier attempt gathered under the number is returned without work.
        """
        self._calls += 1
        path = self._done / f"{self._calls:06}.json" if self._done else None
        if path:
            # the view of rank 0, before any process goes on: ranks that disagree would wait for each other
            (kept, *_) = self._all_gather(json.loads(path.read_text()) if self.is_rank0 and path.exists() else None)
            if kept is not None:
                return list(kept)
        found = work()
        results = [value for passed in self._all_gather([found] if self.leads else []) for value in passed]
        if path and self.is_rank0:
            write_atomic(path, json.dumps(results))
        return results

    def _all_gather(self, value: Any) -> list[Any]:
        """Return every process's value, in the order of ranks."""
        size = self._world.size
        if size == 1:
            return [value]

        def all_gather(tensor: Tensor) -> list[Tensor]:
            tensors = [torch.empty_like(tensor) for _ in range(size)]
            dist.all_gather(tensors, tensor, group=self._world.host_group)
            return tensors

        # JSON in host tensors: exact for numbers and text, and no pickle is loaded
        content = bytearray(json.dumps(value).encode())
        sizes = all_gather(torch.tensor([len(content)]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
        texts = all_gather(padded)
        return [json.loads(bytes(text[: int(size)].numpy())) for text, size in zip(texts, sizes, strict=True)]


class InferenceStage(Transformer):
    """A pipeline stage that receives its input from the stage before and sends its output to the next one.

    All stages are called with the same token ids, which only the first one reads.
    """

    def __init__(self, config: Model, rows: int, world: ParallelContext) -> None:
        """Create this process's stage."""
        self.pipeline: Axis = world.axis("pp")
        first, last = self.pipeline.rank == 0, self.pipeline.rank == self.pipeline.size - 1
        layers = split_layers(config.layers, self.pipeline.size)[self.pipeline.rank]
        super().__init__(config, rows, layers, first, last, InferenceComms(world))
        self.sent: deque[tuple[Any, Tensor]] = deque()
        """Sends that may not be complete, with the tensors that must live until then."""

    def forward(
        self,
        x: Tensor,
        documents: Tensor | AttentionMask | None = None,
        targets_BS: Tensor | None = None,
        head: Head | None = None,
    ) -> Tensor:
        """Return what `Transformer` does on the last stage, else this stage's output [B, S, D]."""
        rank, group = self.pipeline.rank, self.pipeline.group
        if self.embedding is None:
            dtype = next(self.parameters()).dtype
            x = torch.empty((*x.shape, self.config.dim), dtype=dtype, device=x.device)
            dist.recv(x, group=group, group_src=rank - 1)
        out = super().forward(x, documents, targets_BS, head)
        if self.norm is None:
            while len(self.sent) >= IN_FLIGHT:
                self.sent.popleft()[0].wait()
            out = out.contiguous()
            self.sent.append((dist.isend(out, group=group, group_dst=rank + 1), out))
        return out


def load_shard(folder: Path, world: ParallelContext, dtype: torch.dtype) -> InferenceStage:
    """Return this process's part of the model in `folder`, as `dtype` on its device, in evaluation mode.

    Only the bytes of the part are read, one tensor at a time. Raises ValueError if the files do not describe one model,
    or it cannot be split as `world.layout` says.
    """
    stored = open_model(folder)
    world.layout.check(stored.config, stored.rows, world.size)
    tensor = world.axis("tp")
    with torch.device("meta"):
        model = InferenceStage(stored.config, stored.rows, world)
    for name, parameter in list(model.named_parameters()):
        where = [slice(None)] * parameter.ndim
        if (axis := param_row(name).tp_axis) is not None:
            size = parameter.shape[axis] // tensor.size
            where[axis] = slice(size * tensor.rank, size * (tensor.rank + 1))
        value = stored.slice(name, *where).to(device=world.device, dtype=dtype)
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner).register_parameter(last, nn.Parameter(value, requires_grad=False))
    return model.eval()
