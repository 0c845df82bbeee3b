from __future__ import annotations

from dataclasses import replace
from math import isclose, isfinite

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.hardware.topology import Layer, load_fabric
from herd.llama3.planner.collectives import (
    ALL,
    Algorithm,
    CommGroup,
    Kind,
    algorithm_curves,
    collective_curve,
    collective_seconds,
    contiguous_group,
    crossover,
    fastest_algorithm,
    supported_algorithms,
)

MIB = 2.0**20
KINDS: tuple[Kind, ...] = ("reduce-scatter", "all-gather", "all-reduce")
NEAR: Algorithm = "halving nearest-first"
FAR: Algorithm = "halving farthest-first"
LAYERS = load_fabric("roce-24k").layers()
INSTANT = [replace(layer, latency_s=0.0) for layer in LAYERS]
FLAT = [Layer("server", 1, 1e9, 1e-6), Layer("network", 4096, 1e9, 1e-6)]
"""One card a server, one network: the textbook's model."""


@st.composite
def groups(draw: st.DrawFn) -> CommGroup:
    ranks = 1 << draw(st.integers(1, 14))
    return contiguous_group(
        ranks, LAYERS, draw(st.sampled_from([stride for stride in (1, 2, 8, 24) if stride * ranks <= 24576]))
    )


def test_on_one_network_the_formulas_are_those_of_the_paper() -> None:
    for ranks in [2, 8, 512]:
        size, group, steps = 64 * MIB, contiguous_group(ranks, FLAT), ranks.bit_length() - 1
        bandwidth = size * (ranks - 1) / ranks / 1e9
        assert collective_seconds("reduce-scatter", size, group, FLAT) == pytest.approx((ranks - 1) * 1e-6 + bandwidth)
        for order in (NEAR, FAR):
            assert collective_seconds("all-gather", size, group, FLAT, order) == pytest.approx(steps * 1e-6 + bandwidth)
            assert collective_seconds("all-reduce", size, group, FLAT, order) == pytest.approx(
                2 * (steps * 1e-6 + bandwidth)
            )
        assert collective_seconds("all-reduce", size, group, FLAT, "tree") == pytest.approx(
            2 * (steps * 1e-6 + size / 0.92e9)
        )


def test_a_ring_meets_the_networks_latency_once_per_server() -> None:
    found = collective_curve("reduce-scatter", contiguous_group(64, LAYERS), LAYERS)
    assert found.start == pytest.approx(56 * 3.4e-6 + 7 * 14e-6)  # 63 hops, 7 of them between the 8 servers
    assert found.per_byte == pytest.approx(63 / 64 / 360e9)  # eight cards carry more than NVLink
    apart = collective_curve("reduce-scatter", contiguous_group(64, LAYERS, 8), LAYERS)
    assert apart.start == pytest.approx(63 * 14e-6)
    assert apart.per_byte == pytest.approx(63 / 64 / 48.5e9)  # one member a server: one card


def test_a_ring_across_pods_is_slowed_only_where_few_of_it_are_in_a_pod() -> None:
    many, few = contiguous_group(16, LAYERS, 1024), contiguous_group(128, LAYERS, 128)
    assert collective_curve("all-gather", many, LAYERS).per_byte == pytest.approx(15 / 16 / (3 * 48.5e9 / 7))
    assert collective_curve("all-gather", few, LAYERS).per_byte == pytest.approx(127 / 128 / 48.5e9)


def test_a_tree_climbs_servers_and_chains_inside_them() -> None:
    group = contiguous_group(64, LAYERS)
    assert collective_curve("all-reduce", group, LAYERS, "tree").start == pytest.approx(2 * (7 * 3.4e-6 + 3 * 14e-6))
    assert fastest_algorithm("all-reduce", 1024, group, LAYERS)[0] == "tree"
    assert fastest_algorithm("all-reduce", 4096 * MIB, group, LAYERS)[0] == "ring"


def test_halving_sends_half_to_the_first_partner() -> None:
    group = contiguous_group(16, LAYERS)  # a rack: partners at 1, 2, 4 share a server, at 8 they do not
    inside, outside = 360e9, 48.5e9
    assert collective_curve("reduce-scatter", group, LAYERS, NEAR).per_byte == pytest.approx(
        (7 / 8) / inside + (1 / 16) / outside
    )
    assert collective_curve("reduce-scatter", group, LAYERS, FAR).per_byte == pytest.approx(
        (1 / 2) / outside + (7 / 16) / inside
    )
    assert collective_curve("reduce-scatter", group, LAYERS, FAR).start == pytest.approx(3 * 3.4e-6 + 14e-6)


def test_partners_that_leave_a_pod_share_its_uplinks() -> None:
    pods = [Layer("server", 1, 1e9, 0.0), Layer("pod", 6, 1e9, 0.0), Layer("cluster", 24, 1e8, 0.0)]
    group = contiguous_group(8, pods)  # pods 0-5 and 6-7: at distance 4 ranks 2 and 3 leave the first, at 1 nobody does
    crossing = {1: 0, 2: 2, 4: 2}  # of six, in the busiest pod: 4-6 and 5-7 at distance 2
    rates = {distance: min(1e9, 1e8 * 6 / count) if count else 1e9 for distance, count in crossing.items()}
    expected = sum(0.5 ** (step + 1) / rates[1 << step] for step in range(3))
    assert collective_curve("reduce-scatter", group, pods, NEAR).per_byte == pytest.approx(expected)


