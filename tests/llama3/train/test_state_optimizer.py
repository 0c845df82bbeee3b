"""AdamW as published, what decays, what a bad step leaves alone, exact sums, and what a state says of its training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.model.files import CheckpointModel
from herd.llama3.model.linear import GRID, local_weight
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model, Optimizer
from herd.llama3.train.checkpoint.dcp import save_state
from herd.llama3.train.checkpoint.manager import load_state
from herd.llama3.train.checkpoint.manifest import CheckpointManifest
from herd.llama3.train.state import Precision, TrainState, adamw
from herd.llama3.train.train_step import PIECE, scale, squared_norm
from tests.dist import run
from tests.llama3.parallel.layout_samples import norm_of_replicated_and_sharded
from tests.llama3.train.checkpoint_samples import ALONE
from tests.llama3.train.train_samples import STEP, VOCAB_SIZE, recipe


def test_a_state_says_the_longest_sequence_that_it_was_trained_on(tmp_path: Path) -> None:
    """Also in the middle of a stage, after initial or loaded weights, and where a later stage has shorter sequences."""
    lengths = [("a", 16), ("b", [16, 32]), ("c", 16)]
    stage = {"for": f"{4 * STEP} tokens", "batch": f"{STEP} tokens", "mix": "base"}
    asked = recipe(stages=[{"name": name, "seq_len": length, **stage} for name, length in lengths])

    def state(start: int) -> TrainState:
        return TrainState(asked, VOCAB_SIZE, Precision(torch.float32), ALONE, start * STEP)

    def longest(made: TrainState, step: int) -> int:
        made.position = step * STEP
        save_state(tmp_path / str(step), made, "", ALONE)
        return CheckpointModel(tmp_path / str(step)).config.max_seq_len

    def after(step: int, begin: int) -> TrainState:
        made, folder = state(begin), tmp_path / str(step)
        load_state(folder, CheckpointManifest.read(folder), made, ALONE)
        return made

    first = state(0)
    assert [longest(first, step) for step in (0, 4)] == [16, 16]
    second = after(4, 4)
    assert [longest(second, step) for step in (5, 6, 7, 8)] == [16, 16, 32, 32]
    assert longest(after(8, 8), 12) == 32
    resumed = after(8, 4)
    resumed.reset(asked, 0, ALONE)
    assert longest(resumed, 3) == 16, "as it was before it was loaded"


def named(tied: bool = False) -> dict[str, torch.nn.Parameter]:
    config = {"layers": 1, "dim": 16, "ffn": 24, "heads": 2, "kv_heads": 1, "max_seq_len": 8, "tied_embeddings": tied}
    model = build_model(Model.model_validate(config), 32, 0, torch.float32, torch.device("cpu"))
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("fields", "free"),
    [
        ({}, {"embedding.weight", "norm.weight", "layers.0.attention_norm.weight", "layers.0.ffn_norm.weight"}),
        ({"decay_embeddings": True}, {"norm.weight", "layers.0.attention_norm.weight", "layers.0.ffn_norm.weight"}),
        ({"decay_norms": True}, {"embedding.weight"}),
    ],
)
def test_norms_and_embeddings_decay_only_when_asked(fields: dict[str, bool], free: set[str]) -> None:
    parameters = named()
    optimizer = adamw(parameters, Optimizer(weight_decay=0.1, **fields))
    names = {id(parameter): name for name, parameter in parameters.items()}
    decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name for name, value in decay.items() if value == 0} == free
    assert {value for name, value in decay.items() if name not in free} == {0.1}


def test_a_bad_step_changes_neither_weights_nor_moments() -> None:
    parameters = named()
    optimizer = adamw(parameters, Optimizer())
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for bad, finite in ((0.0, True), (1.0, False), (0.0, True)):
        before = [p.detach().clone() for p in parameters.values()]
        steps = [float(moments["step"]) for moments in optimizer.state.values()]
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, 0.5 if finite else torch.inf)
        optimizer.found_inf = torch.tensor(bad)  # type: ignore[attr-defined]
        optimizer.step()
        changed = [not torch.equal(a, b) for a, b in zip(before, parameters.values(), strict=True)]
        assert all(changed) if finite else not any(changed)
        after = [float(moments["step"]) for moments in optimizer.state.values()]
        assert after == [step + finite for step in steps]
        assert all(moments["exp_avg"].isfinite().all() for moments in optimizer.state.values())


def updated(weights: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """Return the weights and both moments [3, D] of a norm after deterministic steps."""
    model = {"layers": 1, "dim": len(weights), "ffn": 8, "heads": 1, "kv_heads": 1, "max_seq_len": 32}
    settings = recipe(precision="fp32", model=model)
    state = TrainState(settings, VOCAB_SIZE, Precision(torch.float32), ALONE, 0, exact=True)
    norm = state.parameters["norm.weight"]
    with torch.no_grad():
        norm.copy_(weights)
    for group in state.optimizer.param_groups:
        group["lr"] = 0.01
    for gradient in gradients:
        norm.grad = gradient.clone()
        state.optimizer.step()
    moments = state.optimizer.state[norm]
    return torch.stack([norm.detach(), moments["exp_avg"], moments["exp_avg_sq"]])


def test_a_deterministic_update_has_the_same_bits_in_shards_of_any_size() -> None:
    """A fused one rounds the last elements, which fill no vector, otherwise than the first."""
    values = torch.randn(6, 48, generator=torch.Generator().manual_seed(1))
    weights, gradients = values[0], values[1:]
    shards = [updated(weights[first : first + 12], gradients[:, first : first + 12]) for first in range(0, 48, 12)]
    assert torch.equal(torch.cat(shards, 1), updated(weights, gradients))


def test_norm_and_scale_lose_no_small_gradient_beside_a_large_one() -> None:
    """In fp32, the squares of the others would be lost beside 2^26."""
    parameters = list(named().values())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
        parameter.grad.view(-1)[0] = 2**13
    squares = sum(2**26 + parameter.numel() - 1 for parameter in parameters)
    assert float(squared_norm(parameters, exact=True)) == pytest.approx(squares, rel=1e-14)
    assert float(squared_norm(parameters)) == pytest.approx(squares, rel=1e-6)  # some within a piece
    scale(parameters, torch.tensor(0.25, dtype=torch.float64))
    assert float(squared_norm(parameters, exact=True)) == pytest.approx(squares / 16, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, 5 * PIECE + 3, 2**20])
def test_the_norm_of_pieces_is_that_of_fp64(size: int, dtype: torch.dtype) -> None:
    """Also in shards, out of order in memory, and of very different sizes."""
    dice = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=dice) * torch.logspace(-6, 3, size)
    parameter = torch.nn.Parameter(torch.zeros(size, 2, dtype=dtype))
    parameter.grad = torch.stack([values, values.flip(0)]).to(dtype).T  # not contiguous
    due = float(parameter.grad.double().square().sum())
    assert float(squared_norm([parameter])) == pytest.approx(due, rel=1e-7)
    halves = [torch.nn.Parameter(part.clone()) for part in parameter.grad.split(max(1, size // 3))]
    for half in halves:
        half.grad = half.detach()
    assert float(squared_norm(halves)) == pytest.approx(due, rel=1e-7)
    assert float(squared_norm([parameter])) == float(squared_norm([parameter]))
    for bad in (torch.nan, torch.inf, -torch.inf):
        parameter.grad[-1, 0] = bad
        assert not float(squared_norm([parameter])) < torch.inf
        assert not float(squared_norm([parameter], exact=True)) < torch.inf


@pytest.mark.parametrize("value", [1.1, 1 / 3, 0.1, 1e-20, 1e18])
def test_the_norm_of_equal_values_is_as_exact_as_fp32(value: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2**16))
    parameter.grad = torch.full((2**16,), value)
    due = float(parameter.grad.double().square().sum())
    assert float(squared_norm([parameter])) == pytest.approx(due, rel=2.5e-7)


def test_the_norm_copies_no_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2**20))
    parameter.grad = torch.ones(2**20)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        squared_norm([parameter])
    assert 0 < sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages()) < 2**20


@given(st.lists(st.floats(-1000, 1000, width=32), min_size=2, max_size=64), st.randoms())
def test_gradients_on_the_grid_add_up_alike_in_any_order(values: list[float], chance: object) -> None:
    gradients = []
    for value in values:
        weight = torch.zeros(1, requires_grad=True)
        local_weight(weight, exact=True).backward(torch.tensor([value]))
        assert weight.grad is not None
        assert abs(weight.grad.item() - value) <= max(GRID / 2, abs(value) * 2**-24)
        gradients.append(weight.grad.double())
    shuffled = list(gradients)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    half = len(shuffled) // 2
    whole, parts = sum(gradients), sum(shuffled[:half]) + sum(shuffled[half:])
    assert torch.equal(torch.as_tensor(whole), torch.as_tensor(parts))


def test_what_both_ranks_hold_alike_counts_once() -> None:
    assert run(2, norm_of_replicated_and_sharded) == pytest.approx([9.0 * 4 + 2, 2.0])
