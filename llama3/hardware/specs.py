"""Accelerators, servers and data halls as data: small YAML files with a source beside each figure.

A preset is meant to be copied and edited: `herd plan presets h100` prints it, and a file's path works in place of a
preset's name. Figures that no maker publishes have the source "assumed"; `herd plan calibrate` measures a machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from herd.llama3.recipe.base import read_plain, read_yaml
from herd.llama3.recipe.load import fault_lines
from herd.llama3.train.device import PEAKS

PRESETS = files("herd.llama3.hardware") / "presets"
SPARSE = 1.5
"""A peak above this multiple of the maker's dense peak is taken for that of 2:4 sparsity, which is twice as large."""
Kind = TypeVar("Kind", bound=BaseModel)


class SourcedFigures(BaseModel):
    """Figures, each with its source."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    sources: dict[str, str] = {}
    """Field -> source of its figure; "assumed" where none is published."""

    @model_validator(mode="after")
    def _sources_of_fields(self) -> SourcedFigures:
        if unknown := sorted(set(self.sources) - set(type(self).model_fields)):
            raise ValueError(f"sources: {', '.join(unknown)} name no field; the fields are {', '.join(self.figures())}")
        return self

    @classmethod
    def figures(cls) -> list[str]:
        """Return the names of the fields that need a source."""
        return [name for name in cls.model_fields if name not in ("name", "sources")]

    def source(self, field: str) -> str:
        """Return the source of a figure."""
        return self.sources.get(field, "yours")


class Accelerator(SourcedFigures):
    """A GPU."""

    driver_name: str = ""
    """Name by the driver: identifies the device in a run, and its peak is checked against the maker's."""
    dense_tflops: float = Field(gt=0)
    """Peak of dense BF16 products, TFLOP/s; the figure for 2:4 sparsity is twice as large."""
    reached_tflops: float = Field(gt=0)
    """Measured rate of a large product, TFLOP/s."""
    memory_gb: float = Field(gt=0)
    """Device memory, 10^9 bytes."""
    memory_tb_s: float = Field(gt=0)
    """Peak of its bandwidth, 10^12 bytes per second."""
    watts: float = Field(gt=0)
    """Thermal design power."""

    @model_validator(mode="after")
    def _within_peak(self) -> Accelerator:
        if self.reached_tflops > self.dense_tflops:
            raise ValueError(f"reached_tflops: {self.reached_tflops:g} is above the peak {self.dense_tflops:g}")
        return self


class Server(SourcedFigures):
    """A machine: GPUs with direct links between them, and their network cards."""

    gpus: int = Field(ge=1)
    """GPUs of a server, one network card each."""
    link_gb_s: float = Field(gt=0)
    """Rate of collectives from a GPU to the others of its server, 10^9 bytes per second."""
    link_latency_us: float = Field(ge=0)
    """Time of one message inside a server."""
    nic_gbit_s: float = Field(gt=0)
    """Line rate of a GPU's network card."""
    nic_usable: float = Field(gt=0, le=1)
    """Rate of payload over the line rate."""
    overhead_watts: float = Field(ge=0)
    """Processors, fans, network cards and power supplies of a server, without its GPUs."""
    frontend_gbit_s: float = Field(default=0.0, ge=0)
    """Line rate of a server's cards for storage and data, on a separate network; 0: both use the GPUs' cards."""
    peak_watts: float = Field(default=0.0, ge=0)
    """Nameplate of a server with its GPUs, for which circuits are built; 0: that of its GPUs and `overhead_watts`."""

    @property
    def nic_bytes_per_s(self) -> float:
        """Payload of one card, bytes per second."""
        return self.nic_gbit_s * self.nic_usable / 8 * 1e9

    @property
    def storage_bytes_per_s(self) -> float:
        """Payload of the cards that reach storage, of a server, bytes per second."""
        return self.frontend_gbit_s * self.nic_usable / 8 * 1e9 or self.gpus * self.nic_bytes_per_s


@cache
def preset_names(field: str) -> tuple[str, ...]:
    """Return the presets that have a field of this name, which identifies what they describe."""
    presets = {path.name.removesuffix(".yaml"): read_plain(path.read_text()) for path in PRESETS.iterdir()}
    return tuple(sorted(name for name, data in presets.items() if field in data))


def preset_text(name: str) -> str:
    """Return the YAML of a preset. Raises ValueError for an unknown name."""
    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        known = sorted(preset.name.removesuffix(".yaml") for preset in PRESETS.iterdir())
        raise ValueError(f"preset: {name!r} is unknown; there are {', '.join(known)}")
    return path.read_text()


def read_description(named: str | dict[str, Any], field: str, mark: str, near: Path | None = None) -> dict[str, Any]:
    """Return `named` if it is a mapping, else the mapping in the preset or YAML file of this name.

    `field` is for the error, `mark` is a field that such a description has, and relative paths start from the folder
    `near`. Raises ValueError if there is none.
    """
    if isinstance(named, dict):
        return named
    path = (near or Path()) / named
    if not named.endswith((".yaml", ".yml")) and not path.is_file():
        if named not in (known := preset_names(mark)):
            raise ValueError(
                f"{field}: {named!r} is unknown hardware, and nothing is guessed for it; presets are "
                f"{', '.join(known)}; or copy one (herd plan presets NAME > FILE.yaml), put your figures in, and give "
                "the file"
            )
        preset: dict[str, Any] = read_plain(preset_text(named))
        return preset
    data = read_yaml(path, f"{field}: {path}", "name a YAML file or a preset")
    if not isinstance(data, dict):
        raise ValueError(f"{field}: {path} is not a mapping; see herd plan presets h100 for an example")
    return data