@given(groups(), st.sampled_from(KINDS), st.floats(0, 40))
def test_the_order_of_partners_costs_no_latency_and_nearest_first_is_never_slower(
    group: CommGroup, kind: Kind, log: float
) -> None:
    near, far = collective_curve(kind, group, LAYERS, NEAR), collective_curve(kind, group, LAYERS, FAR)
    assert near.start == pytest.approx(far.start)
    assert near.seconds_at(2**log) <= far.seconds_at(2**log) * (1 + 1e-12)


@given(groups(), st.sampled_from(KINDS))
def test_without_latency_a_ring_does_not_lose(group: CommGroup, kind: Kind) -> None:
    ring = collective_curve(kind, group, INSTANT)
    for order in (NEAR, FAR):
        assert ring.per_byte <= collective_curve(kind, group, INSTANT, order).per_byte * (1 + 1e-12)


@given(groups(), st.sampled_from(KINDS))
def test_crossover_parts_the_sizes(group: CommGroup, kind: Kind) -> None:
    at = crossover(kind, group, LAYERS)

    def behind(size: float) -> float:
        return collective_seconds(kind, size, group, LAYERS) / collective_seconds(kind, size, group, LAYERS, NEAR) - 1

    if isfinite(at):
        assert behind(1.01 * at + 1) <= 1e-12
        assert at == 0 or behind(0.99 * at) > 0
    else:
        assert behind(1e15) > 0


def test_crossover_of_neighbours_grows_with_the_ranks() -> None:
    found = [crossover("all-reduce", contiguous_group(1 << log, LAYERS), LAYERS) for log in range(4, 15)]
    assert found == sorted(found)
    assert found[0] < 64 * MIB < found[2]
    assert crossover("all-reduce", contiguous_group(1024, INSTANT), INSTANT) == 0


@given(groups(), st.sampled_from(KINDS), st.floats(0, 40))
def test_the_choice_is_the_fastest_that_can(group: CommGroup, kind: Kind, log: float) -> None:
    name, least = fastest_algorithm(kind, 2**log, group, LAYERS, ALL)
    times = {one: each[0] for one, each in algorithm_curves(kind, np.array([2**log]), group, LAYERS).items()}
    assert least == times[name] == pytest.approx(min(times.values()))
    assert ("tree" in times) == (kind == "all-reduce")


@given(groups(), st.sampled_from(KINDS), st.floats(1, 8))
def test_more_oversubscription_is_never_faster(group: CommGroup, kind: Kind, ratio: float) -> None:
    slower = [*LAYERS[:-1], replace(LAYERS[-1], bytes_per_s=LAYERS[-1].bytes_per_s / ratio)]
    for one in supported_algorithms(kind, group):
        assert collective_curve(kind, group, slower, one).per_byte >= collective_curve(
            kind, group, LAYERS, one
        ).per_byte * (1 - 1e-12)


@given(
    st.integers(2, 1500), st.sampled_from([1, 2, 3, 8, 16]), st.sampled_from(KINDS), st.sampled_from(["ring", "tree"])
)
def test_one_more_member_or_byte_is_never_faster(ranks: int, stride: int, kind: Kind, one: Algorithm) -> None:
    less, more = (contiguous_group(size, LAYERS, stride) for size in (ranks, ranks + 1))
    if one in supported_algorithms(kind, less):
        before, after = collective_curve(kind, less, LAYERS, one), collective_curve(kind, more, LAYERS, one)
        assert after.start >= before.start > 0
        assert after.per_byte >= before.per_byte * (1 - 1e-12) > 0


@given(st.integers(1, 12), st.sampled_from([1, 2]), st.sampled_from(KINDS))
def test_twice_the_members_halve_no_faster(log: int, stride: int, kind: Kind) -> None:
    before, after = (
        collective_curve(kind, contiguous_group(1 << size, LAYERS, stride), LAYERS, NEAR) for size in (log, log + 1)
    )
    assert after.start > before.start
    assert after.per_byte > before.per_byte


def test_an_all_reduce_is_both_halves() -> None:
    group = contiguous_group(256, LAYERS)
    for one in ("ring", NEAR, FAR):
        halves = sum(collective_seconds(kind, 3 * MIB, group, LAYERS, one) for kind in KINDS[:2])
        assert isclose(collective_seconds("all-reduce", 3 * MIB, group, LAYERS, one), halves)


def test_alone_there_is_nothing_to_send() -> None:
    assert fastest_algorithm("all-reduce", 1e9, contiguous_group(1, LAYERS), LAYERS)[1] == 0


def test_curves_are_arrays_by_algorithm() -> None:
    found = algorithm_curves("reduce-scatter", np.array([0.0, MIB, 2 * MIB]), contiguous_group(12, LAYERS), LAYERS)
    assert list(found) == ["ring"]  # 12 is no power of two, and a tree does not scatter
    assert np.diff(found["ring"], 2) == pytest.approx(0, abs=1e-12)


def test_what_cannot_be_asked() -> None:
    with pytest.raises(ValueError, match="a tree only all-reduces"):
        collective_seconds("all-gather", 1.0, contiguous_group(8, LAYERS), LAYERS, "tree")
    with pytest.raises(ValueError, match=r"among 12: .* power of two"):
        collective_seconds("all-gather", 1.0, contiguous_group(12, LAYERS), LAYERS, NEAR)
    with pytest.raises(ValueError, match="take fewer"):
        contiguous_group(4096, LAYERS, 8)
    with pytest.raises(ValueError, match="layers grow up to the size"):
        CommGroup(8, (8, 4))
