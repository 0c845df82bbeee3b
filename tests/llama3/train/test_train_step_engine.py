"""One step of the engine in this process: its number formats, and what it makes of the numbers of a second process."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from herd.llama3.model.linear import weight_casts
from herd.llama3.parallel.mesh import ParallelContext
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.train.callbacks import StepResult
from herd.llama3.train.data_loader import LocalBatch, Step
from herd.llama3.train.job import TrainJob
from herd.llama3.train.loss_spikes import SpikeGuard
from herd.llama3.train.state import Precision, TrainState
from herd.llama3.train.train_step import Engine
from tests.llama3.train.checkpoint_samples import ALONE
from tests.llama3.train.train_samples import VOCAB_SIZE, recipe

SEQUENCES, SEQ = 4, 16


def engine(precision: Any, micro_batch: int = SEQUENCES) -> Engine:
    settings = recipe(precision=precision, z_loss=0.01, optimizer={"clip": 0.5})
    state = TrainState(settings, VOCAB_SIZE, Precision.from_recipe(settings, ALONE.device), ALONE, 0)
    state.reset(settings, 0, ALONE)
    paths = dict.fromkeys(("recipe", "tokens", "work"), Path("unused"))
    job = TrainJob(stage="main", micro_batch=micro_batch, **paths)
    return Engine(state, settings, job, ALONE, SpikeGuard(settings.spikes, ALONE.device))


def batch(sequences: int = SEQUENCES, seed: int = 0) -> LocalBatch:
    """Two documents in each sequence; every seventh token has no target; each sequence has its own domain."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(VOCAB_SIZE, (sequences, SEQ), generator=generator) for _ in range(2))
    targets.view(-1)[seed::7] = -100
    domains = (torch.arange(sequences) + seed)[:, None].expand(-1, SEQ) % len(DOMAINS)
    return LocalBatch(tokens, targets, domains, (torch.arange(SEQ) > 6).long().expand(sequences, -1))


def joined(*batches: LocalBatch) -> LocalBatch:
    return LocalBatch(*(torch.cat(columns) for columns in zip(*(vars(data).values() for data in batches), strict=True)))


def train(of: Engine, data: LocalBatch, stop: bool = False) -> StepResult:
    return of.train_step(Step(0, SEQ, data.tokens_BS.numel()), data, 1e-2, stop, save=False).read()


def clipped_mean(of: Engine) -> dict[str, Tensor]:
    """Return the gradient of the first update: the first moment is a tenth of it."""
    return {name: of.state.optimizer.state[weight]["exp_avg"] / 0.1 for name, weight in of.state.parameters.items()}


