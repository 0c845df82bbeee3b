"""What the parts of a rank really hold and send, for tests of the memory table and of the trace."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from herd.llama3.model.transformer import Transformer
from herd.llama3.parallel.check_layout import check_layout
from herd.llama3.parallel.comm_trace import TYPES, fake_process_group, trace
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load, RankCoords, shards, stages
from herd.llama3.parallel.mesh import ParallelContext, to_local
from herd.llama3.parallel.parallelize import empty_model_parts, last_micro_batch
from herd.llama3.parallel.pipeline import give_up_data
from herd.llama3.recipe.sections import Model

VOCAB_SIZE = 512
OPTIONAL = [name for name, field in Model.model_fields.items() if not field.is_required()]
VALUES = {
    "preset": "2m",
    "tied_embeddings": True,
    "rope_theta": 1e4,
    "rope_scaling": {},
    "norm_eps": 1e-6,
    "embedding_std": 1.0,
}
"""Another value than the default of each optional field, for tests of what a model may have; add that of a new one."""


def shape(**changes: Any) -> Model:
    """Three layers, uneven on purpose: no two dimensions are equal."""
    numbers = {"layers": 3, "dim": 64, "ffn": 224, "heads": 8, "kv_heads": 4, "max_seq_len": 512}
    return Model.model_validate({**numbers, **changes})


def local_parameters(config: Model, vocab_size: int, layout: Layout, world: int, rank: int) -> int:
    """Return the number of parameters on `rank`; what tensor parallelism does not cut counts on each of its ranks."""
    place, pieces = RankCoords.from_rank(rank, layout), shards(layout, world)
    within = place.dp % (layout.dp(world) // layout.dp_replicate)
    mine = within * layout.cp + place.cp
    parts = stages(config, layout, place.pp)
    shapes = [param.local_shape(layout.tp) for stage in parts for param in stage.params(config, vocab_size)]
    total = 0
    for first, *rest in shapes:  # FSDP shards the first axis; the last shards may be short or empty
        size = -(-first // pieces)
        total += min(size, max(0, first - mine * size)) * prod(rest)
    return total


def held(config: Model, layout: dict[str, Any], world: int, rank: int, load: Load) -> dict[str, int]:
    """Return bytes alive in the first stage of `rank`, fake CPU tensors, in a step of two micro-batches.

    steady: alive after the backward pass of the first one. Of the last one, kept: made by its forward pass and alive
    after it; peak: the most at once of what it made, the reduction included.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    compute = TYPES[load.precision]
    master = torch.promote_types(compute, torch.float32)
    amx = patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True, create=True)  # else attention is in fp32
    with amx, fake_process_group(Layout(**layout), world, rank) as place:
        parts = empty_model_parts(config, VOCAB_SIZE, place, master, None if compute == master else compute, load.exact)
        part = next(iter(parts.values()))
        with FakeTensorMode(allow_non_fake_inputs=True):
            part.to_empty(device="cpu")
            steady = _run(part, place, load, last=False)["after"]
            last = _run(part, place, load, last=True)
            return {"kept": last["kept"], "steady": steady, "peak": last["peak"]}


def all_held(requests: Sequence[tuple[Model, dict[str, Any], int, int, Load]]) -> list[dict[str, int]]:
    """Return `held` of each request."""
    return [held(*request) for request in requests]


def _run(part: Transformer, place: ParallelContext, load: Load, last: bool) -> dict[str, int]:
    tokens = load.seq_len // place.layout.cp
    here_BS = torch.zeros(load.micro_batch, tokens, dtype=torch.int64)
    documents_BS = torch.zeros(load.micro_batch, load.seq_len, dtype=torch.int64) if place.layout.cp > 1 else None
    last_micro_batch(part, last, place.layout)
    with Alive(watch=last) as alive:
        x = here_BS
        if part.embedding is None:  # what the stage before sent belongs to this one
            shape_BSD = load.micro_batch, tokens // place.layout.tp, part.config.dim
            x = torch.zeros(shape_BSD, dtype=TYPES[load.precision], requires_grad=True)
        out = part(x, documents_BS, None if part.norm is None else here_BS)
        if part.norm is None:  # it was sent
            give_up_data(out)
        kept = alive.bytes()
        out.sum().backward()
        del out, x
        return {"kept": kept, "after": alive.bytes(), "peak": alive.peak}


class Alive(TorchDispatchMode):
    """Bytes of the storages that were made since it was entered and are still there."""

    def __init__(self, watch: bool) -> None:
        """`watch` looks for the peak at every operation, half of the time of a run."""
        super().__init__()
        self.watch = watch
        self.made: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        before = {_storage(each)._cdata for each in tree_iter((arguments, more)) if isinstance(each, torch.Tensor)}
        result = operator(*arguments, **(more or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor) and _storage(each)._cdata not in before:
                self.made.setdefault(_storage(each)._cdata, StorageWeakRef(_storage(each)))
        if self.watch:
            self.peak = max(self.peak, self.bytes())
        return result

    def bytes(self) -> int:
        total = 0
        for key, reference in list(self.made.items()):
            storage = None if reference.expired() else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.made[key]
            else:
                total += storage.nbytes()
        return total


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return to_local(tensor).untyped_storage()


def traced(config: Model, vocab_size: int, requests: Sequence[tuple[dict[str, Any], int, int, Load]]) -> list[str]:
    """Return the trace of each request (layout, world, rank, load) as JSON."""
    return [
        trace(config, vocab_size, Layout(**layout), world, rank, load).as_json()
        for layout, world, rank, load in requests
    ]


def checked(
    config: Model, vocab_size: int, requests: Sequence[tuple[dict[str, Any], int, Load, Sequence[int]]]
) -> list[Any]:
    """Return the check of each request (layout, world, load, ranks); the process may join a real group afterwards."""
    found = [
        check_layout(config, vocab_size, Layout(**layout), world, load, ranks)
        for layout, world, load, ranks in requests
    ]
    assert not torch.distributed.is_initialized()
    return found


def names_and_shapes(layout: dict[str, Any], world: int) -> list[dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return, for each rank of `world`, the global and the local shape of every parameter."""
    found = []
    for rank in range(world):
        with fake_process_group(Layout(**layout), world, rank) as place:
            parts = empty_model_parts(shape(), VOCAB_SIZE, place, torch.float32, None)
            named = [pair for part in parts.values() for pair in part.named_parameters()]
            found.append({name: (tuple(each.shape), tuple(to_local(each).shape)) for name, each in named})
    return found
