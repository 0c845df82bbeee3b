"""What a calibration says of points: curves, misses, warnings."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from herd.llama3.planner.device_curves import (
    BACK,
    ELEMENTWISE,
    FORWARD,
    GEMM,
    Calibration,
    GemmCurve,
    MeasuredPoint,
    fit_calibration,
)

DATE = "2026-01-02T03:04:05.000+00:00"
H100 = "NVIDIA H100 80GB HBM3"


def points(peak: float = 989e12, ceiling: float = 0.8) -> list[MeasuredPoint]:
    """Return the points of a device whose products follow a curve exactly."""
    true = GemmCurve(peak, ceiling, 300.0)
    products = [
        MeasuredPoint(GEMM, (4096, side, side), 2.0 * 4096 * side**2, true.seconds(4096, side, side), 0.01, 9)
        for side in (256, 1024, 4096)
    ]
    attention = [
        MeasuredPoint(what, (1, length, 16, 128), work * length**2, work * length**2 / rate, 0.02, 9)
        for length in (1024, 8192)
        for what, work, rate in ((FORWARD, 4096.0, 5e14), (BACK, 10_240.0, 4e14))
    ]
    moved = [
        MeasuredPoint(ELEMENTWISE, (4096, width), 1e5 * width, 1e5 * width / (2e12 + width), 0.0, 9)
        for width in (512, 4096)
    ]
    return [*products, *attention, *moved]


def calibration(found: list[MeasuredPoint], device: str = H100) -> Calibration:
    return Calibration(fit_calibration(found, device, DATE), tuple(found), DATE, "2.13.0", 0)


def test_curves_go_through_points_that_follow_them() -> None:
    found = calibration(points())
    assert found.curves.gemm.ceiling == pytest.approx(0.8, rel=1e-3)
    assert found.gemm_miss < 1e-3
    assert all(abs(found.miss(one)) < 1e-3 for one in found.points if one.what != ELEMENTWISE)
    assert found.curves.attention.lengths == (1024, 8192)
    assert found.warnings() == []


def test_elementwise_work_counts_at_its_largest_size() -> None:
    found = calibration(points())
    assert found.curves.memory.bytes_per_s == pytest.approx(2e12 + 4096)
    small, large = (one for one in found.points if one.what == ELEMENTWISE)
    assert found.miss(small) < 0
    assert found.miss(large) == pytest.approx(0.0)


def test_a_known_device_is_held_against_its_dense_peak() -> None:
    assert calibration(points()).curves.gemm.peak_flops == 989e12
    assert calibration(points()).curves.source == "measured 2026-01-02"


def test_an_unknown_device_is_held_against_its_fastest_product() -> None:
    found = calibration(points(peak=1e12), device="a new card")
    fastest = max(one.rate for one in found.points if one.what == GEMM)
    assert found.curves.gemm.peak_flops == fastest < 1e12
    assert "peak is unknown" in found.curves.source
    assert found.gemm_miss < 1e-3


def test_a_poor_fit_and_a_busy_machine_are_told() -> None:
    worse = [
        replace(one, seconds=one.seconds * (4 if number % 2 else 1), spread=0.5) if one.what == GEMM else one
        for number, one in enumerate(points())
    ]
    poor, busy = calibration(worse).warnings()
    assert poor.startswith("products miss their curve by")
    assert busy.startswith("3 of 9 points spread by more than 20%")


def test_json_brings_back_everything() -> None:
    found = calibration(points())
    assert Calibration.from_json(found.as_json()) == found
    with pytest.raises(KeyError):
        Calibration.from_json(json.dumps({"points": []}))


def test_a_point_of_no_known_kind_is_refused() -> None:
    found = calibration(points())
    with pytest.raises(ValueError, match="'sleep' is an unknown kind of measurement"):
        found.miss(replace(found.points[0], what="sleep"))
