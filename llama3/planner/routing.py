"""How flows find their way through a Clos, and what that leaves of a card's rate.

Training has few, fat flows, so that hashing puts several on one uplink while others idle. Four ways are modelled: ECMP
hashes each pair of cards; path pinning takes the spine by the destination's number (its place in the rack, where each
card has one uplink); E-ECMP hashes each of k queue pairs; adaptive spreads every packet over all spines (perfectly: the
InfiniBand way, no source for how near it comes). A ring is as fast as its slowest pair. Sources: Gangidi et al.,
SIGCOMM 2024; arXiv 2407.21783, section 3.3.1.

Assumed: hashes are uniform and independent; queue pairs take the next message when free, so that a pair has the sum of
its flows; flows around a failed cable are hashed over the paths that are left. How many flows a pair had before queue
pairs were scaled is not published: one is assumed, and what follows from it is a calibration. Given up: what lies above
the zone, and other jobs' traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llama3.planner.topology import Fabric, Routing

if TYPE_CHECKING:
    from scipy import sparse


# A zone's two-stage Clos as links: cards under rack switches, and every rack switch joined to every spine by one
# link.
#
# Cards of the i-th rack are i C ... i C + C - 1; a path between racks is told by its spine. The unit of rate is a
# card's. Jobs run one ring per position in a replica, as data parallelism does in the order [TP, CP, PP, DP]. Given
# up: spines made of several chips, links of other rates, and what lies above the zone.
#
# Sources: arXiv 2407.21783, section 3.3.1 (racks of 16 GPUs in two servers); Gangidi et al., RDMA over Ethernet for
# Distributed AI Training at Meta Scale, SIGCOMM 2024 (AI zone: a two-stage Clos, uplinks later doubled).

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


Floats = NDArray[np.float64]
SEEDS = 20
RING = 16
"""Members, at most, of the ring that stands for all in `bandwidth_share`, each in a rack of its own."""


@dataclass(frozen=True)
class RoutedJob:
    """A job's rings on a zone, and how the zone routes them."""

    clos: Clos
    routing: Routing
    queue_pairs: int = 1
    replica: int = 16
    """GPUs of a replica: cards of a ring lie so far apart. A rack or more: every card's ring leaves its rack."""
    taken: float = 0.0
    """Share of the servers that others have, drawn at random: a fragmented placement."""
    failed: float = 0.0
    """Share of the cables between racks and spines that are out."""

    def __post_init__(self) -> None:
        for field in ("taken", "failed"):
            if not 0 <= (value := getattr(self, field)) < 1:
                raise ValueError(f"{field}: {value} is no share; write one from 0 to below 1")
        if self.queue_pairs > 1 and self.routing in ("ecmp", "pinning"):
            raise ValueError(f"queue_pairs: {self.queue_pairs} take one path under {self.routing}; write 1 or e-ecmp")


@dataclass(frozen=True)
class Slowdown:
    """How much longer rings take than with the cards' full rate, over rings and seeds."""

    shares: Floats
    """(seeds, rings): of a card's rate."""

    @property
    def share(self) -> float:
        """Mean over rings and seeds of what a ring has of a card's rate."""
        return float(self.shares.mean())

    @property
    def mean(self) -> float:
        """Mean of the slowdown; 1 is none."""
        return float((1 / self.shares).mean())

    def quantile(self, share: float) -> float:
        """Return the slowdown that this share of the rings stay within: 0.5, 0.99."""
        return float(np.quantile(1 / self.shares, share))


def slowdown(job: RoutedJob, seeds: int = SEEDS) -> Slowdown:
    """Return the slowdown of a job's rings by placements, failures and hashes of several seeds.

    Raises ValueError if too little is free for a ring, or if failures part two racks of the job.
    """
    return Slowdown(np.array([pair_rates(job, seed).min(axis=0) for seed in range(seeds)]))


def pair_rates(job: RoutedJob, seed: int) -> Floats:
    """Return what each card of a job sends to the next one of its ring, (members, rings), in cards' rates.

    Raises ValueError as `slowdown`.
    """

    rng = np.random.default_rng(seed)
    members = rings(job.clos, job.replica, job.taken, rng)
    out = broken(job.clos, job.failed, rng)
    sources, targets = members.ravel(), np.roll(members, -1, axis=0).ravel()
    spread = job.routing == "adaptive"
    flows = 1 if spread else job.queue_pairs
    sources, targets = np.repeat(sources, flows), np.repeat(targets, flows)
    use = _sprayed(job.clos, sources, targets, out) if spread else _routed(job, sources, targets, out, rng)
    rates = max_min(use, np.ones(job.clos.links))
    pairs: Floats = rates.reshape(*members.shape, flows).sum(axis=-1)
    return pairs


@lru_cache(maxsize=256)
def ring_share(job: RoutedJob) -> float:
    """Return the mean of what a ring has of a card's rate, remembered. Raises ValueError as `slowdown`."""
    return slowdown(job).share


