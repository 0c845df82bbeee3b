"""The trainer under layouts: the same bits for any number of data-parallel processes, any layout goes on from any."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.recipe.schema import Recipe
from tests.dist import run
from tests.llama3.train.train_samples import job, losses, output, recipe, stages, train, weights, work

MODEL = {"layers": 4, "dim": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "max_seq_len": 64}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2, "vpp": 2}),
    "dp2-zero3": (2, {"zero": 3}),
    "dp4": (4, {}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "dp2-pp2": (4, {"pp": 2, "vpp": 2}),
    "cp2-replicas2": (4, {"cp": 2, "dp_replicate": 2}),
    "dp2-cp2-pp2-tp2": (16, {"tp": 2, "cp": 2, "pp": 2}),
}
PAIRS = [("tp2", "pp2")]
"""Layout of the first stage and of the second."""
MORE = [
    ("cp2", "dp2-zero3"),
    *((before, after) for before in ("alone", "dp4", "dp2-pp2") for after in ("alone", "tp2-pp2")),
    ("tp2-cp2", "dp2-zero3"),
    ("dp2-cp2-pp2-tp2", "cp2-replicas2"),
]


def asked(**changes: Any) -> Recipe:
    """Two stages, an average in each, nothing tied."""
    both = [
        stages(3)[0] | {"weight_averaging": 2},
        stages(2)[0] | {"name": "anneal", "lr": "linear to 0", "weight_averaging": 2},
    ]
    return recipe(model=MODEL, stages=both, **changes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The first stage, trained once under a layout by its name."""
    folder = tmp_path_factory.mktemp("saved")

    @cache
    def first(name: str) -> Path:
        size, layout = LAYOUTS[name]
        path = job(folder, asked(), name=name, layout=layout, micro_batch=4)
        assert run(size, train, path) == [0] * size, output(path)
        return path

    return first


@pytest.fixture(scope="module")
def expected(saved: Callable[[str], Path]) -> Path:
    """Both stages on one process."""
    return second(saved("alone").parent, saved("alone"), "expected", 1, {})


def second(folder: Path, first: Path, name: str, size: int, layout: dict[str, Any]) -> Path:
    parent = work(first) / "result" / "state"
    path = job(folder, asked(), "anneal", name, parent=parent, layout=layout, micro_batch=4)
    assert run(size, train, path) == [0] * size, output(path)
    return path


@pytest.mark.parametrize(("before", "after"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE)])
@pytest.mark.fault("F23")
def test_any_layout_goes_on_from_any(
    before: str, after: str, saved: Callable[[str], Path], expected: Path, tmp_path: Path
) -> None:
    """Both stages have the losses of one process, whichever layouts they have."""
    first, alone = saved(before), saved("alone")
    (tmp_path / "tokens").symlink_to(first.parent / "tokens")
    path = second(tmp_path, first, "second", *LAYOUTS[after])
    for mine, reference in ((first, alone), (path, expected)):
        for position, values in losses(reference).items():
            assert losses(mine)[position] == pytest.approx(values, rel=1e-11), f"position {position}"


@pytest.mark.parametrize(
    ("precision", "sizes"),
    [
        ("bf16", (1, 2)),
        pytest.param("bf16", (1, 4, 8), marks=pytest.mark.slow),
        pytest.param("fp32", (1, 2, 4, 8), marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_deterministic_training_has_the_same_bits_for_any_data_parallel_size(
    precision: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    kept = {}
    for size in sizes:
        path = job(tmp_path, recipe(precision=precision, stages=stages(5)), name=f"dp{size}", deterministic=True)
        assert run(size, train, path) == [0] * size, output(path)
        kept[size] = path
    for path in kept.values():
        assert weights(path) == weights(kept[1])
        for position, values in losses(kept[1]).items():  # sums of fp64 over processes
            assert losses(path)[position] == pytest.approx(values, rel=1e-14)


@pytest.mark.slow
def test_without_it_the_bits_differ(tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    kept = []
    for size in (1, 8):
        path = job(tmp_path, recipe(precision="fp32", stages=stages(5)), name=f"dp{size}")
        assert run(size, train, path) == [0] * size
        kept.append(weights(path))
    assert kept[0] != kept[1]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 4}, "cluster.layout: tp 4 x cp 1 x pp 1 = 4 does not divide 2 processes; start 4"),
        ({"cp": 2}, "cluster.layout: sequence 6 does not split into 4 pieces"),
    ],
)
def test_what_does_not_fit_is_refused(layout: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The other reasons are in tests/llama3/parallel/test_layout.py."""
    short = stages(2)[0] | {"seq_len": 6, "batch": "48 tokens", "for": "96 tokens"}
    path = job(tmp_path, recipe(model=MODEL, stages=[short]), layout=layout)
    assert 2 in run(2, train, path)  # a peer may be cut off by the first that leaves
    assert message in output(path)
    assert not (work(path) / "journal.jsonl").exists()
