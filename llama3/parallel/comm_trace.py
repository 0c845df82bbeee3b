"""Trace the collectives of one rank of any world: run the engine under fake tensors and count its messages.

Three micro-batches are traced: the first gathers weights (ZeRO-2), the last reduces gradients. Pipeline transfers come
from the schedule, because torch's pipeline runtime does not run under fake tensors. Not traced: times and
torch.compile. The loss uses the chunks of a CPU: its three small sums are more frequent than on a GPU, same bytes.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from herd.llama3.model.transformer import Transformer
from herd.llama3.parallel.comm_records import Collective, RankTrace, StageTrace, transfers
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load, layer_elements, shards, stages
from herd.llama3.parallel.mesh import ParallelContext, make_meshes
from herd.llama3.parallel.parallelize import empty_model_parts, last_micro_batch
from herd.llama3.recipe.sections import Model

TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


KINDS = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
}


@contextmanager
def fake_process_group(layout: Layout, size: int, rank: int, device: str = "cpu") -> Iterator[ParallelContext]:
    """Act as `rank` of `size` processes on a fake process group: collectives return at once, without data.

    Fails with AssertionError in a process that has a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed = torch.distributed
    assert not distributed.is_initialized(), "this process already has a process group"
    distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        yield ParallelContext(rank, size, torch.device(device), layout, *make_meshes(device, layout, size))
    finally:
        distributed.destroy_process_group()


def trace(config: Model, vocab_size: int, layout: Layout, world: int, rank: int, load: Load) -> RankTrace:
    """Return the messages of `rank` of `world` in a step. Document boundaries do not change them.

    Raises ValueError if the layout does not fit `config`, `world` or the sequence.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    layout = layout.model_copy(update={"compile": False, "async_tp": False})
    layout.check(config, vocab_size, world)
    layout.check_sequence(load.seq_len)
    compute = TYPES[load.precision]
    master = torch.promote_types(compute, torch.float32)
    traces = []
    with fake_process_group(layout, world, rank) as context:
        models = empty_model_parts(
            config, vocab_size, context, master, None if compute == master else compute, load.exact
        )
        groups = {name: context.mesh[name].get_group() for name in ("tp", "cp", "replica")}
        groups["fsdp"] = (context.shards if layout.dp_replicate == 1 else context.shards["fsdp"]).get_group()
        axes = {group.group_name: (name, group.size()) for name, group in groups.items() if group.size() > 1}
        for stage in stages(config, layout, context.axis("pp").rank):
            model = models[stage.number]
            with FakeTensorMode(allow_non_fake_inputs=True):
                model.to_empty(device="cpu")
                first, middle, last = (
                    _micro_batch(model, context, load, axes, is_last) for is_last in (False, False, True)
                )
            collectives = [
                Collective(key.kind, key.axis, key.phase, when, key.region, key.bytes, key.dtype, key.group_size, count)
                for when, counts in (("first", first - middle), ("each", middle), ("last", last - middle))
                for key, count in counts.items()
            ]
            collectives += transfers(stage.number, config, layout, load)
            traces.append(StageTrace(stage.number, len(model.layers), collectives))
    return RankTrace(rank, world, traces)


Axes = dict[str, tuple[str, int]]
"""Axis and size of every process group of more than one process, by the group's name."""


def _micro_batch(model: Transformer, context: ParallelContext, load: Load, axes: Axes, last: bool) -> Counter[_Key]:
    """Run one micro-batch forward and backward and return its collectives."""
    layout, tokens = context.layout, load.seq_len // context.layout.cp
    tokens_BS = torch.zeros(load.micro_batch, tokens, dtype=torch.int64)
    x = tokens_BS
    if model.embedding is None:
        shape = load.micro_batch, tokens // layout.tp, model.config.dim
        x = torch.zeros(shape, dtype=TYPES[load.precision], requires_grad=True)
    last_micro_batch(model, last, layout)
    pieces = shards(layout, context.size)
    share = layer_elements(model.config, layout.tp, pieces)
    with _Log(model, axes, (share * pieces, share)) as log:
        out = model(x, None, None if model.norm is None else tokens_BS)
        log.phase = "backward"
        out.sum().backward()  # type: ignore[no-untyped-call]
        counts: Counter[_Key] = log.counts
    return counts


class _Key(NamedTuple):
    kind: str
    axis: str
    phase: str
    region: str
    bytes: int
    dtype: str
    group_size: int


class _Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the collectives of a stage. Hooks tell layers from ends, forward and backward."""

    def __init__(self, model: Transformer, axes: Axes, layer_sizes: tuple[int, int]) -> None:
        """`layer_sizes`: elements of a layer that FSDP gathers, and of a process's share of them."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer_sizes = layer_sizes
        self.axes, self.phase, self.region = axes, "forward", "ends"
        self.counts: Counter[_Key] = Counter()
        self.hooks = []
        for number, block in enumerate(model.layers.values()):
            self.hooks.append(block.register_forward_pre_hook(partial(self._enter, number == 0), prepend=True))
            self.hooks.append(block.register_forward_hook(self._leave))

    def __exit__(self, *error: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _enter(self, first: bool, _: Any, arguments: tuple[Any, ...]) -> None:
        self.region = "layer"
        if first and self.phase == "forward":  # a recomputed layer runs in the backward pass
            arguments[0].register_hook(lambda _: self._at("ends"))

    def _leave(self, _: Any, __: Any, out: Tensor) -> None:
        if self.phase == "forward":
            self.region = "ends"
            out.register_hook(lambda _: self._at("layer"))  # type: ignore[no-untyped-call]

    def _at(self, region: str) -> None:
        self.region = region

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # the loss reads its gradient scale; fake tensors have no data
        result = operator(*arguments, **(more or {}))
        name = operator._schema.name.split("::")[1]
        if operator.namespace not in ("c10d", "_c10d_functional") or name == "wait_tensor":
            return result
        # c10d's operators take the process group boxed, the functional ones its name, last.
        boxed = [value for value in arguments if isinstance(value, torch.ScriptObject)]
        group = ProcessGroup.unbox(boxed[0]).group_name if boxed else arguments[-1]
        if group in self.axes:  # a group of one process sends nothing
            axis, members = self.axes[group]
            whole = arguments[1] if name == "_reduce_scatter_base_" else arguments[0]
            whole = whole[0] if isinstance(whole, list) else whole
            if name == "all_gather_into_tensor":
                whole = result
            region, size = self.region, whole.numel() * whole.dtype.itemsize
            if axis in ("fsdp", "replica"):  # FSDP prefetches the next layer's weights
                region = "layer" if whole.numel() in self.layer_sizes else "ends"
            dtype = str(whole.dtype).removeprefix("torch.")
            self.counts[_Key(KINDS[name], axis, self.phase, region, size, dtype, members)] += 1
        return result


if __name__ == "__main__":
    request = json.load(sys.stdin)
    print(
        trace(
            Model.model_validate(request["model"]),
            request["vocab_size"],
            Layout.model_validate(request["layout"]),
            request["world"],
            request["rank"],
            Load(**request["load"]),
        ).as_json()
    )