def bandwidth_share(fabric: Fabric) -> float:
    """Return the part of a card's rate that a ring over the racks of one zone, 16 at most, gets: a mean over seeds.

    What oversubscription takes is no part of it: `Fabric.layers` has it. Without a second rack in the zone there is
    nothing to choose, and the part is 1.
    """
    racks = min(RING, fabric.tiers[1].gpus // fabric.tiers[0].gpus) if len(fabric.tiers) > 1 else 1
    if racks == 1:
        return 1.0
    clos = zone(fabric, racks)
    share = ring_share(RoutedJob(clos, fabric.routing, fabric.queue_pairs, replica=clos.cards))
    return min(1.0, share * fabric.tiers[1].oversubscription)


def _routed(job: RoutedJob, sources: Ints, targets: Ints, out: Bools, rng: np.random.Generator) -> sparse.csr_array:
    """Return the links of flows that each take one path, (links, flows)."""
    from scipy import sparse

    clos = job.clos
    whole = _paths(clos, sources, targets, out)
    spines = targets % clos.uplinks if job.routing == "pinning" else _hashed(whole, rng)
    lost = ~whole[np.arange(len(spines)), spines]
    spines = np.where(lost, _hashed(whole, rng), spines)
    crossing = np.flatnonzero(sources // clos.cards != targets // clos.cards)
    far = clos.spine_links(sources[crossing], targets[crossing], spines[crossing])
    links = np.concatenate([*clos.card_links(sources, targets), *far])
    flows = np.concatenate([np.tile(np.arange(len(sources)), 2), np.tile(crossing, 2)])
    return sparse.csr_array((np.ones(len(links)), (links, flows)), shape=(clos.links, len(sources)))


def _sprayed(clos: Clos, sources: Ints, targets: Ints, out: Bools) -> sparse.csr_array:
    """Return the links of flows that are spread evenly over all whole paths, (links, flows)."""
    from scipy import sparse

    whole = _paths(clos, sources, targets, out)
    whole[sources // clos.cards == targets // clos.cards] = False
    flows, spines = np.nonzero(whole)
    parts = 1 / whole.sum(axis=1)[flows]
    links = np.concatenate(
        [*clos.card_links(sources, targets), *clos.spine_links(sources[flows], targets[flows], spines)]
    )
    weights = np.concatenate([np.ones(2 * len(sources)), parts, parts])
    numbers = np.concatenate([np.tile(np.arange(len(sources)), 2), flows, flows])
    return sparse.csr_array((weights, (links, numbers)), shape=(clos.links, len(sources)))


def _paths(clos: Clos, sources: Ints, targets: Ints, out: Bools) -> Bools:
    """Return by flow and spine whether both cables are whole. Raises ValueError for a flow without a path."""
    whole: Bools = ~(out[sources // clos.cards] | out[targets // clos.cards])
    apart = ~whole.any(axis=1) & (sources // clos.cards != targets // clos.cards)
    if apart.any():
        flow = np.flatnonzero(apart)[0]
        racks = sources[flow] // clos.cards, targets[flow] // clos.cards
        raise ValueError(f"failed: no spine joins racks {racks[0]} and {racks[1]} any more; let fewer cables fail")
    return whole


def _hashed(whole: Bools, rng: np.random.Generator) -> Ints:
    """Return a spine per flow, each whole path as likely as another."""
    picks = np.floor(rng.random(len(whole)) * whole.sum(axis=1)).astype(np.int64)
    spines: Ints = np.argmax(np.cumsum(whole, axis=1) > picks[:, None], axis=1)
    return spines


# Rates of flows that share links: max-min fairness.
#
# What congestion control strives for (Bertsekas, Gallager, Data Networks, section 6.5.2): no flow can have more
# without taking from one that has no more. Found by progressive filling, many links at a time: a link whose fair
# share is the least on the way of each of its flows cannot give them more, so those flows are settled. Given up:
# bursts, round-trip times, losses and pauses; every flow always has something to send.
#
# Shapes: L links, F flows; rates in the unit of the capacities.


def max_min(use: sparse.sparray, capacity: Floats) -> Floats:
    """Return the max-min fair rates, (F,).

    `use`: (L, F), the part of a flow's rate that a link carries: 1 on its path, less where a flow is spread over
    several. `capacity`: (L,). Raises ValueError for a negative part or capacity, or for a flow that uses no link.
    """
    by_link = _checked(use, capacity)
    busy = np.diff(by_link.indptr) > 0
    by_link, left = by_link[busy], capacity[busy].astype(np.float64)
    by_flow = by_link.tocsc()
    rates, open_ = np.zeros(by_link.shape[1]), np.ones(by_link.shape[1], dtype=bool)
    while open_.any():
        demand = by_link @ open_.astype(np.float64)
        share = np.divide(left, demand, out=np.full(len(left), np.inf), where=demand > 0)
        least = np.where(open_, np.minimum.reduceat(share[by_flow.indices], by_flow.indptr[:-1]), np.inf)
        tightest = np.minimum.reduceat(least[by_link.indices], by_link.indptr[:-1]) == share
        tightest &= demand > 0
        settled = open_ & np.logical_or.reduceat(tightest[by_flow.indices], by_flow.indptr[:-1])
        rates[settled] = least[settled]
        open_ &= ~settled
        left = np.maximum(left - by_link @ np.where(settled, rates, 0.0), 0.0)
    return rates


def _checked(use: sparse.sparray, capacity: Floats) -> sparse.csr_array:
    from scipy import sparse

    by_link = sparse.csr_array(use, dtype=np.float64, copy=True)
    by_link.sum_duplicates()
    by_link.eliminate_zeros()
    if capacity.shape != (by_link.shape[0],):
        raise ValueError(f"capacity: {capacity.shape} for {by_link.shape[0]} links; give one for each")
    if (by_link.data < 0).any() or (capacity < 0).any():
        raise ValueError("use, capacity: some are negative; a flow's part and a link's rate are 0 or more")
    if len(idle := np.flatnonzero(np.diff(by_link.tocsc().indptr) == 0)):
        raise ValueError(f"use: flow {idle[0]} crosses no link, so that nothing bounds it; leave it out")
    return by_link
