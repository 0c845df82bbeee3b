"""Run pipeline schedules: this rank's stages on its part of the batch, gradients left in the weights.

`pipeline_schedule` gives the order; torch's private pipeline runtime (the same in 2.11 and 2.13) executes it. We change
four things: receive buffers, sent outputs, gathered weights and the precision of split weight gradients; see the
comments. Zero-bubble runs the backward pass of the loss twice, because torch cannot split a custom function.
Shapes: B sequences, S local tokens of each, D model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from llama3.parallel.mesh import ParallelContext
from llama3.parallel.pipeline_schedule import Action, Lists, actions, check_split

TORCH = {
    "F": _ComputationType.FORWARD,
    "B": _ComputationType.FULL_BACKWARD,
    "I": _ComputationType.BACKWARD_INPUT,
    "W": _ComputationType.BACKWARD_WEIGHT,
}
GATHER, RELEASE, REDUCE = _ComputationType.UNSHARD, _ComputationType.RESHARD, _ComputationType.REDUCE_GRAD
FORWARD_ONLY = {_ComputationType.FORWARD, _ComputationType.SEND_F, _ComputationType.RECV_F, GATHER, RELEASE}


class Pipeline:
    """This rank's parts of a model, run together with those of the other ranks of the pp axis."""

    def __init__(self, parts: Mapping[int, nn.Module], world: ParallelContext) -> None:
        """Take `parts`, this rank's `Transformer`s by stage number (stage s lives on rank s % pp).

        Raises ValueError if the layout's schedule does not exist, or cannot work with its other settings.
        """
        layout = world.layout
        if layout.schedule == "zero-bubble":
            check_split(layout.zero, layout.recompute, layout.compile)
        self.parts, self.world, self.layout = parts, world, layout
        self.schedules: dict[tuple[int, int, int, bool], _Schedule] = {}

    def run(
        self, tokens_BS: Tensor, documents_BS: Tensor | None, targets_BS: Tensor, micro_batch: int
    ) -> Tensor | None:
        """Return nats [B, S] on the rank of the last stage and None elsewhere; every pp rank gets the same arguments.

        Gradients of the sum of nats are added to those of the parts, reduced over FSDP's mesh once, at the last
        micro-batch. `micro_batch` sequences go together and divide B; B, S and `micro_batch` may change between calls.
        """
        return self._step(tokens_BS, documents_BS, targets_BS, micro_batch, backward=True)

    @torch.no_grad()
    def evaluate(
        self, tokens_BS: Tensor, documents_BS: Tensor | None, targets_BS: Tensor, micro_batch: int
    ) -> Tensor | None:
        """Return what `run` returns, without gradients."""
        return self._step(tokens_BS, documents_BS, targets_BS, micro_batch, backward=False)

    def _step(
        self, tokens_BS: Tensor, documents_BS: Tensor | None, targets_BS: Tensor, micro_batch: int, backward: bool
    ) -> Tensor | None:
        batch, seq = tokens_BS.shape
        assert batch % micro_batch == 0, f"{batch} sequences in micro-batches of {micro_batch}"
        schedule = self._schedule(micro_batch, seq, batch // micro_batch, backward)
        inputs = (tokens_BS,) if 0 in self.parts else ()
        more: dict[str, Any] = {} if documents_BS is None else {"documents": documents_BS}
        if self.layout.stages - 1 in self.parts:
            more["targets_BS"] = targets_BS
        schedule.step(*inputs, target=targets_BS, return_outputs=False, **more)  # type: ignore[no-untyped-call]
        return schedule.take_nats()

    def _schedule(self, micro_batch: int, seq: int, count: int, backward: bool) -> _Schedule:
        """Return the schedule of this shape and count; all are kept, they hold no tensors between steps.

        torch's stages keep the first shape that they saw: another one ended the process (gloo: EnforceNotMet).
        """
        key = micro_batch, seq, count, backward
        if key not in self.schedules:
            layout = self.layout
            lists = actions(layout.schedule, layout.pp, layout.virtual, count, layout.contiguous)
            stages = [self._stage(number, micro_batch, seq) for number in self.parts]
            self.schedules[key] = _Schedule(stages, lists, count, backward, layout.zero == 2)
        return self.schedules[key]

    def _stage(self, number: int, micro_batch: int, seq: int) -> _Stage:
        """Return a new stage of known shapes: torch finds them out by running a micro-batch forward and back."""
        part: Any = self.parts[number]
        dtype = part.compute or next(part.parameters()).dtype
        shape = micro_batch, seq // self.layout.tp, part.spec.dim
        hidden_BSD = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        tokens_BS = torch.empty(micro_batch, seq, dtype=torch.int64, device="meta")
        wide = torch.promote_types(dtype, torch.float32)
        nats_BS = torch.empty(micro_batch, seq, dtype=wide, device="meta", requires_grad=True)
        first, last = number == 0, number == self.layout.stages - 1
        return _Stage(
            part,
            number,
            self.layout.stages,
            self.world.device,
            input_args=(tokens_BS if first else hidden_BSD,),
            output_args=(nats_BS if last else hidden_BSD,),
            group=self.world.axis("pp").group,
        )


class _Schedule(_PipelineScheduleRuntime):
    """torch's runtime with our action lists. The loss is a sum, so gradients are not divided by the micro-batches."""

    def __init__(self, stages: list[_Stage], lists: Lists, count: int, backward: bool, gather: bool) -> None:
        loss = _total if backward else None
        super().__init__(stages, count, loss_fn=loss, scale_grads=False)  # type: ignore[no-untyped-call]
        self.stages = stages
        ranks = len(lists)
        lowered = _add_send_recv(
            {rank: _with_weights(mine, gather) for rank, mine in enumerate(lists)},
            stage_to_rank=lambda stage: stage % ranks,
            num_stages=stages[0].num_stages,
        )
        self._prepare_schedule_with_comms(lowered, format="compute_comms")  # type: ignore[arg-type]
        if not backward:
            for rank, mine in self.pipeline_order_with_comms.items():
                self.pipeline_order_with_comms[rank] = [a for a in mine if a.computation_type in FORWARD_ONLY]
        if not gather:  # FSDP's hooks gather layer by layer
            self.unsharded_stages.update(stage.stage_index for stage in stages)

    def take_nats(self) -> Tensor | None:
        """Return the nats of all micro-batches of the last step [B, S], once; None without the last stage."""
        nats = [nats_BS for stage in self.stages for nats_BS in stage.nats]
        for stage in self.stages:
            stage.nats.clear()
        return torch.cat(nats) if nats else None


class _Stage(PipelineStage):
    """One stage of the model. Receive buffers exist only from the receive to the end of the backward pass."""

    # torch keeps one buffer per micro-batch, stage and direction: 8.6 GB on a rank of the 405B (TP 8, V 8, M 16). It
    # also keeps sent outputs until their gradient arrives, 4.3 GB there; give_up_data frees them.

    nats: list[Tensor]

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.hidden = (more["output_args"] if self.is_first else more["input_args"])[0]
        self.nats = []

    def _prepare_forward_infra(self, *arguments: Any, **more: Any) -> Any:
        result = super()._prepare_forward_infra(*arguments, **more)
        _drop(chain.from_iterable(self.args_recv_info.values()))
        return result

    def _prepare_backward_infra(self, *arguments: Any, **more: Any) -> Any:
        result = super()._prepare_backward_infra(*arguments, **more)
        _drop(chain.from_iterable(self.grad_recv_info.values()))
        return result

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        self._fill(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        self._fill(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
            return operations
        for operation in operations:
            operation.tensor = operation.tensor.detach()
        for returned in self.fwd_cache[fwd_chunk_id][0]:
            give_up_data(returned)
        return operations

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **more: Any) -> Any:
        infos = self.args_recv_info[fwd_chunk_id]
        for info in _received(infos):
            info.buffer.requires_grad_(self.has_backward)
        output = super().forward_one_chunk(fwd_chunk_id, *arguments, **more)  # type: ignore[no-untyped-call]
        _drop(infos)
        if self.is_last:
            self.nats.append(output.detach())
            if not self.has_backward:
                del self.fwd_cache[fwd_chunk_id]
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **more: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *arguments, **more)  # type: ignore[no-untyped-call]
        _drop(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **more: Any) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **more)  # type: ignore[no-untyped-call]
        if isinstance(self.submod, FSDPModule):
            # FSDP moves gradients to the type of its reduction after a backward pass of autograd, which W is not:
            # without this the W of several micro-batches were added up in bf16
            fully_shard.state(self.submod)._root_post_backward_final_callback()  # type: ignore[attr-defined]

    def _fill(self, infos: Iterable[Any]) -> None:
        for info in _received(infos):
            info.buffer = torch.empty(self.hidden.shape, dtype=self.hidden.dtype, device=self.device)


