from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from herd.llama3.hardware.specs import (
    PRESETS,
    Accelerator,
    load_accelerator,
    load_hall,
    load_server,
    preset_names,
    preset_text,
    validate_description,
)
from herd.llama3.hardware.topology import make_fabric
from herd.llama3.planner.reliability import FailureModel
from herd.llama3.train.device import PEAKS

H100: dict[str, Any] = yaml.safe_load(preset_text("h100"))


def test_presets_have_a_source_for_every_figure_and_the_makers_peak() -> None:
    for name in preset_names("dense_tflops"):
        device = load_accelerator(name)
        assert set(Accelerator.figures()) - {"driver_name"} == set(device.sources)
        assert device.dense_tflops * 1e12 == PEAKS[device.driver_name]["bf16"]


def test_grand_teton_has_the_stated_priors() -> None:
    server = load_server("grand-teton")
    assert server.nic_bytes_per_s == pytest.approx(48.5e9)
    assert (server.gpus, server.link_gb_s, server.link_latency_us) == (8, 360, 3.4)


def test_unknown_hardware_is_not_guessed() -> None:
    with pytest.raises(
        ValueError, match=r"'b300' is unknown hardware, and nothing is guessed .* presets are a100, h100, h200"
    ):
        load_accelerator("b300")
    with pytest.raises(ValueError, match="preset: 'b300' is unknown; there are a100, a100-8, ai-zone"):
        preset_text("b300")


def test_the_sparse_peak_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"1979 is the peak with 2:4 sparsity.*dense is 989.*--sparse"):
        load_accelerator({**H100, "dense_tflops": 1979})
    assert load_accelerator({**H100, "dense_tflops": 1979}, sparse=True).dense_tflops == 1979


def test_a_wrong_figure_is_named() -> None:
    for change, told in [
        ({"dense_tflop": 1}, "cluster.accelerator.dense_tflop: unknown key; did you mean 'dense_tflops'"),
        ({"memory_gb": 0}, "cluster.accelerator.memory_gb: 0: input should be greater than 0"),
        ({"reached_tflops": 990}, "reached_tflops: 990 is above the peak 989"),
        ({"sources": {"speed": "x"}}, "sources: speed name no field"),
    ]:
        with pytest.raises(ValueError, match=told):
            validate_description(Accelerator, {**H100, **change}, "cluster.accelerator")


READERS: dict[str, Callable[[Any], object]] = {
    "causes": FailureModel.load,
    "dense_tflops": load_accelerator,
    "rack_kw": load_hall,
    "tiers": make_fabric,
    "link_gb_s": load_server,
}
"""By a key that only this kind of description has."""


def numbers_in(value: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted path of each number."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers_in(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def set_number(value: Any, path: str, number: float) -> Any:
    """Return `value` with another number at `path`."""
    key, _, rest = path.partition(".")
    changed = deepcopy(value)
    place = int(key) if isinstance(changed, list) else key
    changed[place] = set_number(changed[place], rest, number) if rest else number
    return changed


@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".yaml") for path in PRESETS.iterdir()))
def test_no_figure_of_a_description_may_be_negative(name: str) -> None:
    given = yaml.safe_load(preset_text(name))
    read = next(reader for key, reader in READERS.items() if key in given)
    read(given)
    paths = list(numbers_in(given))
    assert paths
    for path in paths:
        with pytest.raises(ValueError, match=re.escape(path.rpartition(".")[2]) + r".*-1"):
            read(set_number(given, path, -1))


def test_a_copied_preset_is_a_file_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(preset_text("h100").replace("memory_gb: 80", "memory_gb: 96"))
    assert load_accelerator(str(path)).memory_gb == 96
    assert load_accelerator("mine.yaml", near=tmp_path).memory_gb == 96
    with pytest.raises(ValueError, match=r"cluster.accelerator: .*none.yaml: cannot be read"):
        load_accelerator("none.yaml", near=tmp_path)
