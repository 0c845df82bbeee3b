from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.hardware.topology import Routing, load_fabric
from herd.llama3.planner.routing import (
    Clos,
    RoutedJob,
    Slowdown,
    admission_share,
    bandwidth_share,
    congestion_share,
    dcqcn_share,
    pair_rates,
    pfc_paused,
    ring_share,
    slowdown,
)

ZONE = Clos(8)
ROUTINGS: tuple[Routing, ...] = ("ecmp", "pinning", "e-ecmp", "adaptive")


@given(
    st.sampled_from(ROUTINGS),
    st.integers(2, 6),
    st.sampled_from([8, 16, 32]),
    st.sampled_from([0.0, 0.25]),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 9),
)
def test_no_pair_has_more_than_its_card_and_no_rack_more_than_its_uplinks(
    routing: Routing, racks: int, uplinks: int, taken: float, failed: float, seed: int
) -> None:
    job = RoutedJob(Clos(racks, uplinks=uplinks), routing, 4 if routing == "e-ecmp" else 1, 8, taken, failed)
    rates = pair_rates(job, seed)
    assert (rates > 0).all()
    assert (rates <= 1 + 1e-9).all()
    assert (pair_rates(job, seed) == rates).all()


def test_a_rack_sends_what_its_uplinks_carry() -> None:
    half = Clos(4, uplinks=8)
    assert pair_rates(RoutedJob(half, "adaptive"), 0) == pytest.approx(0.5)
    for routing in ROUTINGS:
        assert pair_rates(RoutedJob(half, routing), 0).sum(axis=1).max() <= 8 + 1e-9


def test_one_flow_a_pair_on_one_path_has_a_whole_number_of_sharers() -> None:
    sharers = 1 / pair_rates(RoutedJob(ZONE, "ecmp"), 0)
    assert sharers.max() >= 2
    assert sharers[sharers <= 2] == pytest.approx(np.round(sharers[sharers <= 2]))


def test_pinning_suits_whole_racks_and_puts_two_servers_on_one_path_otherwise() -> None:
    whole = RoutedJob(ZONE, "pinning")
    assert pair_rates(whole, 0) == pytest.approx(1)
    rates = np.array([pair_rates(replace(whole, taken=0.25), seed) for seed in range(10)])
    assert set(np.unique(rates.round(9))) == {0.5, 1.0}


def test_failed_cables_disturb_pinning_and_spreading_the_least() -> None:
    losses = {
        routing: 1 - slowdown(RoutedJob(ZONE, routing, failed=1 / 16)).share for routing in ("pinning", "adaptive")
    }
    assert losses["pinning"] > losses["adaptive"] > 1 / 16  # the rack with most cables out decides


@given(st.integers(2, 8), st.sampled_from([16, 20, 32]), st.integers(0, 9))
def test_pinning_and_spreading_are_perfect_on_whole_racks_with_an_uplink_per_card(
    racks: int, uplinks: int, seed: int
) -> None:
    for routing in ("pinning", "adaptive"):
        assert pair_rates(RoutedJob(Clos(racks, uplinks=uplinks), routing), seed) == pytest.approx(1)


@given(st.integers(2, 8), st.sampled_from([12, 16, 32]), st.sampled_from([0.03, 0.1]), st.integers(0, 9))
def test_failed_cables_never_give_the_slowest_pair_of_a_spread_job_more(
    racks: int, uplinks: int, failed: float, seed: int
) -> None:
    job = RoutedJob(Clos(racks, uplinks=uplinks), "adaptive")
    before, after = (pair_rates(replace(job, failed=share), seed).min() for share in (0.0, failed))
    assert after <= before + 1e-9


def test_more_failed_cables_leave_less_and_spreading_leaves_most() -> None:
    for routing, flows in [("ecmp", 1), ("pinning", 1), ("e-ecmp", 4), ("e-ecmp", 16), ("adaptive", 1)]:
        job = RoutedJob(Clos(8, uplinks=32), routing, flows)
        shares = [ring_share(replace(job, failed=failed)) for failed in (0.0, 0.1, 0.4)]
        assert shares == sorted(shares, reverse=True)
        assert 0 < shares[-1] < shares[0]
        spread = [ring_share(RoutedJob(job.clos, "adaptive", failed=failed)) for failed in (0.0, 0.1, 0.4)]
        assert all(mine <= most + 1e-9 for mine, most in zip(shares, spread, strict=True))


def test_more_flows_are_never_worse_and_spreading_is_the_best() -> None:
    for clos in (ZONE, replace(ZONE, uplinks=32)):
        found = [slowdown(RoutedJob(clos, "e-ecmp", flows)).share for flows in (1, 2, 4, 8, 16)]
        assert found == sorted(found)
        assert slowdown(RoutedJob(clos, "ecmp")).share == found[0] < 0.5
        assert found[-1] <= slowdown(RoutedJob(clos, "adaptive")).share == pytest.approx(1)


def test_longer_rings_are_slower() -> None:
    shares = [ring_share(RoutedJob(Clos(racks), "ecmp")) for racks in (2, 4, 8, 16)]
    assert shares == sorted(shares, reverse=True)


def test_the_slowest_pair_makes_the_ring() -> None:
    job = RoutedJob(ZONE, "ecmp")
    found = slowdown(job, seeds=5)
    assert found.shares.shape == (5, 16)
    assert (found.shares[3] == pair_rates(job, 3).min(axis=0)).all()
    assert 1 <= found.quantile(0.0) <= found.quantile(0.5) <= found.quantile(0.99)
    assert found.quantile(0.0) <= found.mean <= found.quantile(1.0)
    assert Slowdown(np.array([[0.5, 1.0]])).mean == 1.5


