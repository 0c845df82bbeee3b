from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from herd.llama3.planner.routing import Floats, max_min_fair


@st.composite
def networks(draw: st.DrawFn) -> tuple[Floats, Floats]:
    """Draw which part of each flow a link carries, and the links' capacities; every flow uses a link."""
    links, flows = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    parts = st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0])
    use = np.array(draw(st.lists(st.lists(parts, min_size=flows, max_size=flows), min_size=links, max_size=links)))
    use[draw(st.integers(0, links - 1)), use.sum(axis=0) == 0] = 1.0
    return use, np.array(draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.7, 4.0]), min_size=links, max_size=links)))


@given(networks())
def test_no_link_is_over_its_capacity(network: tuple[Floats, Floats]) -> None:
    use, capacity = network
    assert (use @ max_min_fair(sparse.csr_array(use), capacity) <= capacity + 1e-9).all()


@given(networks())
def test_every_flow_has_a_bottleneck(network: tuple[Floats, Floats]) -> None:
    """A full link on which no other flow has more: the definition of max-min optimal."""
    use, capacity = network
    rates = max_min_fair(sparse.csr_array(use), capacity)
    full = use @ rates >= capacity - 1e-9
    most = np.array([rates[carried > 0].max(initial=0.0) for carried in use])
    for flow, rate in enumerate(rates):
        assert any(full[link] and rate >= most[link] - 1e-9 for link in np.flatnonzero(use[:, flow]))


@given(networks(), st.sampled_from([0.5, 2.0, 10.0]))
def test_rates_scale_with_the_links(network: tuple[Floats, Floats], factor: float) -> None:
    use, capacity = network
    rates = max_min_fair(sparse.csr_array(use), capacity)
    assert max_min_fair(sparse.csr_array(use), factor * capacity) == pytest.approx(factor * rates, abs=1e-9)


@given(networks(), st.randoms(use_true_random=False))
def test_numbering_does_not_matter(network: tuple[Floats, Floats], random: Random) -> None:
    use, capacity = network
    links, flows = (random.sample(range(count), count) for count in use.shape)
    shuffled = max_min_fair(sparse.csr_array(use[links][:, flows]), capacity[links])
    assert shuffled == pytest.approx(max_min_fair(sparse.csr_array(use), capacity)[flows], abs=1e-9)


@given(networks())
def test_the_least_rate_is_that_of_the_most_crowded_link(network: tuple[Floats, Floats]) -> None:
    use, capacity = network
    busy = use.sum(axis=1) > 0
    least = (capacity[busy] / use[busy].sum(axis=1)).min()
    assert max_min_fair(sparse.csr_array(use), capacity).min() == pytest.approx(least, abs=1e-9)


def test_the_textbook_line() -> None:
    use = sparse.csr_array(np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0]]))
    assert max_min_fair(use, np.array([2.0, 1.0])) == pytest.approx([1 / 3, 5 / 3, 1 / 3, 1 / 3])


def test_a_spread_flow_takes_a_part_of_each_link() -> None:
    use = sparse.csr_array(np.array([[0.5, 1.0], [0.5, 0.0]]))
    assert max_min_fair(use, np.array([1.0, 1.0])) == pytest.approx([2 / 3, 2 / 3])


def test_a_dead_link_stops_its_flows_alone() -> None:
    assert max_min_fair(sparse.csr_array(np.eye(2)), np.array([0.0, 1.0])) == pytest.approx([0, 1])


def test_many_flows_at_once() -> None:
    rng = np.random.default_rng(0)
    links, flows = 500, 20_000
    rows, columns = rng.integers(0, links, 4 * flows), np.tile(np.arange(flows), 4)
    use = sparse.csr_array((np.ones(4 * flows), (rows, columns)), shape=(links, flows))
    rates = max_min_fair(use, np.ones(links))
    assert (use @ rates <= 1 + 1e-9).all()
    assert (use @ rates).mean() > 0.9


def test_what_cannot_be_asked() -> None:
    with pytest.raises(ValueError, match="flow 1 crosses no link"):
        max_min_fair(sparse.csr_array(np.array([[1.0, 0.0]])), np.ones(1))
    with pytest.raises(ValueError, match="for 2 links"):
        max_min_fair(sparse.csr_array(np.eye(2)), np.ones(3))
    with pytest.raises(ValueError, match="negative"):
        max_min_fair(sparse.csr_array(np.eye(2)), np.array([1.0, -1.0]))
