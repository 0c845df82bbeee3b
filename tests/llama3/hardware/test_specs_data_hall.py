"""Power, racks and reader hosts: what a site feeds is what its GPUs take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.hardware.specs import Hall, gpus_within, hall_use, load_hall, load_server
from herd.llama3.hardware.topology import make_fabric
from tests.llama3.planner.plan_samples import CLUSTER

SERVER = load_server("grand-teton")


def hall(**changes: Any) -> Hall:
    return load_hall({**load_hall("meta-hall").model_dump(), **changes})


def test_twenty_megawatts() -> None:
    """810 racks of two servers: each 2 x 10.2 kW, a tenth more for switches, and 10 % for cooling."""
    assert gpus_within(hall(), SERVER, 20) == 16 * int(20e6 / (2 * 10_200 * 1.1 * 1.1)) == 12_960
    use = hall_use(hall(), SERVER, 12_960)
    assert (use.racks, use.rack_kw, use.readers) == (810, 20.4, 0)
    assert use.megawatts == pytest.approx(810 * 2 * 10_200 * 1.1 * 1.1 / 1e6)


@given(st.floats(0.1, 200), st.floats(0, 3000), st.booleans())
def test_what_is_fed_fits_the_power_and_one_rack_more_does_not(megawatts: float, gpu_mb_s: float, inside: bool) -> None:
    site = hall(readers_inside=inside)
    one_reader = 2 * site.reader_watts * site.pue / 1e6  # reader hosts are whole
    gpus = gpus_within(site, SERVER, megawatts, gpu_mb_s)
    assert hall_use(site, SERVER, gpus, gpu_mb_s).megawatts <= megawatts + one_reader
    assert hall_use(site, SERVER, gpus + 16, gpu_mb_s).megawatts > megawatts - one_reader


def test_readers_inside_take_power_from_gpus() -> None:
    outside, inside = (gpus_within(hall(readers_inside=where), SERVER, 20, 2_000) for where in (False, True))
    assert inside < outside == gpus_within(hall(), SERVER, 20)
    assert hall_use(hall(), SERVER, 8, 2_000).readers == 8 * 2_000 / 500


def test_racks_are_limited_by_power_and_by_places() -> None:
    assert hall_use(hall(rack_kw=15), SERVER, 64).racks == 8  # one server each
    assert gpus_within(hall(racks=100), SERVER, 20) == 1_600
    with pytest.raises(ValueError, match=r"rack_kw: 10 kW and 16 GPUs hold no grand-teton, which has 8 GPUs and draws"):
        hall_use(hall(rack_kw=10), SERVER, 8)
    with pytest.raises(
        ValueError, match=r"megawatts: 0\.01 do not feed one rack of 2 grand-teton, which takes 0\.0247"
    ):
        gpus_within(hall(), SERVER, 0.01)


def test_a_server_without_a_nameplate_has_that_of_its_parts() -> None:
    plain = {**SERVER.model_dump(), "peak_watts": 0.0}
    assert make_fabric({**CLUSTER, "server": plain}).server.peak_watts == 8 * 700 + 2_400
