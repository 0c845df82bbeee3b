"""Routing of flows in a two-stage Clos, and the share of a card's rate that a ring gets.

Sources: Gangidi et al., RDMA over Ethernet for Distributed AI Training at Meta Scale, SIGCOMM 2024; arXiv 2407.21783,
section 3.3.1. Hashes are uniform and independent. Not modeled: other jobs' traffic and what is above the zone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from herd.llama3.hardware.topology import Fabric, Routing

if TYPE_CHECKING:
    from scipy import sparse


Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
MOST_CARDS = 64
"""Cards of a rack in the model. More change little in how unevenly hashes distribute, but take longer to simulate."""
SEEDS = 20
BURST_BYTES = 64e6
"""Bytes of a message that meets others at a link; assumed, about a layer's weights of a tensor-parallel rank."""
DCQCN_PERIOD_S, DCQCN_PERIODS = 55e-6, 5
"""Period of a sender's recovery, and the periods in which it goes half of the way back (Zhu et al., SIGCOMM 2015)."""
RING = 16
"""Most members of the ring in `bandwidth_share`, each in another rack."""


# Links of a zone: cards under rack switches, every rack switch joined to every spine by one link


@dataclass(frozen=True)
class Clos:
    """Racks and spines. Links are numbered: cards up, cards down, uplinks, downlinks of the spines.

    The unit of rate is a card's. Rack i has the cards i C ... i C + C - 1.
    """

    racks: int
    cards: int = 16
    """Of a rack, one per GPU."""
    server: int = 8
    """Cards of a server."""
    uplinks: int = 16
    """Of a rack, one per spine, each as fast as a card."""

    def __post_init__(self) -> None:
        if self.racks < 1 or self.uplinks < 1 or self.cards % self.server:
            raise ValueError(f"clos: {self} needs racks, uplinks, and racks that hold whole servers")

    @property
    def links(self) -> int:
        """Number of links; each direction counts."""
        return 2 * self.racks * (self.cards + self.uplinks)

    def card_links(self, sources: Ints, targets: Ints) -> tuple[Ints, Ints]:
        """Return the links from and to the cards of pairs."""
        return sources, self.racks * self.cards + targets

    def spine_links(self, sources: Ints, targets: Ints, spines: Ints) -> tuple[Ints, Ints]:
        """Return the links up to the spines, and down from them."""
        first = 2 * self.racks * self.cards
        up = first + sources // self.cards * self.uplinks + spines
        return up, first + self.racks * self.uplinks + targets // self.cards * self.uplinks + spines


