"""The library of collectives: what `cluster.backend` allows."""

from __future__ import annotations

import pytest
import torch

from herd.llama3.parallel.layout import Backend
from herd.llama3.parallel.mesh import init_distributed, resolve_backend
from herd.tasks.cluster import Cluster
from tests.dist import run
from tests.llama3.parallel.layout_samples import sockets_of_groups

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_the_device_decides_unless_the_cluster_does() -> None:
    assert [resolve_backend("auto", device) for device in (CPU, GPU)] == ["gloo", "nccl"]
    assert [resolve_backend("gloo", device) for device in (CPU, GPU)] == ["gloo", "gloo"]
    assert resolve_backend("nccl", GPU) == "nccl"


def test_a_library_that_is_not_here_is_named() -> None:
    names: tuple[Backend, ...] = ("nccl", "ncclx")
    for name in names:
        with pytest.raises(ValueError, match=rf"cluster\.backend: {name} needs GPUs.*write gloo or auto"):
            resolve_backend(name, CPU)
        with pytest.raises(ValueError, match=rf"backend: {name} needs GPUs, and device is cpu; write gloo"):
            Cluster.model_validate({"device": "cpu", "backend": name})
    with pytest.raises(ValueError, match=r"ncclx needs torchcomms with NCCLX.*install it beside torch, or write nccl"):
        resolve_backend("ncclx", GPU)  # PyPI's torchcomms for processors has no NCCLX either


def test_one_process_with_a_mesh_takes_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with init_distributed("cpu", 30, meshed=True, backend="gloo"):
        assert torch.distributed.get_backend() == "gloo"
    with pytest.raises(ValueError, match="nccl needs GPUs"), init_distributed("cpu", 30, meshed=True, backend="nccl"):
        pass


def test_a_group_that_is_hardly_used_takes_few_sockets() -> None:
    """At 16K ranks a socket for each other process in each group exceeds the limit of open files."""
    for added, soft, hard in run(5, sockets_of_groups):
        assert max(added) <= 1
        assert soft == hard
