"""A cluster as data: servers under tiers of switches, each tier with a size and an oversubscription.

A tier says how many GPUs it joins and what share of a card's rate is left for traffic that crosses the groups below it;
routing over the single links of a Clos is in `routing`. GPUs are numbered from 0 in the order of the wiring: server by
server, rack by rack.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from herd.llama3.hardware.specs import (
    Accelerator,
    Hall,
    Server,
    SourcedFigures,
    load_accelerator,
    load_hall,
    load_server,
    preset_names,
    read_description,
    validate_description,
)

FIELD = "cluster"
DGX = {"a100": "dgx-a100", "h100": "dgx-h100", "h200": "dgx-h100"}
"""Server of the GPUs of a small cluster such as h100x8."""
Routing = Literal["ecmp", "pinning", "e-ecmp", "adaptive"]


class Tier(BaseModel):
    """Switches that join groups of the tier below."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    gpus: int = Field(ge=1)
    """GPUs below one group of these switches."""
    oversubscription: float = Field(default=1.0, ge=1)
    """Rate of a group's cards over the rate of its links up to this tier; 1: full bisection."""
    latency_us: float = Field(default=14.0, ge=0)
    """Time of a message up through this tier and down."""


class Fabric(SourcedFigures):
    """A cluster: its servers, and the network between them."""

    accelerator: Accelerator
    server: Server
    network: Literal["roce", "infiniband"]
    routing: Routing
    """Path of a flow: hashed (ecmp), fixed by the destination (pinning), hashed per queue pair (e-ecmp), or by load at
    every switch (adaptive)."""
    queue_pairs: int = Field(default=1, ge=1)
    """Flows of a pair of GPUs."""
    tiers: tuple[Tier, ...] = Field(min_length=1)
    """Innermost first; the last one joins the whole cluster."""
    uplinks: float = Field(default=1.0, gt=0)
    """Capacity of a rack switch's uplinks over that of its downlinks."""
    congestion_control: Literal["none", "dcqcn", "receiver-driven"] = "none"
    """none: PFC alone (RoCE), or credits (InfiniBand); dcqcn: senders slow down at marks of the switches;
    receiver-driven: a receiver admits what it has buffers for, as NCCL does."""
    buffer_mb: float | None = Field(default=None, ge=0)
    """Buffer of a spine's port, 10^6 bytes; null: deep enough for any burst."""
    ecn_mb: float = Field(default=0.2, ge=0)
    """Queue at which switches mark every packet for DCQCN, 10^6 bytes."""
    in_flight_mb: float = Field(default=8.0, gt=0)
    """Bytes that a receiver admits from a sender: NCCL's channels times the buffer of one, 10^6 bytes."""
    storage_gb_s: float = Field(default=2000.0, gt=0)
    """Sustained write rate of the file system for the whole cluster, 10^9 bytes per second."""
    hall: Hall | None = None
    """Racks, power and readers of its site; null: unknown."""

    @model_validator(mode="after")
    def _consistent(self) -> Fabric:
        sizes = [("server", self.server.gpus), *((tier.name, tier.gpus) for tier in self.tiers)]
        for (inner, small), (outer, large) in pairwise(sizes):
            if large < small or large % small:
                near = max(1, round(large / small)) * small
                raise ValueError(
                    f"tiers: {outer} joins {large} GPUs, not a multiple of the {small} of a {inner}; write {near}"
                )
        names = [name for name, _ in sizes]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers: two have the same name: {', '.join(names)}")
        if self.queue_pairs > 1 and self.routing in ("ecmp", "pinning"):
            raise ValueError(
                f"queue_pairs: {self.queue_pairs} take one path under {self.routing}, which does not hash queue pairs; "
                "write 1, or routing: e-ecmp"
            )
        return self

    @property
    def gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.tiers[-1].gpus

    @property
    def servers(self) -> int:
        """Servers of the whole cluster."""
        return self.gpus // self.server.gpus

    def storage_bytes_per_s(self, gpus: int) -> float:
        """Return the rate at which the servers of a job on `gpus` read and write storage together."""
        return min(self.storage_gb_s * 1e9, -(-gpus // self.server.gpus) * self.server.storage_bytes_per_s)

    def layers(self) -> list[Layer]:
        """Return the rate of a GPU inside a server and across each tier, innermost first."""
        server, rate = self.server, self.server.nic_bytes_per_s
        layers = [Layer("server", server.gpus, server.link_gb_s * 1e9, server.link_latency_us * 1e-6)]
        for tier in self.tiers:
            rate = rate / tier.oversubscription  # traffic of an outer tier crosses the inner ones too
            layers.append(Layer(tier.name, tier.gpus, rate, tier.latency_us * 1e-6))
        return layers


@dataclass(frozen=True)
class Layer:
    """Links between the GPUs of a group: of the server, or of a tier of switches."""

    name: str
    gpus: int
    bytes_per_s: float
    """Per GPU and direction, when all send at once."""
    latency_s: float


def fabric_names() -> tuple[str, ...]:
    """Return the presets of whole clusters."""
    return preset_names("tiers")


def is_fabric_name(named: str) -> bool:
    """Return whether `named` is a preset or a small cluster such as h100x8, which no file is needed for."""
    return named in fabric_names() or _small_fabric(named) is not None


def _small_fabric(named: str) -> dict[str, Any] | None:
    """Return the description of a small cluster such as h100x8: DGX servers on one network; None for another name.

    Raises ValueError for a number of GPUs that are no whole servers.
    """
    name, _, count = named.rpartition("x")
    if name not in DGX or not count.isdecimal():
        return None
    gpus, server = int(count), load_server(DGX[name])
    if not gpus or (gpus > server.gpus and gpus % server.gpus):
        near = max(1, round(gpus / server.gpus)) * server.gpus
        raise ValueError(f"{FIELD}: {named}: {gpus} GPUs are no whole servers of {server.gpus}; write {name}x{near}")
    own, share = server.model_dump() | {"gpus": min(gpus, server.gpus)}, min(1, gpus / server.gpus)
    own |= {name: share * own[name] for name in ("overhead_watts", "peak_watts")}  # a part of a server draws its part
    figures = {"network": "infiniband", "routing": "adaptive", "storage_gb_s": 20.0}
    sources = dict.fromkeys((*figures, "tiers"), "assumed; copy a preset for your own")
    tiers = [{"name": "cluster", "gpus": gpus}]
    return {"name": named, "accelerator": name, "server": own, "tiers": tiers, "sources": sources, **figures}


def load_fabric(named: str, sparse: bool = False) -> Fabric:
    """Return the cluster of a preset, of a name such as h100x8, or of a YAML file. Raises ValueError, a line per fault.

    `sparse` allows a peak with 2:4 sparsity.
    """
    if (small := _small_fabric(named)) is not None:
        return make_fabric(small, None, sparse)
    near = Path(named).parent
    return make_fabric(read_description(named, FIELD, "tiers"), near, sparse)


def make_fabric(data: dict[str, Any], near: Path | None = None, sparse: bool = False) -> Fabric:
    """Return the cluster of a mapping, in which accelerator and server may be names. Raises ValueError."""
    for field, preset in (("accelerator", "h100"), ("server", "grand-teton")):
        if field not in data:
            raise ValueError(f"{FIELD}.{field}: is missing; write a preset such as {preset}, or its figures")
    accelerator = load_accelerator(data["accelerator"], near, sparse)
    server = load_server(data["server"], near)
    if not server.peak_watts:
        watts = server.gpus * accelerator.watts + server.overhead_watts
        server = server.model_copy(update={"peak_watts": watts})
    parts: dict[str, Any] = {"accelerator": accelerator, "server": server}
    if data.get("hall") is not None:
        parts["hall"] = load_hall(data["hall"], near)
    return validate_description(Fabric, {**data, **parts}, FIELD)
