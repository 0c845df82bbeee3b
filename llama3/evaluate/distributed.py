"""Several processes that evaluate one model: replicas share the batches, and the processes of a replica the weights.

A replica splits the model over tensor-parallel and pipeline ranks ([dp, pp, cp, tp], as in training) and reads its
shards straight from the model's files, so no process holds all weights. Pipeline stages work on different batches at
the same time, because no stage waits for a score; a decoded token passes through all of them. `SplitRunner` decodes
with such a replica from another process.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

from herd.llama3.evaluate.generate import Dice, ModelRunner, Sampler, TokenLikelihood
from herd.llama3.model.attention import AttentionMask
from herd.llama3.model.files import load_model, open_model
from herd.llama3.model.param_table import param_row
from herd.llama3.model.transformer import Head, Transformer
from herd.llama3.parallel.comms import InferenceComms
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.mesh import Axis, ParallelContext, init_distributed
from herd.llama3.parallel.pipeline_schedule import split_layers
from herd.llama3.recipe.sections import Model
from herd.storage.filesystem import write_atomic

IN_FLIGHT = 2
"""Outputs of a pipeline stage that the next one may not have received yet; each is [B, S, D]."""
TIMEOUT_S = 1800
"""How long a rank of a `SplitRunner` waits for the others, which may still read their weights."""


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
            # the view of rank 0, before any process continues: ranks that disagree would wait for each other
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

    def __init__(self, config: Model, vocab_size: int, world: ParallelContext) -> None:
        """Create this process's stage."""
        self.pipeline: Axis = world.axis("pp")
        first, last = self.pipeline.rank == 0, self.pipeline.rank == self.pipeline.size - 1
        layers = split_layers(config.layers, self.pipeline.size)[self.pipeline.rank]
        super().__init__(config, vocab_size, layers, first, last, InferenceComms(world))
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


def load_shard(folder: Path, world: ParallelContext, dtype: torch.dtype | None) -> InferenceStage:
    """Return this process's part of the model in `folder`, as `dtype` (default: as stored), in evaluation mode.

    Only the bytes of the part are read, one tensor at a time. Raises ValueError if the files do not describe one model,
    or it cannot be split as `world.layout` says.
    """
    stored = open_model(folder)
    world.layout.check(stored.config, stored.vocab_size, world.size)
    tensor = world.axis("tp")
    with torch.device("meta"):
        model = InferenceStage(stored.config, stored.vocab_size, world)
    for name, parameter in list(model.named_parameters()):
        where = [slice(None)] * parameter.ndim
        if (axis := param_row(name).tp_axis) is not None:
            size = parameter.shape[axis] // tensor.size
            where[axis] = slice(size * tensor.rank, size * (tensor.rank + 1))
        value = stored.slice(name, *where)
        value = value.to(device=world.device, dtype=dtype or value.dtype)
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner).register_parameter(last, nn.Parameter(value, requires_grad=False))
    return model.eval()


# A split model decodes: one process schedules and holds no weights, the ranks do what it sends


class Ranks(Protocol):
    """Processes that run `run_rank`, in the order of ranks."""

    connections: list[Connection]
    """To the other end of which each listens."""

    @property
    def alive(self) -> bool:
        """Whether all run."""
        ...

    def failure(self) -> Exception:
        """Return, after one has ended, which and why."""
        ...


@dataclass(frozen=True)
class RankJob:
    """What a rank gets first."""

    folder: Path
    """Of the model."""
    layout: Layout
    dtype: torch.dtype | None
    """Of the weights; None: as stored."""
    device: str
    """cpu or cuda."""
    threads: int


@dataclass(frozen=True)
class Drawn:
    """A number that was drawn where the text's generator is."""

    number: float

    def random(self) -> float:
        return self.number


class SplitRunner:
    """Runs a model that is split over processes.

    Only rank 0 chooses tokens, so that no rounding lets ranks differ; an idle rank waits for its connection without a
    timeout. A method raises `Ranks.failure` if a rank has ended.
    """

    def __init__(self, ranks: Ranks, job: RankJob) -> None:
        """Load the model and return when all ranks have."""
        self._ranks = ranks
        self._failure: Exception | None = None
        self.processes = len(ranks.connections)
        self._send(job)
        self.config, self.vocab_size, self.dtype, self.positions = self._receive()

    def failure(self) -> Exception | None:
        if self._failure is None and not self._ranks.alive:
            self._failure = self._ranks.failure()
        return self._failure

    def read(self, tokens: Sequence[int], known: int, capacity: int) -> None:
        self._send("read", tokens, known, capacity)

    def score(self, tokens: Sequence[int], known: int, capacity: int, top: int) -> list[TokenLikelihood]:
        self._send("score", tokens, known, capacity, top)
        scores: list[TokenLikelihood] = self._receive()
        return scores

    def join(self, capacity: int, rows: int) -> None:
        self._send("join", capacity, rows)

    def leave(self, row: int) -> None:
        self._send("leave", row)

    def decode(self, tokens: Sequence[int]) -> None:
        self._send("decode", tokens)

    def pick(
        self, sampler: Sampler, rows: Sequence[int], dice: Sequence[Dice], tokens: Sequence[Sequence[int]]
    ) -> list[int]:
        drawn = [Drawn(each.random()) for each in dice] if sampler.temperature else []
        read = tokens if sampler.repetition_penalty != 1 else ()
        self._send("pick", sampler, rows, drawn, read, ranks=1)
        picked: list[int] = self._receive()
        return picked

    def likelihoods(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLikelihood]:
        self._send("likelihoods", rows, tokens, top, ranks=1)
        scores: list[TokenLikelihood] = self._receive()
        return scores

    def clear(self) -> None:
        if self._failure is None:
            self._send("clear")

    def _send(self, *call: Any, ranks: int | None = None) -> None:
        """Have the first `ranks` (default: all) call a method of their `ModelRunner`, without waiting for it."""
        if self._failure is not None:
            raise self._failure
        try:
            for connection in self._ranks.connections[:ranks]:
                connection.send(call)
        except OSError:
            self._fail()

    def _receive(self) -> Any:
        """Return rank 0's next message. The others send none: what comes from them is the end."""
        first, *others = self._ranks.connections
        if wait([first, *others]) != [first]:
            self._fail()
        try:
            return first.recv()
        except (EOFError, OSError):
            self._fail()

    def _fail(self) -> NoReturn:
        self._failure = self._failure or self._ranks.failure()
        raise self._failure from None


def run_rank(caller: Connection) -> NoReturn:
    """Be a rank of a `SplitRunner` until it closes the connection; the environment has the variables of torchrun."""
    job: RankJob
    (job,) = caller.recv()
    torch.set_num_threads(job.threads)
    status = 0
    with init_distributed(job.device, TIMEOUT_S, job.layout) as world, torch.inference_mode():
        try:
            runner = ModelRunner(load_shard(job.folder, world, job.dtype))
            positions = min(world.all_gather_object(runner.positions))  # and all have loaded
            if world.is_rank0:
                caller.send((runner.config, runner.vocab_size, runner.dtype, positions))
            while True:
                name, *arguments = caller.recv()
                answer = getattr(runner, name)(*arguments)
                if answer is not None and world.is_rank0:
                    caller.send(answer)
        except (EOFError, ConnectionError):  # the caller has ended
            pass
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stderr.flush()
        os._exit(status)  # without leaving the process group, for which NCCL may wait


if __name__ == "__main__":
    run_rank(Connection(int(sys.argv[1])))
