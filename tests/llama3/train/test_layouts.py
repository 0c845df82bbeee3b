"""The trainer under layouts: the same bits for any number of data-parallel processes, any layout goes on from any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama3.recipe.schema import Recipe
from tests.dist import run
from tests.llama3.train.train_samples import job, losses, output, recipe, stages, train, weights, work

MODEL = {"layers": 4, "dim": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "max_seq": 64}
SAVED = {
    "alone": (1, {}),
    "dp4": (4, {}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}),
    "dp2-pp2": (4, {"pp": 2, "virtual": 2}),
    "dp2-cp2-pp2-tp2": (16, {"tp": 2, "cp": 2, "pp": 2}),
}
LOADED = {
    "alone": (1, {}),
    "dp2-zero3": (2, {"zero": 3}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "cp2-replicas2": (4, {"cp": 2, "replicas": 2}),
}


def asked(**changes: Any) -> Recipe:
    """Two stages, an average in each, nothing tied."""
    both = [stages(4)[0] | {"average": 2}, stages(3)[0] | {"name": "anneal", "lr": "linear to 0", "average": 2}]
    return recipe(model=MODEL, stages=both, **changes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The first stage, trained under each layout."""
    folder = tmp_path_factory.mktemp("saved")
    paths = {}
    for name, (size, layout) in SAVED.items():
        paths[name] = job(folder, asked(), name=name, layout=layout, micro_batch=2)
        assert run(size, train, paths[name]) == [0] * size, output(paths[name])
    return paths


@pytest.fixture(scope="module")
def expected(saved: dict[str, Path]) -> Path:
    """Both stages on one process."""
    return second(saved["alone"].parent, saved["alone"], "expected", 1, {})


def second(folder: Path, first: Path, name: str, size: int, layout: dict[str, Any]) -> Path:
    parent = work(first) / "result" / "state"
    path = job(folder, asked(), "anneal", name, parent=parent, layout=layout, micro_batch=2)
    assert run(size, train, path) == [0] * size, output(path)
    return path


@pytest.mark.parametrize(
    ("before", "after"),
    [*((before, after) for before in SAVED for after in ("alone", "tp2-pp2")), ("tp2-cp2", "dp2-zero3"),
     ("dp2-cp2-pp2-tp2", "cp2-replicas2")],
)  # fmt: skip
def test_any_layout_goes_on_from_any(
    before: str, after: str, saved: dict[str, Path], expected: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokens").symlink_to(saved[before].parent / "tokens")
    path = second(tmp_path, saved[before], "second", *LOADED[after])
    for position, values in losses(expected).items():
        assert losses(path)[position] == pytest.approx(values, rel=1e-11), f"position {position}"


def test_the_first_stage_is_the_same_under_every_layout(saved: dict[str, Path]) -> None:
    for path in saved.values():
        for position, values in losses(saved["alone"]).items():
            assert losses(path)[position] == pytest.approx(values, rel=1e-11)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_deterministic_training_has_the_same_bits_for_any_data_parallel_size(compute: str, tmp_path: Path) -> None:
    kept = {}
    for size in (1, 2, 4, 8):
        path = job(tmp_path, recipe(compute=compute, stages=stages(5)), name=f"dp{size}", deterministic=True)
        assert run(size, train, path) == [0] * size, output(path)
        kept[size] = path
    for path in kept.values():
        assert weights(path) == weights(kept[1])
        for position, values in losses(kept[1]).items():  # sums of fp64 over processes
            assert losses(path)[position] == pytest.approx(values, rel=1e-14)


def test_without_it_the_bits_differ(tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    kept = []
    for size in (1, 8):
        path = job(tmp_path, recipe(compute="fp32", stages=stages(5)), name=f"dp{size}")
        assert run(size, train, path) == [0] * size
        kept.append(weights(path))
    assert kept[0] != kept[1]


@pytest.mark.parametrize(
    ("size", "layout", "message"),
    [
        (2, {"tp": 4}, "cluster.layout: tp 4 x cp 1 x pp 1 = 4 does not divide 2 processes; start 4"),
        (4, {"tp": 4}, "cluster.layout.tp: 4 does not divide kv_heads 2; of all of them"),
        (8, {"cp": 8}, "cluster.layout: sequence 8 does not split into 16 parts"),
    ],
)
def test_what_does_not_fit_is_refused(size: int, layout: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = job(tmp_path, recipe(model=MODEL, stages=[{**stages(2)[0], "seq": 8}]), layout=layout)
    assert 2 in run(size, train, path)  # a peer may be cut off by the first that leaves
    assert message in output(path)
    assert not (work(path) / "journal.jsonl").exists()


def test_tied_embeddings_are_refused_in_a_pipeline(tmp_path: Path) -> None:
    path = job(tmp_path, layout={"pp": 2})
    assert 2 in run(2, train, path)
    assert "cluster.layout.pp: 2 parts a tied embedding from its output; set model.tied_embeddings: false" in output(
        path
    )
