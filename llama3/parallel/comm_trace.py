"""Trace the collectives of one rank of any world: run the engine under fake tensors and count its messages.

The rank's stages are built on torch's fake process group; forward and backward run without data. Three micro-batches
are traced: the first gathers weights (ZeRO-2), the last reduces gradients. Pipeline transfers come from the schedule,
because torch's pipeline runtime does not run under fake tensors. Not traced: times and torch.compile. The loss uses
the chunks of a CPU: its three small sums are more frequent than on a GPU, with the same bytes.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from llama3.model.transformer import Transformer
from llama3.parallel.comm_records import Collective, RankTrace, StageTrace, transfers
from llama3.parallel.layout import Layout
from llama3.parallel.memory import Load, layer_weights, shards, stages
from llama3.parallel.mesh import ParallelContext, make_meshes
from llama3.parallel.parallelize import empty_parts, last_micro_batch
from llama3.recipe.sections import Model

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
def imagined(layout: Layout, size: int, rank: int) -> Iterator[ParallelContext]:
    """Act as `rank` of `size` processes on a fake process group: collectives return at once, without data.

    Fails with AssertionError in a process that has a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed = torch.distributed
    assert not distributed.is_initialized(), "this process already has a process group"
    distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        yield ParallelContext(rank, size, torch.device("cpu"), layout, *make_meshes("cpu", layout, size))
    finally:
        distributed.destroy_process_group()


def trace(spec: Model, rows: int, layout: Layout, world: int, rank: int, load: Load) -> RankTrace:
    """Return the messages of `rank` of `world` in a step. Document boundaries do not change them.

    Raises ValueError if the layout does not fit `spec`, `world` or the sequence.
    """
    layout = layout.model_copy(update={"compile": False, "async_tp": False})
    layout.check(spec, rows, world)
    layout.check_sequence(load.seq)
    compute = TYPES[load.compute]
    master = torch.promote_types(compute, torch.float32)
    with imagined(layout, world, rank) as place:
        parts = empty_parts(spec, rows, place, master, None if compute == master else compute, load.exact)
        axes = _axes(place)
        found = [
            _stage(parts[part.number], part.number, place, load, axes)
            for part in stages(spec, layout, place.axis("pp").rank)
        ]
    return RankTrace(rank, world, found)


Axes = dict[str, tuple[str, int]]
"""Axis and size of every process group of more than one process, by the group's name."""


def _axes(place: ParallelContext) -> Axes:
    groups = {name: place.mesh[name].get_group() for name in ("tp", "cp", "replica")}
    groups["fsdp"] = (place.shards if place.layout.replicas == 1 else place.shards["fsdp"]).get_group()
    return {group.group_name: (name, group.size()) for name, group in groups.items() if group.size() > 1}


def _stage(part: Transformer, number: int, place: ParallelContext, load: Load, axes: Axes) -> StageTrace:
    from torch._subclasses.fake_tensor import FakeTensorMode

    moments = ("first", "each", "last")
    with FakeTensorMode(allow_non_fake_inputs=True):
        part.to_empty(device="cpu")
        counts = {when: _micro_batch(part, place, load, axes, when == "last") for when in moments}
    every = counts["each"]
    rest = {"first": counts["first"] - every, "each": every, "last": counts["last"] - every}
    collectives = [
        Collective(key.kind, key.axis, key.phase, when, key.place, key.bytes, key.dtype, key.group_size, count)
        for when in moments
        for key, count in rest[when].items()
    ]
    return StageTrace(number, len(part.layers), [*collectives, *transfers(number, part.spec, place.layout, load)])