def test_hashes_of_a_flow_are_even_over_the_paths_that_are_left() -> None:
    clos = Clos(2, cards=1, server=1, uplinks=4)
    job = RoutedJob(clos, "e-ecmp", 2000, replica=1, failed=1 / 8)  # one of eight cables: three spines join both racks
    assert pair_rates(job, 0) == pytest.approx(1)
    crowded = RoutedJob(replace(clos, cards=6), "e-ecmp", 500, replica=6, failed=1 / 8)
    assert pair_rates(crowded, 0).sum(axis=1) == pytest.approx(3, rel=0.02)


def test_racks_that_no_spine_joins_are_told() -> None:
    with pytest.raises(ValueError, match="no spine joins racks"):
        slowdown(RoutedJob(Clos(2, uplinks=2), "ecmp", failed=0.75))


def test_jobs_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"taken: 1\.0 is not a share"):
        RoutedJob(ZONE, "ecmp", taken=1.0)
    with pytest.raises(ValueError, match=r"failed: -0\.1 is not a share"):
        RoutedJob(ZONE, "ecmp", failed=-0.1)
    with pytest.raises(ValueError, match="16 take one path under ecmp"):
        RoutedJob(ZONE, "ecmp", 16)


def test_shares_of_the_presets() -> None:
    roce, zone, band = (load_fabric(name) for name in ("roce-24k", "ai-zone", "ib-24k"))
    plain = roce.model_copy(update={"routing": "ecmp", "queue_pairs": 1})
    assert bandwidth_share(band) == pytest.approx(1)
    assert bandwidth_share(zone) > 0.99
    assert 0.85 < bandwidth_share(roce) < 0.99
    assert bandwidth_share(plain) < 0.5
    assert bandwidth_share(plain.model_copy(update={"routing": "pinning"})) == pytest.approx(1)


def test_oversubscription_of_a_rack_counts_once() -> None:
    band = load_fabric("ib-24k")
    thin = band.model_copy(update={"uplinks": 0.5})
    tiers = (band.tiers[0], band.tiers[1].model_copy(update={"oversubscription": 2.0}), band.tiers[2])
    assert bandwidth_share(thin) == pytest.approx(0.5)  # the layers do not have it
    assert bandwidth_share(thin.model_copy(update={"tiers": tiers})) == pytest.approx(1)


def test_a_zone_of_few_racks_has_no_ring_over_sixteen() -> None:
    roce = load_fabric("roce-24k").model_copy(update={"routing": "ecmp", "queue_pairs": 1})
    rack, pod, cluster = roce.tiers

    def zones_of(racks: int) -> float:
        return bandwidth_share(
            roce.model_copy(update={"tiers": (rack, pod.model_copy(update={"gpus": racks * 16}), cluster)})
        )

    assert zones_of(1) == 1
    assert zones_of(2) == ring_share(RoutedJob(Clos(2), "ecmp")) > zones_of(4) > zones_of(16)
    assert zones_of(16) == zones_of(192) == bandwidth_share(roce)


def test_one_switch_has_nothing_to_choose() -> None:
    roce = load_fabric("roce-24k")
    assert bandwidth_share(roce.model_copy(update={"tiers": roce.tiers[:1], "routing": "ecmp", "queue_pairs": 1})) == 1


# Congestion control


@given(st.floats(0.1, 64), st.floats(1e9, 1e11), st.floats(0, 1e8))
def test_congestion_costs_nothing_below_load_1_and_never_more_than_there_is(
    load: float, rate: float, held: float
) -> None:
    paused, used = pfc_paused(load, 64e6, held), dcqcn_share(rate, load, held)
    assert 0 <= paused < 1
    assert 0.5 <= used <= 1
    if load <= 1:
        assert (paused, used) == (0, 1)
    assert pfc_paused(load, 64e6, held / 2) >= paused
    assert dcqcn_share(rate, load, held / 2) <= used <= dcqcn_share(rate / 2, load, held)


def test_what_a_buffer_does_not_hold_pauses_others() -> None:
    assert pfc_paused(2, 64e6, 0) == 0.5  # a link needs twice the time of the burst
    assert pfc_paused(2, 64e6, 16e6) == 0.25
    assert pfc_paused(2, 64e6, 32e6) == 0


def test_senders_that_halved_come_back_in_periods() -> None:
    """Three senders: a link of 40 Gb/s is 3/4 full for one period of 55 us, which 69 kB of queue bridge."""
    rate = 5e9
    assert dcqcn_share(rate, 3, 0) == pytest.approx(0.75)
    assert dcqcn_share(rate, 3, 0.25 * 55e-6 * rate) == 1
    assert dcqcn_share(rate, 2, 0) == 1


def test_congestion_control_is_the_clusters() -> None:
    roce = load_fabric("roce-24k")

    def share(**changes: object) -> float:
        return congestion_share(roce.model_copy(update=changes), 1.1)

    assert share() == share(congestion_control="none") == 1
    assert share(congestion_control="none", buffer_mb=1) == pytest.approx(1 - (1 - 1 / 1.1 - 1 / 64))
    assert (
        share(congestion_control="none", buffer_mb=0.2) < share(buffer_mb=0.2) < 1
    )  # admission sends fewer bytes at once
    assert share(congestion_control="dcqcn") < share(congestion_control="dcqcn", ecn_mb=10) == 1
    assert share(in_flight_mb=0.5) == pytest.approx(0.5e6 / (48.5e9 * 28e-6)) == admission_share(48.5e9, 0.5e6, 28e-6)
