from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from herd.llama3.hardware.specs import preset_text
from herd.llama3.hardware.topology import Fabric, fabric_names, is_fabric_name, load_fabric, make_fabric

ROCE: dict[str, Any] = yaml.safe_load(preset_text("roce-24k"))


def changed(**changes: Any) -> Fabric:
    return make_fabric({**ROCE, **changes})


def test_the_roce_cluster_is_the_published_one() -> None:
    fabric = load_fabric("roce-24k")
    assert (fabric.gpus, fabric.servers) == (24_576, 3_072)
    rates = {layer.name: layer.bytes_per_s for layer in fabric.layers()}
    assert rates == pytest.approx({"server": 360e9, "rack": 48.5e9, "pod": 48.5e9, "cluster": 48.5e9 / 7})


def test_every_preset_names_its_sources() -> None:
    for name in fabric_names():
        fabric = load_fabric(name)
        assert set(fabric.sources) >= {"tiers", "routing", "queue_pairs", "uplinks", "storage_gb_s"}


def test_infiniband_has_full_bisection() -> None:
    assert {layer.bytes_per_s for layer in load_fabric("ib-24k").layers()[1:]} == {48.5e9}


def test_an_inconsistent_cluster_is_refused() -> None:
    for changes, told in [
        ({"tiers": [{"name": "rack", "gpus": 12}]}, r"rack joins 12 GPUs, not a multiple of the 8.*; write 16"),
        ({"tiers": [{"name": "rack", "gpus": 16}, {"name": "pod", "gpus": 8}]}, "pod joins 8 GPUs.*write 16"),
        ({"tiers": [{"name": "rack", "gpus": 16}, {"name": "rack", "gpus": 32}]}, "two have the same name"),
        ({"tiers": [{"name": "rack", "gpus": 16, "oversubscription": 0.5}]}, "oversubscription.*greater than or equal"),
        ({"routing": "ecmp"}, "queue_pairs: 16 take one path under ecmp"),
        ({"accelerator": "mi300x"}, "cluster.accelerator: 'mi300x' is unknown hardware"),
        ({"network": "ethernet"}, "cluster.network"),
    ]:
        with pytest.raises(ValueError, match=told):
            changed(**changes)


def test_a_description_without_devices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cluster.server: is missing; write a preset such as grand-teton"):
        make_fabric({key: value for key, value in ROCE.items() if key != "server"})


def test_a_users_file_may_name_presets_and_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "gpu.yaml").write_text(preset_text("h100").replace("name: h100", "name: mine"))
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump({**ROCE, "name": "ours", "accelerator": "gpu.yaml"}))
    fabric = load_fabric(str(tmp_path / "ours.yaml"))
    assert (fabric.name, fabric.accelerator.name) == ("ours", "mine")


def test_a_small_cluster_needs_no_file() -> None:
    eight, one, many = (load_fabric(name) for name in ("h100x8", "h200x1", "a100x64"))
    assert (eight.gpus, eight.servers, eight.accelerator.name, eight.server.frontend_gbit_s) == (8, 1, "h100", 400)
    assert (one.gpus, one.server.gpus, one.accelerator.memory_gb) == (1, 1, 141)
    assert (many.servers, many.accelerator.dense_tflops, many.server.nic_gbit_s) == (8, 312, 200)
    assert is_fabric_name("h100x8")
    assert not is_fabric_name("b300x8")
    for name, told in (("h100x12", "12 GPUs are no whole servers of 8; write h100x16"), ("h100x0", "write h100x8")):
        with pytest.raises(ValueError, match=told):
            load_fabric(name)


def test_a_part_of_a_server_draws_its_part() -> None:
    """A GPU-hour takes the same energy on h100x1, h100x64 and one GPU of a DGX."""
    one, many = load_fabric("h100x1").server, load_fabric("h100x64").server
    assert (one.overhead_watts, one.peak_watts) == (many.overhead_watts / 8, many.peak_watts / 8) == (300, 1275)


def test_storage_is_as_fast_as_the_file_system_and_the_cards_allow() -> None:
    fabric = load_fabric("roce-24k")
    assert fabric.storage_bytes_per_s(8) == pytest.approx(200 / 8 * 0.97 * 1e9)
    assert fabric.storage_bytes_per_s(16) == 2 * fabric.storage_bytes_per_s(8)
    assert fabric.storage_bytes_per_s(16_384) == 2e12
    shared = fabric.model_copy(update={"server": fabric.server.model_copy(update={"frontend_gbit_s": 0})})
    assert shared.storage_bytes_per_s(8) == 8 * fabric.server.nic_bytes_per_s
