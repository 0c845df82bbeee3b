"""Accelerators and servers as data: small YAML files with a source beside each figure.

A preset is meant to be copied and edited: `herd plan show h100` prints it, and a file's path does where a preset's name
does. Figures that no maker publishes stand there as parameters whose source says "assumed". Given up: what a device
does at other clock rates or temperatures; `herd plan calibrate` measures the machine at hand instead.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llama3.recipe.base import read_plain
from llama3.train.peak_flops import PEAKS

PRESETS = files("llama3.planner") / "presets"


class Described(BaseModel):
    """Figures, each with where it comes from."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    sources: dict[str, str] = {}
    """Field -> where its figure comes from; "assumed" where nobody published it."""

    @model_validator(mode="after")
    def _sources_of_fields(self) -> Described:
        if odd := sorted(set(self.sources) - set(type(self).model_fields)):
            raise ValueError(f"sources: {', '.join(odd)} name no field; the fields are {', '.join(self.figures())}")
        return self

    @classmethod
    def figures(cls) -> list[str]:
        """Return the names of the fields that need a source."""
        return [name for name in cls.model_fields if name not in ("name", "sources")]

    def source(self, field: str) -> str:
        """Return where a figure comes from."""
        return self.sources.get(field, "yours")


class Accelerator(Described):
    """One device that computes."""

    driver_name: str = ""
    """As the driver calls it; lets a run recognise it, and the peak be compared with the maker's."""
    dense_tflops: float = Field(gt=0)
    """Peak of dense BF16 products, TFLOP/s: not the figure for 2:4 sparsity, which is twice as large."""
    reached_tflops: float = Field(gt=0)
    """What a large product was measured to reach."""
    memory_gb: float = Field(gt=0)
    """Device memory, 10^9 bytes."""
    memory_tb_s: float = Field(gt=0)
    """Peak of its bandwidth, 10^12 bytes a second."""
    watts: float = Field(gt=0)
    """Thermal design power."""

    @model_validator(mode="after")
    def _within_peak(self) -> Accelerator:
        if self.reached_tflops > self.dense_tflops:
            raise ValueError(f"reached_tflops: {self.reached_tflops:g} is above the peak {self.dense_tflops:g}")
        return self


class Server(Described):
    """A machine: GPUs that reach each other directly, and their network cards."""

    gpus: int = Field(ge=1)
    """GPUs of a server, one network card each."""
    link_gb_s: float = Field(gt=0)
    """What a GPU can send to the others of its server, 10^9 bytes a second, as collectives reach it."""
    link_latency_us: float = Field(ge=0)
    """Time of one message inside a server."""
    nic_gbit_s: float = Field(gt=0)
    """Line rate of a GPU's network card."""
    nic_usable: float = Field(gt=0, le=1)
    """Share of the line rate that payload reaches."""
    overhead_watts: float = Field(ge=0)
    """Processors, fans, network cards and power supplies of a server, without its GPUs."""

    @property
    def nic_bytes_per_s(self) -> float:
        """Payload of one card."""
        return self.nic_gbit_s * self.nic_usable / 8 * 1e9


Kind = TypeVar("Kind", bound=BaseModel)
SPARSE = 1.5
"""How far above the maker's dense peak one is taken for the peak with 2:4 sparsity, which is twice as large."""


def preset_names(field: str) -> list[str]:
    """Return the presets that have a field of this name, which tells what they describe."""
    found = {path.name.removesuffix(".yaml"): yaml.safe_load(path.read_text()) for path in PRESETS.iterdir()}
    return sorted(name for name, data in found.items() if field in data)


def preset_text(name: str) -> str:
    """Return the YAML of a preset, to be copied. Raises ValueError if there is none of this name."""
    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        known = sorted(each.name.removesuffix(".yaml") for each in PRESETS.iterdir())
        raise ValueError(f"preset: {name!r} is unknown; there are {', '.join(known)}")
    return path.read_text()


def read_description(named: str | dict[str, Any], field: str, mark: str, near: Path | None = None) -> dict[str, Any]:
    """Return the mapping that `named` is, or that the preset or YAML file of this name holds.

    `field` is for the error and `mark` a field that such a description has; `near` is the folder that relative paths
    start from. Raises ValueError if there is none.
    """
    if isinstance(named, dict):
        return named
    path = (near or Path()) / named
    if named.endswith((".yaml", ".yml")) or path.is_file():
        return _mapping(path, field)
    if named not in (known := preset_names(mark)):
        raise ValueError(
            f"{field}: {named!r} is unknown hardware, and nothing is guessed for it; presets are {', '.join(known)}; "
            "or copy one (herd plan show NAME > FILE.yaml), put your figures in, and give the file"
        )
    data: dict[str, Any] = yaml.safe_load(preset_text(named))
    return data


def _mapping(path: Path, field: str) -> dict[str, Any]:
    try:
        data = read_plain(path.read_text())
    except OSError as error:
        raise ValueError(f"{field}: {path} cannot be read ({error.strerror}); name a YAML file or a preset") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{field}: {path} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{field}: {path} holds no mapping; copy a preset to see one")
    return data


def validated(kind: type[Kind], data: dict[str, Any], field: str) -> Kind:
    """Return `data` as a `kind`. Raises ValueError with a line per fault."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            place = ".".join([field, *(str(part) for part in fault["loc"])])
            given = f" (it is {fault['input']!r})" if isinstance(fault["input"], int | float | str) else ""
            lines.append(f"{place}: {fault['msg'].removeprefix('Value error, ')}{given}")
        raise ValueError("\n".join(lines)) from None


def load_accelerator(named: str | dict[str, Any], near: Path | None = None, sparse: bool = False) -> Accelerator:
    """Return a preset, a file or a mapping as an accelerator; `sparse` lets its peak be the one with 2:4 sparsity.

    Raises ValueError.
    """
    field = "cluster.accelerator"
    found = validated(Accelerator, read_description(named, field, "dense_tflops", near), field)
    known = PEAKS.get(found.driver_name, {}).get("bf16")
    if known is not None and not sparse and found.dense_tflops * 1e12 > SPARSE * known:
        raise ValueError(
            f"{field}.dense_tflops: {found.dense_tflops:g} is the peak with 2:4 sparsity, which no training reaches; "
            f"dense is {known / 1e12:g} for {found.driver_name}; write that, or give --sparse to see what it would say"
        )
    return found


def load_server(named: str | dict[str, Any], near: Path | None = None) -> Server:
    """Return a preset, a file or a mapping as a server. Raises ValueError."""
    return validated(Server, read_description(named, "cluster.server", "link_gb_s", near), "cluster.server")
