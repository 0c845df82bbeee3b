"""A zone's two-stage Clos as links: cards under rack switches, and every rack switch joined to every spine by one link.

Cards of the i-th rack are i C ... i C + C - 1; a path between racks is told by its spine. The unit of rate is a card's.
Jobs run one ring per position in a replica, as data parallelism does in the order [TP, CP, PP, DP]. Given up: spines
made of several chips, links of other rates, and what lies above the zone.

Sources: arXiv 2407.21783, section 3.3.1 (racks of 16 GPUs in two servers); Gangidi et al., RDMA over Ethernet for
Distributed AI Training at Meta Scale, SIGCOMM 2024 (AI zone: a two-stage Clos, uplinks later doubled).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llama3.cluster.topology import Fabric

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
MOST_CARDS = 64
"""Of a rack in the model: how unevenly hashes fall changes little with more, the time to tell does."""


@dataclass(frozen=True)
class Clos:
    """Racks and spines; links are counted cards up, cards down, uplinks, downlinks of the spines."""

    racks: int
    cards: int = 16
    """Of a rack, one to each GPU."""
    server: int = 8
    """Cards of a server."""
    uplinks: int = 16
    """Of a rack, one to each spine, each as fast as a card."""

    def __post_init__(self) -> None:
        if self.racks < 1 or self.uplinks < 1 or self.cards % self.server:
            raise ValueError(f"clos: {self} needs racks, uplinks, and racks that hold whole servers")

    @property
    def links(self) -> int:
        """All links, each direction by itself."""
        return 2 * self.racks * (self.cards + self.uplinks)

    def card_links(self, sources: Ints, targets: Ints) -> tuple[Ints, Ints]:
        """Return the links from and to the cards of pairs."""
        return sources, self.racks * self.cards + targets

    def spine_links(self, sources: Ints, targets: Ints, spines: Ints) -> tuple[Ints, Ints]:
        """Return the links up to a spine, and down from it."""
        first = 2 * self.racks * self.cards
        up = first + sources // self.cards * self.uplinks + spines
        return up, first + self.racks * self.uplinks + targets // self.cards * self.uplinks + spines


def zone(fabric: Fabric, racks: int) -> Clos:
    """Return so many racks of a cluster's zone: its innermost tier, of which 64 cards stand for more."""
    server = fabric.server.gpus
    cards = max(server, min(fabric.tiers[0].gpus, MOST_CARDS) // server * server)
    return Clos(racks, cards, server, max(1, round(cards * fabric.uplinks)))


def broken(clos: Clos, failed: float, rng: np.random.Generator) -> Bools:
    """Return which cables between racks and spines are out, (racks, uplinks): a share of them, drawn at random."""
    cables = np.zeros(clos.racks * clos.uplinks, dtype=bool)
    cables[rng.choice(len(cables), round(failed * len(cables)), replace=False)] = True
    return cables.reshape(clos.racks, clos.uplinks)


def rings(clos: Clos, replica: int, taken: float, rng: np.random.Generator) -> Ints:
    """Return the cards of a job, (members, rings): a column is a ring, in which each card sends to the one below.

    `replica`: GPUs of a replica, so that rings join cards so far apart; `taken`: share of the servers that others have,
    drawn at random. The job has as many replicas as fit on the rest, in the order of the wiring. Raises ValueError if
    fewer than two fit.
    """
    servers = clos.racks * clos.cards // clos.server
    free = np.sort(rng.choice(servers, servers - round(servers * taken), replace=False))
    cards = (free[:, None] * clos.server + np.arange(clos.server)).ravel()
    members = len(cards) // replica
    if members < 2:
        raise ValueError(f"replica: {replica} GPUs fit {members} times on {len(cards)} free ones; a ring needs two")
    return cards[: members * replica].reshape(members, replica)
