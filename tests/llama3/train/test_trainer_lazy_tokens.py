"""A trainer whose tokens are in an object store trains on the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from herd.storage.digests import PAGE
from herd.storage.page_cache import make_lazy
from tests.dist import run
from tests.llama3.train.train_samples import job, losses, output, recipe, stages, train, weights, work
from tests.storage.lazy_samples import described, lazily


@pytest.mark.slow
def test_two_processes_train_from_one_cache(tmp_path: Path) -> None:
    asked = recipe(stages=stages(4))
    plain = job(tmp_path, asked, name="plain")
    path = job(tmp_path, asked, name="other", tokens=lazily(tmp_path / "cache", tmp_path / "tokens", 4))
    assert run(2, train, plain) == [0, 0]
    assert run(2, train, path) == [0, 0], output(path)
    assert losses(path) == losses(plain)
    assert weights(path) == weights(plain)


def test_a_cache_that_is_too_small_is_refused(tmp_path: Path) -> None:
    """Four domains, each of which takes a page here."""
    job(tmp_path, recipe())
    folder = make_lazy(
        tmp_path / "cache", f"file://{tmp_path / 'tokens'}", described(tmp_path / "tokens"), 4 * PAGE - 1
    )
    path = job(tmp_path, recipe(), name="other", tokens=folder)
    assert run(1, train, path) == [2]
    assert "trainer: token_cache: 4,194,303 bytes do not hold" in output(path)
    assert "write at least 4,194,304" in output(path)
    assert not (work(path) / "journal.jsonl").exists()
