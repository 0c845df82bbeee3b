"""Run pipeline schedules: this rank's stages on its share of the batch, gradients left in the weights.

`pipeline_schedule` gives the order; torch's private pipeline runtime executes it. We change
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

from herd.llama3.parallel.mesh import ParallelContext
from herd.llama3.parallel.pipeline_schedule import Lists, actions, check_split

TORCH = {
    "F": _ComputationType.FORWARD,
    "B": _ComputationType.FULL_BACKWARD,
    "I": _ComputationType.BACKWARD_INPUT,
    "W": _ComputationType.BACKWARD_WEIGHT,
}
GATHER, RELEASE, REDUCE = _ComputationType.UNSHARD, _ComputationType.RESHARD, _ComputationType.REDUCE_GRAD
FORWARD_ONLY = {_ComputationType.FORWARD, _ComputationType.SEND_F, _ComputationType.RECV_F, GATHER, RELEASE}


class Pipeline:
    """This rank's stages of a model, run together with those of the other ranks of the pp axis."""

    def __init__(self, models: Mapping[int, nn.Module], world: ParallelContext) -> None:
        """Take `models`, this rank's `Transformer`s by stage number (stage s is on rank s % pp).

        Raises ValueError if the layout's schedule does not exist, or cannot work with its other settings.
        """
        layout = world.layout
        if layout.schedule == "zero-bubble":
            check_split(layout.zero, layout.recompute, layout.compile)
        self.models, self.world, self.layout = models, world, layout
        self.schedules: dict[tuple[int, int, int, bool], _Schedule] = {}

    def run(
        self, tokens_BS: Tensor, documents_BS: Tensor | None, targets_BS: Tensor, micro_batch: int
    ) -> Tensor | None:
        """Return nats [B, S] on the rank of the last stage and None elsewhere; every pp rank gets the same arguments.

        Gradients of the sum of nats are added to those of the stages, reduced over FSDP's mesh once, at the last
        micro-batch. `micro_batch` sequences go together and divide B; B, S and `micro_batch` may change between calls.
        """
        return self._step(tokens_BS, documents_BS, targets_BS, micro_batch, backward=True)

    @torch.no_grad()
    def evaluate(
        self, tokens_BS: Tensor, documents_BS: Tensor | None, targets_BS: Tensor, micro_batch: int
    ) -> Tensor | None:
        return self._step(tokens_BS, documents_BS, targets_BS, micro_batch, backward=False)

    def _step(
        self, tokens_BS: Tensor, documents_BS: Tensor | None, targets_BS: Tensor, micro_batch: int, backward: bool
    ) -> Tensor | None:
        batch, seq_len = tokens_BS.shape
        assert batch % micro_batch == 0, f"{batch} sequences in micro-batches of {micro_batch}"
        schedule = self._schedule(micro_batch, seq_len, batch // micro_batch, backward)
        inputs = (tokens_BS,) if 0 in self.models else ()
        keywords: dict[str, Any] = {} if documents_BS is None else {"documents": documents_BS}
        if self.layout.stages - 1 in self.models:
            keywords["targets_BS"] = targets_BS
        schedule.step(*inputs, target=targets_BS, return_outputs=False, **keywords)  # type: ignore[no-untyped-call]
        return schedule.take_nll()

    def _schedule(self, micro_batch: int, seq_len: int, count: int, backward: bool) -> _Schedule:
        """Return the schedule of this shape and count; all are kept, they hold no tensors between steps."""
        # torch's stages keep their first shape: another one ended the process (gloo: EnforceNotMet).
        key, layout = (micro_batch, seq_len, count, backward), self.layout
        if key in self.schedules:
            return self.schedules[key]
        stages: list[_Stage] = []
        group = self.world.axis("pp").group
        for number, module in self.models.items():
            # Shapes are given: torch would run a micro-batch forward and back to find them.
            model: Any = module
            dtype = model.compute or next(model.parameters()).dtype
            shape = micro_batch, seq_len // layout.tp, model.config.dim
            hidden_BSD = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            tokens_BS = torch.empty(micro_batch, seq_len, dtype=torch.int64, device="meta")
            wide = torch.promote_types(dtype, torch.float32)
            nll_BS = torch.empty(micro_batch, seq_len, dtype=wide, device="meta", requires_grad=True)
            inputs = tokens_BS if number == 0 else hidden_BSD
            outputs = nll_BS if number == layout.stages - 1 else hidden_BSD
            stages.append(
                _Stage(
                    module,
                    number,
                    layout.stages,
                    self.world.device,
                    input_args=(inputs,),
                    output_args=(outputs,),
                    group=group,
                )
            )
        lists = actions(layout.schedule, layout.pp, layout.vpp, count, layout.microbatch_group_size)
        self.schedules[key] = _Schedule(stages, lists, count, backward, layout.zero == 2)
        return self.schedules[key]


class _Schedule(_PipelineScheduleRuntime):
    """torch's runtime with our action lists. The loss is a sum, so gradients are not divided by the micro-batches."""

    def __init__(self, stages: list[_Stage], lists: Lists, count: int, backward: bool, gather: bool) -> None:
        loss = (lambda nll_BS, targets_BS: nll_BS.sum()) if backward else None
        super().__init__(stages, count, loss_fn=loss, scale_grads=False)  # type: ignore[no-untyped-call]
        self.stages = stages
        computations = {}
        for rank, ours in enumerate(lists):  # gather weights at the start, reduce gradients after a stage's last action
            theirs = [
                _Action(stage, GATHER, None) for stage in dict.fromkeys(action.stage for action in ours) if gather
            ]
            last_of = {action.stage: index for index, action in enumerate(ours)}
            for index, (stage, kind, micro_batch) in enumerate(ours):
                theirs.append(_Action(stage, TORCH[kind], micro_batch))
                if last_of[stage] == index:
                    theirs.append(_Action(stage, REDUCE, None))
                    theirs += [_Action(stage, RELEASE, None)] if gather else []
            computations[rank] = theirs
        ranks = len(lists)
        lowered = _add_send_recv(
            computations, stage_to_rank=lambda stage: stage % ranks, num_stages=stages[0].num_stages
        )
        self._prepare_schedule_with_comms(lowered, format="compute_comms")  # type: ignore[arg-type]
        if not backward:
            for rank, order in self.pipeline_order_with_comms.items():
                self.pipeline_order_with_comms[rank] = [a for a in order if a.computation_type in FORWARD_ONLY]
        if not gather:  # FSDP's hooks gather layer by layer
            self.unsharded_stages.update(stage.stage_index for stage in stages)

    def take_nll(self) -> Tensor | None:
        """Return the nats of all micro-batches of the last step [B, S], once; None without the last stage."""
        nll = [nll_BS for stage in self.stages for nll_BS in stage.nll]
        for stage in self.stages:
            stage.nll.clear()
        return torch.cat(nll) if nll else None


class _Stage(PipelineStage):
    """One stage of the model. Receive buffers exist only from the receive to the end of the backward pass."""

    # torch keeps one buffer per micro-batch, stage and direction: 8.6 GB on a rank of the 405B (TP 8, V 8, M 16). It
    # also keeps sent outputs until their gradient arrives, 4.3 GB there; give_up_data frees them.

    nll: list[Tensor]

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.hidden = (more["output_args"] if self.is_first else more["input_args"])[0]
        self.nll = []

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

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        if kwargs and "documents" in kwargs:  # before FSDP moves it to the device
            model: Any = self.submod
            kwargs = {**kwargs, "documents": model.mask(kwargs["documents"], self.device)}
        infos = self.args_recv_info[fwd_chunk_id]
        for info in _received(infos):
            info.buffer.requires_grad_(self.has_backward)
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        _drop(infos)
        if self.is_last:
            self.nll.append(output.detach())
            if not self.has_backward:
                del self.fwd_cache[fwd_chunk_id]
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **more: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *arguments, **more)  # type: ignore[no-untyped-call]
        _drop(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **more: Any) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **more)  # type: ignore[no-untyped-call]
        if isinstance(self.submod, FSDPModule):
            # FSDP casts gradients to its reduction's type after a backward pass of autograd, which W is not: without
            # this, the W of several micro-batches would be summed in bf16.
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
        info.buffer = torch.empty(0)  # torch reads its attributes, so not None
