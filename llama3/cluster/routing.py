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

from llama3.cluster.clos import Bools, Clos, Ints, broken, rings, zone
from llama3.cluster.topology import Fabric, Routing

if TYPE_CHECKING:
    from scipy import sparse

Floats = NDArray[np.float64]
SEEDS = 20
RING = 16
"""Members, at most, of the ring that stands for all in `bandwidth_share`, each in a rack of its own."""


@dataclass(frozen=True)
class Job:
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


def slowdown(job: Job, seeds: int = SEEDS) -> Slowdown:
    """Return the slowdown of a job's rings by placements, failures and hashes of several seeds.

    Raises ValueError if too little is free for a ring, or if failures part two racks of the job.
    """
    return Slowdown(np.array([pair_rates(job, seed).min(axis=0) for seed in range(seeds)]))


def pair_rates(job: Job, seed: int) -> Floats:
    """Return what each card of a job sends to the next one of its ring, (members, rings), in cards' rates.

    Raises ValueError as `slowdown`.
    """
    from llama3.cluster.flows import max_min  # scipy

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
def ring_share(job: Job) -> float:
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
    share = ring_share(Job(clos, fabric.routing, fabric.queue_pairs, replica=clos.cards))
    return min(1.0, share * fabric.tiers[1].oversubscription)


def _routed(job: Job, sources: Ints, targets: Ints, out: Bools, rng: np.random.Generator) -> sparse.csr_array:
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