def make_zone(fabric: Fabric, racks: int) -> Clos:
    """Return `racks` racks (the innermost tier) of a cluster's zone, with at most 64 cards each."""
    server = fabric.server.gpus
    cards = max(server, min(fabric.tiers[0].gpus, MOST_CARDS) // server * server)
    return Clos(racks, cards, server, max(1, round(cards * fabric.uplinks)))


def failed_links(clos: Clos, failed: float, rng: np.random.Generator) -> Bools:
    """Return the failed cables between racks and spines, (racks, uplinks): a random share `failed` of them."""
    cables = np.zeros(clos.racks * clos.uplinks, dtype=bool)
    cables[rng.choice(len(cables), round(failed * len(cables)), replace=False)] = True
    return cables.reshape(clos.racks, clos.uplinks)


def job_rings(clos: Clos, replica: int, taken: float, rng: np.random.Generator) -> Ints:
    """Return the cards of a job, (members, rings): a column is a ring, in which each card sends to the next row.

    One ring per position in a replica, as data parallelism has in the order [TP, CP, PP, DP]. `replica`: GPUs of a
    replica, the distance between members; `taken`: random share of the servers that other jobs use. Raises ValueError
    if fewer than two replicas fit on the rest.
    """
    servers = clos.racks * clos.cards // clos.server
    free = np.sort(rng.choice(servers, servers - round(servers * taken), replace=False))
    cards = (free[:, None] * clos.server + np.arange(clos.server)).ravel()
    members = len(cards) // replica
    if members < 2:
        raise ValueError(
            f"replica: {replica} GPUs fit {members} times on {len(cards)} free ones; a ring needs two replicas"
        )
    return cards[: members * replica].reshape(members, replica)


@dataclass(frozen=True)
class RoutedJob:
    """A job's rings on a zone, and the routing of the zone.

    ECMP hashes each pair of cards to a spine; path pinning takes the spine by the destination's position in its rack;
    E-ECMP hashes each queue pair; adaptive spreads packets over all spines, perfectly.
    """

    clos: Clos
    routing: Routing
    queue_pairs: int = 1
    replica: int = 16
    """GPUs of a replica: the distance of a ring's cards. With a rack or more every ring leaves its rack."""
    taken: float = 0.0
    """Random share of the servers that other jobs use: a fragmented placement."""
    failed: float = 0.0
    """Share of the cables between racks and spines that failed."""

    def __post_init__(self) -> None:
        for field in ("taken", "failed"):
            if not 0 <= (value := getattr(self, field)) < 1:
                raise ValueError(f"{field}: {value} is not a share; write 0 to below 1")
        if self.queue_pairs > 1 and self.routing in ("ecmp", "pinning"):
            raise ValueError(f"queue_pairs: {self.queue_pairs} take one path under {self.routing}; write 1 or e-ecmp")


@dataclass(frozen=True)
class Slowdown:
    """Slowdown of rings against the full rate of their cards, over rings and seeds."""

    shares: Floats
    """(seeds, rings): of a card's rate."""

    @property
    def share(self) -> float:
        """Mean share of a card's rate over rings and seeds."""
        return float(self.shares.mean())

    @property
    def mean(self) -> float:
        """Mean of the slowdown; 1 is none."""
        return float((1 / self.shares).mean())

    def quantile(self, share: float) -> float:
        """Return a quantile of the slowdown: 0.5, 0.99."""
        return float(np.quantile(1 / self.shares, share))


def slowdown(job: RoutedJob, seeds: int = SEEDS) -> Slowdown:
    """Return the slowdown of a job's rings over seeded placements, failures and hashes.

    A ring is as fast as its slowest pair. Raises ValueError if a ring does not fit the free servers, or if
    failures disconnect two racks of the job.
    """
    return Slowdown(np.array([pair_rates(job, seed).min(axis=0) for seed in range(seeds)]))


def pair_rates(job: RoutedJob, seed: int) -> Floats:
    """Return the rate of each card of a job to the next of its ring, (members, rings), in cards' rates.

    A pair has the sum of its flows' rates: queue pairs take the next message when free. Raises ValueError as
    `slowdown`.
    """
    clos, rng = job.clos, np.random.default_rng(seed)
    members = job_rings(clos, job.replica, job.taken, rng)
    failed = failed_links(clos, job.failed, rng)
    sources, targets = members.ravel(), np.roll(members, -1, axis=0).ravel()
    spread = job.routing == "adaptive"
    flows = 1 if spread else job.queue_pairs
    sources, targets = np.repeat(sources, flows), np.repeat(targets, flows)
    source_racks, target_racks = sources // clos.cards, targets // clos.cards
    whole: Bools = ~(failed[source_racks] | failed[target_racks])  # (flows, spines): both cables work
    disconnected = ~whole.any(axis=1) & (source_racks != target_racks)
    if disconnected.any():
        flow = np.flatnonzero(disconnected)[0]
        raise ValueError(
            f"failed: no spine joins racks {source_racks[flow]} and {target_racks[flow]} any more; "
            "let fewer cables fail"
        )
    use = _sprayed_paths(clos, sources, targets, whole) if spread else _hashed_paths(job, sources, targets, whole, rng)
    rates = max_min_fair(use, np.ones(clos.links))
    pairs: Floats = rates.reshape(*members.shape, flows).sum(axis=-1)
    return pairs


@lru_cache(maxsize=256)
def ring_share(job: RoutedJob) -> float:
    """Return the mean share of a card's rate that a ring gets, cached. Raises ValueError as `slowdown`."""
    return slowdown(job).share


def bandwidth_share(fabric: Fabric) -> float:
    """Return the mean share of a card's rate that a ring over at most 16 racks of one zone gets.

    With the loss by congestion control, and without the effect of oversubscription, which `Fabric.layers` has. 1 if the
    zone has only one rack.
    """
    racks = min(RING, fabric.tiers[1].gpus // fabric.tiers[0].gpus) if len(fabric.tiers) > 1 else 1
    if racks == 1:
        return 1.0
    clos = make_zone(fabric, racks)
    share = ring_share(RoutedJob(clos, fabric.routing, fabric.queue_pairs, replica=clos.cards))
    return min(1.0, share * fabric.tiers[1].oversubscription * congestion_share(fabric, 1 / share))


def _hashed_paths(
    job: RoutedJob, sources: Ints, targets: Ints, whole: Bools, rng: np.random.Generator
) -> sparse.csr_array:
    """Return the links of flows that each take one path, (links, flows)."""
    from scipy import sparse

    def hashed() -> Ints:
        """Return a spine per flow; each working path has the same probability."""
        picks = np.floor(rng.random(len(whole)) * whole.sum(axis=1)).astype(np.int64)
        spines: Ints = np.argmax(np.cumsum(whole, axis=1) > picks[:, None], axis=1)
        return spines

    clos = job.clos
    spines = targets % clos.uplinks if job.routing == "pinning" else hashed()
    lost = ~whole[np.arange(len(spines)), spines]
    spines = np.where(lost, hashed(), spines)  # flows around a failed cable are hashed over the other paths
    crossing = np.flatnonzero(sources // clos.cards != targets // clos.cards)
    far = clos.spine_links(sources[crossing], targets[crossing], spines[crossing])
    links = np.concatenate([*clos.card_links(sources, targets), *far])
    flows = np.concatenate([np.tile(np.arange(len(sources)), 2), np.tile(crossing, 2)])
    return sparse.csr_array((np.ones(len(links)), (links, flows)), shape=(clos.links, len(sources)))


def _sprayed_paths(clos: Clos, sources: Ints, targets: Ints, whole: Bools) -> sparse.csr_array:
    """Return the links of flows that are spread evenly over all working paths, (links, flows)."""
    from scipy import sparse

    whole[sources // clos.cards == targets // clos.cards] = False
    flows, spines = np.nonzero(whole)
    path_shares = 1 / whole.sum(axis=1)[flows]
    links = np.concatenate(
        [*clos.card_links(sources, targets), *clos.spine_links(sources[flows], targets[flows], spines)]
    )
    weights = np.concatenate([np.ones(2 * len(sources)), path_shares, path_shares])
    numbers = np.concatenate([np.tile(np.arange(len(sources)), 2), flows, flows])
    return sparse.csr_array((weights, (links, numbers)), shape=(clos.links, len(sources)))


# Congestion control: what a link with more offered load than it carries loses beyond its fair share.


def congestion_share(fabric: Fabric, load: float) -> float:
    """Return the share of a link's rate that flows get under the cluster's congestion control.

    `load`: offered to the busiest link over its rate; up to 1 nothing is lost. Priority flow control (PFC) always acts.
    """
    rate = fabric.server.nic_bytes_per_s
    buffer = float("inf") if fabric.buffer_mb is None else fabric.buffer_mb * 1e6
    match fabric.congestion_control:
        case "none":
            return 1 - pfc_paused(load, BURST_BYTES, buffer)
        case "dcqcn":
            return dcqcn_share(rate, load, fabric.ecn_mb * 1e6)
        case "receiver-driven":
            window = fabric.in_flight_mb * 1e6  # of a sender; what senders have in flight together is the burst
            paused = pfc_paused(load, min(BURST_BYTES, window * load), buffer)
            return admission_share(rate, window, 2e-6 * fabric.tiers[-1].latency_us) * (1 - paused)


def pfc_paused(load: float, burst: float, buffer: float) -> float:
    """Return the share of a burst's time in which a switch pauses the links towards it, and with them other flows.

    Of `burst` bytes, which arrive at `load` times the rate at which they leave, 1 - 1 / load queue up; the pause lasts
    for what `buffer` does not hold: (1 - 1 / load) - buffer / burst.
    """
    return max(0.0, 1 - 1 / load - buffer / burst) if load > 1 else 0.0


def dcqcn_share(rate: float, load: float, threshold: float) -> float:
    """Return the mean use of a link of `rate` bytes per second at a load above 1, with senders under DCQCN.

    A notification halves every sender; they do so until the link carries them, and then go half of the way back in each
    period (Zhu et al., SIGCOMM 2015). Until then the link empties the queue that made switches mark, `threshold` bytes.
    A period holds more bytes the faster the link is, so a threshold that is enough at 40 Gb/s is too small at 400.
    """
    if load <= 1:
        return 1.0
    lowest = use = load / 2 ** ceil(log2(load))
    missing, periods = 0.0, 0
    while use < 1 and periods < DCQCN_PERIODS:
        missing, periods, use = missing + 1 - use, periods + 1, (use + 2 * lowest) / 2
    lost = max(0.0, missing * rate * DCQCN_PERIOD_S - threshold)
    return 1 - lost / (rate * DCQCN_PERIOD_S * max(1, periods))


def admission_share(rate: float, window: float, round_trip_s: float) -> float:
    """Return the share of a card's rate that `window` bytes in flight allow: a receiver admits the next after those."""
    return min(1.0, window / (rate * round_trip_s))


# Max-min fairness. L links, F flows; rates in the unit of the capacities


def max_min_fair(use: sparse.sparray, capacity: Floats) -> Floats:
    """Return the max-min fair rates, (F,): no flow can get more without taking from one that has no more.

    `use`: (L, F), the part of a flow's rate that a link carries: 1 on its path, less where a flow is spread over
    several. `capacity`: (L,). The goal of congestion control (Bertsekas, Gallager, Data Networks, section 6.5.2), by
    progressive filling, many links at a time: a link with the lowest fair share on the path of each of its flows
    settles those flows. Raises ValueError for a negative part or capacity, or for a flow that uses no link.
    """
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
