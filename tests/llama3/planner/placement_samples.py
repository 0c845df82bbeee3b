"""Small clusters and jobs, for hypothesis: every size divides the next, and jobs leave room or fill the cluster."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st

from herd.llama3.hardware.topology import Fabric, make_fabric
from herd.llama3.parallel.layout import Layout
from herd.llama3.planner.placement import AxisBytes, Ints, Placement, fill_slots, fragmented_gpus, free_slots


def small_fabric(
    server: int = 4, rack: int = 2, pod: int = 3, cluster: int = 3, over: tuple[float, float, float] = (1, 1, 7)
) -> Fabric:
    """`rack` servers, `pod` racks, `cluster` pods; `over`: oversubscription of each tier."""
    racks = server * rack
    sizes = {"rack": racks, "pod": racks * pod, "cluster": racks * pod * cluster}
    tiers: list[dict[str, Any]] = [
        {"name": name, "gpus": gpus, "oversubscription": ratio}
        for (name, gpus), ratio in zip(sizes.items(), over, strict=True)
    ]
    figures = {"link_gb_s": 360, "link_latency_us": 3.4, "nic_gbit_s": 400, "nic_usable": 0.97, "overhead_watts": 0}
    described = {"name": "small", "gpus": server, **figures}
    return make_fabric(
        {
            "name": "small",
            "accelerator": "h100",
            "server": described,
            "network": "roce",
            "routing": "ecmp",
            "tiers": tiers,
        }
    )


def contiguous_placement(layout: Layout, world: int, fabric: Fabric, available: Ints | None = None) -> Placement:
    """Return rank i on the i-th free GPU. Raises ValueError as `free_slots`."""
    return fill_slots(free_slots(layout, world, fabric, available), world)


class Job(NamedTuple):
    """A job that fits on a cluster's free GPUs."""

    layout: Layout
    world: int
    fabric: Fabric
    sent: AxisBytes
    free: Ints


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Draw a job."""
    sizes = [draw(st.integers(1, 3)) for _ in range(2)]
    over = tuple(draw(st.sampled_from([1.0, 2.0, 7.0])) for _ in range(3))
    fabric = small_fabric(4, *sizes, draw(st.integers(2, 4)), (over[0], over[1], over[2]))
    free = fragmented_gpus(fabric, draw(st.sampled_from([0.0, 0.25, 0.5])), draw(st.integers(0, 9)))
    degrees = {name: draw(st.sampled_from([1, 2, 4])) for name in ("tp", "cp", "pp")}
    vpp = draw(st.sampled_from([1, 2])) if degrees["pp"] > 1 else 1
    least = degrees["tp"] * degrees["cp"] * degrees["pp"]
    if least > len(free):
        degrees, vpp, least = {"tp": 4}, 1, 4
    dp = draw(st.integers(1, len(free) // least))
    replicas = draw(st.sampled_from([each for each in (1, 2, 3) if dp % each == 0]))
    sent = AxisBytes(*(float(draw(st.integers(0, 10**9))) for _ in range(5)))
    return Job(Layout(**degrees, vpp=vpp, dp_replicate=replicas), dp * least, fabric, sent, free)
