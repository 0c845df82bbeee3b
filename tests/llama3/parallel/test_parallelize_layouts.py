"""The central claim: any layout gives the loss and the gradients of one process, to rounding in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from herd.llama3.model.linear import GRID
from tests.dist import run
from tests.llama3.parallel.layout_samples import alone, cut, exact_gradients, float8_steps, shape
from tests.llama3.parallel.scale_samples import OPTIONAL, VALUES

AXES = {"dp": {}, "tp": {"tp": 2}, "cp": {"cp": 2}, "pp": {"pp": 2}}
PAIRS = [(4, AXES[a] | AXES[b]) for a in AXES for b in AXES if a < b]
TRIPLES = [(8, AXES[a] | AXES[b] | AXES[c]) for a in AXES for b in AXES for c in AXES if a < b < c]
TOLERANCE = 1e-12
Case = tuple[int, dict[str, Any]]


@cache
def expected(documents: bool, z_loss: float, **changes: Any) -> tuple[float, dict[str, np.ndarray]]:
    return alone(shape(**changes), documents, z_loss=z_loss)


def check(world: int, layout: dict[str, Any], documents: bool = True, z_loss: float = 0.0, **changes: Any) -> None:
    nll, gradients = expected(documents, z_loss, **changes)
    found = run(world, cut, layout, changes, documents, 2, z_loss)
    assert found[0][0] == pytest.approx(nll, rel=1e-13)
    whole = {name: gradient for _, part in found for name, gradient in part.items()}
    assert whole.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert np.abs(whole[name] - gradient).max() < TOLERANCE * np.abs(gradient).max(), name


def test_the_gradients_are_worth_comparing() -> None:
    """Each is far above the tolerance, and documents change them."""
    _, with_documents = expected(True, 0.0)
    _, without = expected(False, 0.0)
    for name, gradient in with_documents.items():
        assert np.abs(gradient).max() > 1e-3
        assert np.abs(gradient - without[name]).max() > 1e-3, name


@pytest.mark.parametrize("axis", AXES)
def test_each_axis(axis: str) -> None:
    check(2, AXES[axis])


def slow(layouts: list[Case]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
def test_each_axis_without_documents(axis: str) -> None:
    check(2, AXES[axis], documents=False)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layout"), [*PAIRS, *TRIPLES, (16, {"tp": 2, "cp": 2, "pp": 2})], ids=str)
def test_axes_together(world: int, layout: dict[str, Any]) -> None:
    check(world, layout)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (4, {"dp_replicate": 2}),
        (2, {"zero": 3}),
        (2, {"pp": 2, "vpp": 2, "microbatch_group_size": 1}),
        (2, {"pp": 2, "schedule": "zero-bubble"}),
        (2, {"tp": 2, "recompute": "full"}),
        (2, {"cp": 2, "recompute": "selective"}),
        *slow(
            [
                (4, {"tp": 4}),
                (4, {"cp": 4}),
                (4, {"pp": 4}),
                (8, {"dp_replicate": 2, "tp": 2}),
                (4, {"zero": 3, "tp": 2}),
                (4, {"zero": 3, "dp_replicate": 2}),
                (2, {"tp": 2, "compile": True}),
                (4, {"pp": 2, "vpp": 2, "zero": 3}),
            ]
        ),
    ],
    ids=str,
)
@pytest.mark.slow
def test_each_choice_that_saves_memory_or_time(world: int, layout: dict[str, Any]) -> None:
    check(world, layout)


@pytest.mark.parametrize(("world", "layout"), [(2, {"tp": 2}), *slow([(4, {"tp": 2, "cp": 2})])], ids=str)
def test_tied_embeddings(world: int, layout: dict[str, Any]) -> None:
    check(world, layout, tied_embeddings=True)


@pytest.mark.parametrize(("world", "layout"), [(2, {"tp": 2}), *slow([(4, {"pp": 2, "tp": 2})])], ids=str)
def test_z_loss(world: int, layout: dict[str, Any]) -> None:
    check(world, layout, z_loss=0.01)
    plain, with_z = expected(True, 0.0), expected(True, 0.01)
    assert plain[0] == with_z[0]  # the value stays the likelihood
    assert np.abs(plain[1]["output.weight"] - with_z[1]["output.weight"]).max() > 1e-3


@pytest.mark.parametrize("field", OPTIONAL)
def test_exact_rounds_the_gradient_of_every_weight(field: str) -> None:
    (gradients,) = run(1, exact_gradients, {"layers": 1, field: VALUES[field]})
    for name, gradient in gradients.items():
        assert not (gradient % GRID).any(), name


def test_sizes_that_do_not_divide_evenly() -> None:
    """Three processes share 8 sequences, 96 token ids and vectors of 32: shares and shards are uneven."""
    check(3, {})


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, {}), (2, {"tp": 2}), (2, {"recompute": "full"}), (2, {"pp": 2})],
    ids=["dp", "tp", "recompute", "pp"],
)
def test_float8_weights_that_are_cast_once_a_step_give_the_same_bits(world: int, layout: dict[str, Any]) -> None:
    """FSDP2 writes gathered weights into the same tensors, and does not count it as a new version of them."""
    assert run(world, float8_steps, layout, 2, True) == run(world, float8_steps, layout, 2, False)
