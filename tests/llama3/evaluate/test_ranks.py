"""Several processes find what one finds, to the bit."""

from __future__ import annotations

import math

from llama3.evaluate.distributed import SingleProcess
from tests.dist import run
from tests.llama3.evaluate.rank_samples import gathered, scored_alone, scored_together


def test_two_processes_find_the_bits_that_one_finds() -> None:
    (alone,) = run(1, scored_alone)
    assert run(2, scored_together) == [alone, alone]
    assert all(math.isfinite(nll) and nll > 0 for nll, _, _ in alone)


def test_every_process_gets_what_all_found_in_order() -> None:
    ranks = run(3, gathered)
    for rank, (found, nothing, me) in enumerate(ranks):
        assert [item["rank"] for item in found] == [0, 1, 2]
        assert [len(item["text"]) for item in found] == [0, 100, 200]
        assert found[2]["numbers"] == [0.1, math.inf, None, True]
        assert nothing == [[], [], []]
        assert me == (rank, 3)


def test_one_process_gathers_its_own() -> None:
    assert SingleProcess().gather([1, "a"]) == [[1, "a"]]
