"""The processors beside a GPU, from a folder that looks like /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from herd.llama3.parallel.mesh import numa_cpus

ADDRESS = "0000:dc:00.0"


@pytest.mark.parametrize(
    ("node", "cpus"), [("1\n", {4, 5, 6, 7, 12}), ("-1\n", {0, 1, 2, 3})], ids=["two nodes", "one node"]
)
def test_the_processors_of_the_gpus_node(tmp_path: Path, node: str, cpus: set[int]) -> None:
    device = tmp_path / "bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node)
    for number, text in enumerate(["0-3\n", "4-7,12\n"]):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    assert numa_cpus(ADDRESS, tmp_path) == cpus
    assert numa_cpus("0000:00:00.0", tmp_path) == set()