def validate_description(kind: type[Kind], data: dict[str, Any], field: str) -> Kind:
    """Return `data` as a `kind`. Raises ValueError with a line per fault."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ValueError(fault_lines(error, kind, section=field)) from None


def load_accelerator(named: str | dict[str, Any], near: Path | None = None, sparse: bool = False) -> Accelerator:
    """Return a preset, a file or a mapping as an accelerator; `sparse` allows a peak with 2:4 sparsity.

    Raises ValueError.
    """
    field = "cluster.accelerator"
    accelerator = validate_description(Accelerator, read_description(named, field, "dense_tflops", near), field)
    known = PEAKS.get(accelerator.driver_name, {}).get("bf16")
    if known is not None and not sparse and accelerator.dense_tflops * 1e12 > SPARSE * known:
        raise ValueError(
            f"{field}.dense_tflops: {accelerator.dense_tflops:g} is the peak with 2:4 sparsity, which no training "
            f"reaches; dense is {known / 1e12:g} for {accelerator.driver_name}; write that, or give --sparse to use "
            "it anyway"
        )
    return accelerator


def load_server(named: str | dict[str, Any], near: Path | None = None) -> Server:
    """Return a preset, a file or a mapping as a server. Raises ValueError."""
    return validate_description(Server, read_description(named, "cluster.server", "link_gb_s", near), "cluster.server")


# A data hall: how many GPUs a number of megawatts feeds


class Hall(SourcedFigures):
    """Racks, power and reader hosts of a cluster's site.

    Site = racks x servers x nameplate x (1 + others) x PUE. Circuits are built for nameplates, so this is more than the
    energy that `budget` counts. Data that are prepared while a model trains come from a separate tier of reader hosts
    (Zhao et al., ISCA 2022, arXiv 2108.09373); ready tokens need almost none.
    """

    rack_gpus: int = Field(ge=1)
    """GPUs of a rack, if `rack_kw` allows them."""
    rack_kw: float = Field(gt=0)
    """Power that a rack may draw and its cooling removes."""
    other_share: float = Field(ge=0)
    """Power of switches, optics, storage and management over that of the GPU servers."""
    pue: float = Field(ge=1)
    """Power of the site over that of its equipment."""
    racks: int = Field(default=0, ge=0)
    """Racks that have a place; 0: power is the only limit."""
    reader_mb_s: float = Field(gt=0)
    """Data that a reader host hands to trainers, 10^6 bytes per second."""
    reader_watts: float = Field(ge=0)
    """Nameplate of a reader host."""
    readers_inside: bool = True
    """Whether reader hosts take their power from this site."""

    def servers_per_rack(self, server: Server) -> int:
        """Return the servers of a rack. Raises ValueError if not even one may be in it."""
        count = min(self.rack_gpus // server.gpus, int(self.rack_kw * 1e3 // server.peak_watts))
        if count < 1:
            raise ValueError(
                f"cluster.hall.rack_kw: {self.rack_kw:g} kW and {self.rack_gpus} GPUs hold no {server.name}, which has "
                f"{server.gpus} GPUs and draws up to {server.peak_watts / 1e3:g} kW; write more"
            )
        return count


@dataclass(frozen=True)
class HallUse:
    """What a number of GPUs takes in a hall."""

    gpus: int
    racks: int
    rack_kw: float
    """Nameplate of a full rack's servers."""
    readers: int
    """Reader hosts, inside or elsewhere."""
    readers_inside: bool
    megawatts: float
    """Of the site, with cooling, and with the readers that are inside."""

    def as_dict(self) -> dict[str, Any]:
        """Return every field."""
        return asdict(self)


def readers_per_trainer(trainer_mb_s: float, reader_mb_s: float) -> float:
    """Return the reader hosts that feed a trainer which takes `trainer_mb_s`, 10^6 bytes per second."""
    return trainer_mb_s / reader_mb_s


def hall_use(hall: Hall, server: Server, gpus: int, gpu_mb_s: float = 0.0) -> HallUse:
    """Return racks and power of `gpus`, each of which takes `gpu_mb_s` of data. Raises ValueError as `Hall` does."""
    per_rack, servers = hall.servers_per_rack(server), -(-gpus // server.gpus)
    readers = -int(-readers_per_trainer(gpus * gpu_mb_s, hall.reader_mb_s) // 1)
    watts = servers * server.peak_watts * (1 + hall.other_share)
    watts += readers * hall.reader_watts if hall.readers_inside else 0.0
    rack_kw = per_rack * server.peak_watts / 1e3
    return HallUse(gpus, -(-servers // per_rack), rack_kw, readers, hall.readers_inside, watts * hall.pue / 1e6)


def gpus_within(hall: Hall, server: Server, megawatts: float, gpu_mb_s: float = 0.0) -> int:
    """Return the GPUs, in whole racks, that a site of `megawatts` feeds and has places for.

    Raises ValueError if that is not even one rack.
    """
    per_rack = hall.servers_per_rack(server)
    watts = per_rack * server.peak_watts * (1 + hall.other_share)
    if hall.readers_inside:
        watts += readers_per_trainer(per_rack * server.gpus * gpu_mb_s, hall.reader_mb_s) * hall.reader_watts
    count = int(megawatts * 1e6 / (watts * hall.pue))
    if count < 1:
        raise ValueError(
            f"megawatts: {megawatts:g} do not feed one rack of {per_rack} {server.name}, which takes "
            f"{watts * hall.pue / 1e6:.3g} with its share of switches and cooling; write more"
        )
    return min(count, hall.racks or count) * per_rack * server.gpus


def load_hall(named: str | dict[str, Any], near: Path | None = None) -> Hall:
    """Return a preset, a file or a mapping as a hall. Raises ValueError."""
    return validate_description(Hall, read_description(named, "cluster.hall", "rack_kw", near), "cluster.hall")
