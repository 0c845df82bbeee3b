"""Groups of a layout against explicit lists of ranks, and what their messages take."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from herd.llama3.hardware.topology import Fabric, fabric_names, load_fabric
from herd.llama3.parallel.layout import TABLE_4, Layout
from herd.llama3.planner.collectives import LIBRARY, Network, collective_seconds

Ints = NDArray[np.int64]
ORDER = ("replica", "shard", "pp", "cp", "tp")
"""Of the ranks, outermost first: as the engine's mesh."""
MEMBERS = {"tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "fsdp": ("shard", "cp"), "replica": ("replica",)}
WORLD = 2**20
"""More than any number of GPUs here."""
powers = st.sampled_from([1, 2, 4, 8])


@cache
def fabric(name: str) -> Fabric:
    return load_fabric(name)


def listed(axis: str, layout: Layout, world: int) -> Ints:
    """Return the ranks of every group of an axis, (groups, members)."""
    shards = layout.dp(world) // layout.dp_replicate
    ranks = np.arange(world).reshape(layout.dp_replicate, shards, layout.pp, layout.cp, layout.tp)
    inside = [ORDER.index(name) for name in MEMBERS[axis]]
    moved = np.moveaxis(ranks, inside, range(-len(inside), 0))
    return moved.reshape(-1, int(np.prod([ranks.shape[place] for place in inside])))


def together(groups: Ints, gpus: int) -> int:
    """Return the most members of a group that share a unit of so many GPUs, counted."""
    numbers = np.arange(len(groups))[:, None]
    return int(np.unique(groups // gpus + numbers * WORLD, return_counts=True)[1].max())


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Layout, int]:
    """Draw a layout in powers of two, tp inside a server, and its GPUs; no stride but those that divide 3,072."""
    replicas = draw(st.sampled_from([1, 2]))
    layout = Layout(tp=draw(powers), cp=draw(powers), pp=draw(powers), dp_replicate=replicas)
    world = layout.model_parallel * replicas * draw(powers)
    assume(replicas == 1 or world <= 2048)
    return layout, world


@given(job=jobs())
def test_members_that_share_a_layer_are_those_of_the_list(job: tuple[Layout, int]) -> None:
    for name in (name for name in fabric_names() if fabric(name).gpus >= job[1]):
        for axis in MEMBERS:
            group, ranks = Network(fabric(name)).group(axis, *job), listed(axis, *job)
            assert group.size == ranks.shape[1]
            assert group.per_layer == tuple(together(ranks, layer.gpus) for layer in fabric(name).layers())


def test_groups_of_table_4_have_no_fewer_neighbours_than_is_said() -> None:
    """Replicas of 2,048 straddle pods of 3,072: two lie in the first one, one is counted."""
    for row in TABLE_4:
        for axis in MEMBERS:
            group, ranks = (
                Network(fabric("roce-24k")).group(axis, row.layout, row.world),
                listed(axis, row.layout, row.world),
            )
            found = tuple(together(ranks, layer.gpus) for layer in fabric("roce-24k").layers())
            straddles = axis == "fsdp" and row.layout.model_parallel == 2048
            assert found == ((1, 2, 32, 128) if straddles else group.per_layer)
            assert group.per_layer == ((1, 2, 16, 128) if straddles else found)


def test_a_message_to_the_next_stage_takes_the_layer_that_holds_a_replica() -> None:
    for layout, sent in [
        (Layout(tp=4, pp=2), 1e9 / 360e9 + 3.4e-6),
        (Layout(tp=8, pp=2), 1e9 / 48.5e9 + 14e-6),
        (Layout(tp=8, pp=16), 1e9 / 48.5e9 + 14e-6),
        (Layout(tp=8, cp=32, pp=16), 7e9 / 48.5e9 + 14e-6),
        (Layout(tp=8, cp=256, pp=16), 7e9 / 48.5e9 + 14e-6),  # larger than the cluster: its last layer
    ]:
        assert Network(fabric("roce-24k")).send(1e9, layout) == pytest.approx(sent)


def test_routing_takes_its_part_above_the_rack_only() -> None:
    whole, half = Network(fabric("roce-24k")), Network(fabric("roce-24k"), share=0.5)
    ratios = [before.bytes_per_s / after.bytes_per_s for before, after in zip(whole.layers, half.layers, strict=True)]
    assert ratios == [1, 1, 2, 2]
    in_rack, across = Layout(tp=8, cp=2), Layout(tp=8, cp=4)
    for layout, slower in ((in_rack, 1.0), (across, 1.0), (Layout(tp=16, cp=4), 2.0)):
        times = [net.seconds("all-gather", 1e12, net.group("cp", layout, 64)) for net in (half, whole)]
        assert times[0] / times[1] == pytest.approx(slower, rel=1e-3)


@given(st.sampled_from([*MEMBERS]), jobs(), st.floats(0, 40), st.sampled_from([0.3, 1.0]))
def test_messages_take_the_faster_of_what_nccl_has(
    axis: str, job: tuple[Layout, int], log: float, share: float
) -> None:
    network = Network(fabric("roce-24k"), share)
    group = network.group(axis, *job)
    ring, tree = (collective_seconds("all-reduce", 2**log, group, network.layers, one) for one in LIBRARY)
    assert network.seconds("all-reduce", 2**log, group) == min(ring, tree)
    assert network.seconds("all-gather", 2**log, group) == collective_seconds(
        "all-gather", 2**log, group, network.layers
    )


def test_groups_that_cannot_be() -> None:
    network = Network(fabric("roce-24k"))
    with pytest.raises(ValueError, match="axis: 'ep' is unknown; write tp, cp, pp, fsdp or replica"):
        network.group("ep", Layout(tp=8), 64)
    with pytest.raises(ValueError, match="tp 8 x cp 1 x pp 1 = 8 does not divide 12 processes; start 16"):
        network.group("tp", Layout(tp=8), 12)
    with pytest.raises(ValueError, match="group: 4096 members on layers of"):
        network.group("fsdp", Layout(tp=8), 32_768)
