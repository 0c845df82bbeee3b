"""The rows of `herd bench train` and the bounds that they are held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama3.bench.rows import Row, Target

TARGETS: Mapping[str, Target] = {
    "step/d384-fp32": Target(0.97, "x fastest peer"),
    "step/d384-bf16": Target(0.97, "x fastest peer"),
    "step/d512-fp32": Target(0.97, "x fastest peer"),
    "step/d512-bf16": Target(0.97, "x fastest peer"),
    "tuned/naive": Target(2.5, "x naive"),
    "tuned/gemm": Target(40, "% of bf16 GEMM"),
    "loss/memory": Target(5, "x less than plain"),
    "loss/time": Target(1.05, "x plain", "at most"),
    "checkpoint/blocked": Target(15, "% of the save", "at most"),
    "checkpoint/save": Target(80, "% of raw disk"),
    "checkpoint/load": Target(80, "% of raw disk"),
    "restart/agent": Target(10, "s", "at most"),
    "restart/torchrun": Target(None, "s"),
    "loader/wait": Target(1, "% of step time", "at most"),
    "layout/time": Target(5, "CPU s", "at most"),
    "layout/memory": Target(1, "GB", "at most"),
    "gpu/1b-bf16": Target(50, "% MFU"),
    "gpu/1b-fp8": Target(1.25, "x bf16"),
    "gpu/3b-bf16": Target(50, "% MFU"),
    "gpu/3b-fp8": Target(1.25, "x bf16"),
    "gpu/8b-bf16": Target(50, "% MFU"),
    "gpu/8b-fp8": Target(1.25, "x bf16"),
}
"""In the order of the table. A step is as fast as a peer's if it is within the noise of some 3 %."""


def measured(name: str, value: float, note: str = "", **detail: Any) -> Row:
    """Return the row `name` with its value."""
    target = TARGETS[name]
    return Row(name, value, target.unit, str(target), target.met(value), note, detail)


def not_measured(name: str, why: str) -> Row:
    """Return the row `name` without a value."""
    target = TARGETS[name]
    return Row(name, None, target.unit, str(target), None, f"not measured: {why}")


def failed(name: str, why: str) -> Row:
    """Return the row `name` of a measurement that broke down."""
    target = TARGETS[name]
    return Row(name, None, target.unit, str(target), False, f"failed: {why}")