def give_up_data(returned: Tensor) -> None:
    """Free the data of a tensor; a backward pass needs only its shape and graph node."""
    returned.data = returned.new_empty(()).expand_as(returned)


def _received(infos: Iterable[Any]) -> list[Any]:
    """Return the buffer records of tensors that come from another rank."""
    return [info for info in infos if getattr(info, "source", None) is not None]


def _drop(infos: Iterable[Any]) -> None:
    for info in _received(infos):
        info.buffer = torch.empty(0)  # torch 2.11 sets its .grad, so not None


def _total(nats_BS: Tensor, targets_BS: Tensor) -> Tensor:
    return nats_BS.sum()


def _with_weights(mine: list[Action], gather: bool) -> list[_Action]:
    """Return torch's actions of one rank: gather weights at the start, reduce gradients after a stage's last."""
    lowered = [_Action(stage, GATHER, None) for stage in dict.fromkeys(action.stage for action in mine) if gather]
    ends = {action.stage: place for place, action in enumerate(mine)}
    for place, (stage, kind, micro_batch) in enumerate(mine):
        lowered.append(_Action(stage, TORCH[kind], micro_batch))
        if ends[stage] == place:
            lowered.append(_Action(stage, REDUCE, None))
            if gather:
                lowered.append(_Action(stage, RELEASE, None))
    return lowered