def test_a_float8_step_casts_weights_once_and_has_the_bits_of_every_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("herd.llama3.train.state.check_device", lambda device: None)
    casts: list[int] = []

    def counted(weights: list[Tensor], *more: Any) -> Any:
        casts.append(len(weights))
        return weight_casts(weights, *more)

    monkeypatch.setattr("herd.llama3.model.linear.weight_casts", counted)
    kept, single = engine("fp8", micro_batch=1), engine("fp8", micro_batch=1)
    results = [train(kept, batch(seed=seed)) for seed in range(3)]
    layers = len(kept.state.model_parts[0].layers)
    assert casts == [7] * layers * 3
    monkeypatch.setattr("herd.llama3.train.train_step.casts_kept", lambda models: nullcontext())
    assert results == [train(single, batch(seed=seed)) for seed in range(3)]
    weights = zip(kept.state.parameters.values(), single.state.parameters.values(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)
    train(engine("fp8"), batch())  # one micro-batch: nothing to keep them for
    assert len(casts) == layers * 3


def linked(exchange: Callable[[Tensor], Tensor]) -> ParallelContext:
    """Return the first of two processes, which sums by `exchange`."""

    class Linked(ParallelContext):
        def sum(self, tensor: Tensor) -> Tensor:
            return exchange(tensor)

    return Linked(0, 2, ALONE.device)


class Operators(TorchDispatchMode):
    """Names of the operators that compute something in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        out = function(*arguments, **(keywords or {}))
        written = arguments[0] if out is None and arguments else out  # _foreach operators return nothing
        tensors = written if isinstance(written, list | tuple) else [written]
        if not function.is_view and any(
            isinstance(tensor, Tensor) and tensor.dtype == torch.bfloat16 for tensor in tensors
        ):
            self.names.add(function._schema.name.removeprefix("aten::"))
        return out


MEMORY = {"_to_copy", "copy_", "cat", "empty_like", "_unsafe_view"}
KERNELS = {"mm", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"}
POINTWISE = {"add", "mul", "mul_", "silu", "silu_backward"}


def test_a_bf16_step_sums_only_in_kernels_whose_sums_are_fp32() -> None:
    """Norms, softmax, loss, gradients over micro-batches and the update are wide; the tally of a step is fp64."""
    trained = engine("bf16", micro_batch=1)
    sent: list[Tensor] = []
    trained.world = linked(lambda tensor: sent.append(tensor) or tensor)  # type: ignore[func-returns-value]
    with Operators() as seen:
        train(trained, batch())
    assert seen.names == MEMORY | KERNELS | POINTWISE
    assert [tensor.dtype for tensor in sent] == [torch.float64]
    held = [*trained.state.parameters.values(), *clipped_mean(trained).values()]
    assert {tensor.dtype for tensor in held} == {torch.float32}


def test_a_step_without_a_target_is_an_error_and_changes_no_weight() -> None:
    """Its mean is over nothing; weight decay must not move the weights of a step that the journal does not have."""
    trained, data = engine("fp32"), batch()
    before = {name: weight.detach().clone() for name, weight in trained.state.parameters.items()}
    data.targets_BS.fill_(-100)
    with pytest.raises(ValueError, match=r"^stages: no token of the step from 0 to 64 is a target"):
        train(trained, data)
    assert all(torch.equal(weight, before[name]) for name, weight in trained.state.parameters.items())


def test_the_error_of_bf16_gradients_does_not_grow_with_the_number_of_micro_batches() -> None:
    data = joined(*[batch()] * 16)  # equal gradients: a sum in bf16 would stop to grow
    exact, few, many = (engine(*how) for how in (("fp64", 64), ("bf16", 64), ("bf16", 1)))
    for trained in (exact, few, many):
        train(trained, data)
    for name, gradient in clipped_mean(exact).items():
        errors = [(clipped_mean(bf16)[name] - gradient).norm() / gradient.norm() for bf16 in (few, many)]
        assert errors[1] < 1.5 * errors[0] < 0.1, name


def test_a_step_of_two_processes_has_the_sums_of_both() -> None:
    """Of nats, targets and squares; a request of one is one of both. Gradients are the shares of two shards."""
    first, second, whole, here, peer = (engine("fp64") for _ in range(5))
    ours, theirs = batch(), batch(3, seed=2)
    alone = [train(first, ours), train(second, theirs)]
    one = train(whole, joined(ours, theirs))
    sent: list[Tensor] = []
    peer.world = linked(lambda tensor: sent.append(tensor.clone()) or tensor)  # type: ignore[func-returns-value]
    train(peer, theirs, stop=True)
    here.world = linked(lambda tensor: tensor + sent[0])
    both = train(here, ours)
    assert (both.targets, both.stop, both.save, both.skipped) == (one.targets, True, False, False)
    assert both.loss == pytest.approx(one.loss, rel=1e-12)
    assert both.domain_loss == pytest.approx(one.domain_loss, rel=1e-12)
    norm = math.hypot(*(result.grad_norm * result.targets for result in alone)) / one.targets
    assert both.grad_norm == pytest.approx(norm, rel=1e-12)
    for name, gradient in clipped_mean(first).items():
        mean = gradient * alone[0].grad_norm / 0.5 * alone[0].targets / one.targets
        torch.testing.assert_close(clipped_mean(here)[name], mean * 0.5 / norm, rtol=1e-9, atol=1e-15)