def _micro_batch(part: Transformer, place: ParallelContext, load: Load, axes: Axes, last: bool) -> Counter[_Key]:
    """Run one micro-batch forward and backward and return its collectives."""
    layout, tokens = place.layout, load.seq // place.layout.cp
    here_BS = torch.zeros(load.micro_batch, tokens, dtype=torch.int64)
    x = here_BS
    if part.embedding is None:
        shape = load.micro_batch, tokens // layout.tp, part.spec.dim
        x = torch.zeros(shape, dtype=TYPES[load.compute], requires_grad=True)
    last_micro_batch(part, last, layout.zero)
    share = sum(weight.slot(layout.tp, shards(layout, place.size)) for weight in layer_weights(part.spec))
    with _Log(part, axes, (share * shards(layout, place.size), share)) as log:
        out = part(x, None, None if part.norm is None else here_BS)
        log.phase = "backward"
        out.sum().backward()  # type: ignore[no-untyped-call]
        counts: Counter[_Key] = log.counts
    return counts


class _Key(NamedTuple):
    kind: str
    axis: str
    phase: str
    place: str
    bytes: int
    dtype: str
    group_size: int


class _Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the collectives of a stage. Hooks tell layers from ends, forward and backward."""

    def __init__(self, part: Transformer, axes: Axes, layer_sizes: tuple[int, int]) -> None:
        """`layer_sizes`: elements of a layer that FSDP gathers, and of a process's share of them."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer_sizes = layer_sizes
        self.axes, self.phase, self.place = axes, "forward", "ends"
        self.counts: Counter[_Key] = Counter()
        self.hooks = []
        for number, block in enumerate(part.layers.values()):
            self.hooks.append(
                block.register_forward_pre_hook(self._enter_first if number == 0 else self._enter, prepend=True)
            )
            self.hooks.append(block.register_forward_hook(self._leave))

    def __exit__(self, *error: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _enter(self, *_: Any) -> None:
        self.place = "layer"

    def _enter_first(self, _: Any, arguments: tuple[Any, ...]) -> None:
        self.place = "layer"
        if self.phase == "forward":  # a recomputed layer runs in the backward pass
            arguments[0].register_hook(lambda _: self._at("ends"))

    def _leave(self, _: Any, __: Any, out: Tensor) -> None:
        if self.phase == "forward":
            self.place = "ends"
            out.register_hook(lambda _: self._at("layer"))  # type: ignore[no-untyped-call]

    def _at(self, place: str) -> None:
        self.place = place

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # the loss reads its gradient scale; fake tensors have no data
        result = operator(*arguments, **(more or {}))
        if operator.namespace in ("c10d", "_c10d_functional"):
            self._count(operator._schema.name.split("::")[1], arguments, result)
        return result

    def _count(self, name: str, arguments: Any, result: Any) -> None:
        if name == "wait_tensor":
            return
        name_of_group = _group(arguments)
        if name_of_group not in self.axes:  # a group of one process sends nothing
            return
        (axis, members), place = self.axes[name_of_group], self.place
        whole = _whole(name, arguments, result)
        if axis in ("fsdp", "replica"):  # FSDP prefetches the next layer's weights
            place = "layer" if whole.numel() in self.layer_sizes else "ends"
        size = whole.numel() * whole.dtype.itemsize
        self.counts[_Key(KINDS[name], axis, self.phase, place, size, _name(whole.dtype), members)] += 1


def _group(arguments: Any) -> str:
    """Return the name of an operator's process group: c10d's take it boxed, the functional ones its name, last."""
    boxed = [value for value in arguments if isinstance(value, torch.ScriptObject)]
    name: str = ProcessGroup.unbox(boxed[0]).group_name if boxed else arguments[-1]
    return name


def _whole(name: str, arguments: Any, result: Any) -> Tensor:
    if name == "all_gather_into_tensor":
        return result  # type: ignore[no-any-return]
    first = arguments[1] if name == "_reduce_scatter_base_" else arguments[0]
    return first[0] if isinstance(first, list) else first  # type: ignore[no-any-return]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    request = json.load(sys.stdin)
    print(
        trace(
            Model.model_validate(request["model"]),
            request["rows"],
            Layout.model_validate(request["layout"]),
            request["world"],
            request["rank"],
            Load(**request["load"]),
        ).as_json()
    )
