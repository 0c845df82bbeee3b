"""AdamW as published, what decays, what a bad step leaves alone, and sums that do not depend on their order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.model.linear import GRID, local_weight
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model, Optimizer
from herd.llama3.train.state import Precision, TrainState, adamw
from herd.llama3.train.train_step import scale, squared_norm
from tests.dist import run
from tests.llama3.parallel.layout_samples import norm_of_replicated_and_sharded
from tests.llama3.train.checkpoint_samples import ALONE
from tests.llama3.train.train_samples import VOCAB_SIZE, recipe


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


def test_norm_and_scale() -> None:
    parameters = list(named().values())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in parameters)
    assert float(squared_norm(parameters)) == count
    scale(parameters, torch.tensor(0.25, dtype=torch.float64))
    assert float(squared_norm(parameters)) == count / 16


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


def parameters_with_gradients() -> dict[str, torch.nn.Parameter]:
    """A matrix, an embedding and a norm, with gradients."""
    torch.manual_seed(0)
    shapes = {"embedding.weight": (5, 3), "layers.0.ffn.up.weight": (4, 3), "norm.weight": (4,)}
    named = {name: torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    return named


def test_the_norm_is_of_all_gradients_and_scaling_scales_it() -> None:
    named = parameters_with_gradients()
    gradients = [parameter.grad for parameter in named.values() if parameter.grad is not None]
    norm = math.sqrt(float(squared_norm(named.values())))
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-14)
    scale(named.values(), torch.tensor(0.25, dtype=torch.float64))
    assert math.sqrt(float(squared_norm(named.values()))) == pytest.approx(norm / 4, rel=1e-12)


@pytest.mark.parametrize(("norms", "embeddings"), [(False, False), (True, False), (False, True)])
def test_step_follows_the_published_rule(norms: bool, embeddings: bool) -> None:
    """AdamW written out (arXiv 1711.05101, algorithm 2); norms and embeddings decay only if asked."""
    named = parameters_with_gradients()
    settings = Optimizer(weight_decay=0.3, decay_norms=norms, decay_embeddings=embeddings)
    decays = {"embedding.weight": embeddings, "layers.0.ffn.up.weight": True, "norm.weight": norms}
    optimizer = adamw(named, settings)
    expected = {name: [parameter.detach().clone(), 0.0, 0.0] for name, parameter in named.items()}
    for count in range(1, 4):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * count
        for name, parameter in named.items():
            value, first, second = expected[name]
            g = parameter.grad = torch.full_like(parameter, 0.5 * count)
            first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g * g
            decay = 0.3 if decays[name] else 0.0
            update = (first / (1 - 0.9**count)) / ((second / (1 - 0.95**count)).sqrt() + 1e-8)
            expected[name] = [value * (1 - 0.01 * count * decay) - 0.01 * count * update, first, second]
        optimizer.step()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach(), expected[name][0], rtol=1e-12, atol=1e-14)
