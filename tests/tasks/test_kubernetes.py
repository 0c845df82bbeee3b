"""The Kubernetes manifests: rendered, parsed again, and held against what the two controllers require.

No cluster and no schema of these kinds comes in a package, so the checks are ours, and nothing was ever applied here.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama3.train.launch import _parsed
from tasks.cluster import Cluster
from tasks.kubernetes import KubernetesLauncher, ended, job_name, manifest, manifest_text, ready_nodes

JOB, LOGS = Path("/herd/work/main-1a2b/job.json"), Path("/herd/runs/tiny-1/logs/main/attempt 2")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"\d+(\.\d+)?([KMGT]i?)?")


def rendered(kind: str, processes: int = 16, **settings: Any) -> dict[str, Any]:
    """Return the manifest as a cluster would read it: through YAML."""
    cluster = Cluster.model_validate({
        "processes": processes, "launcher": "kubernetes", "kubernetes": {"kind": kind, **settings}
    })  # fmt: skip
    text = manifest_text(cluster, job_name("main-1a2b"), JOB, processes, LOGS)
    assert "&id" not in text  # references are YAML, but hard to read
    read: dict[str, Any] = yaml.safe_load(text)
    return read


def pods(read: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return (how many, pod template) of a manifest."""
    if read["kind"] == "JobSet":
        return [(job["replicas"] * job["template"]["spec"]["completions"], job["template"]["spec"]["template"])
                for job in read["spec"]["replicatedJobs"]]  # fmt: skip
    return [(part["replicas"], part["template"]) for part in read["spec"]["pytorchReplicaSpecs"].values()]


def agent(pod: dict[str, Any], **variables: str) -> Any:
    """Return what the pod's agent would be told: its own parser reads what a shell makes of the command."""
    (container,) = pod["spec"]["containers"]
    shell, option, line = container["command"]
    variables |= {entry["name"]: entry["value"] for entry in container["env"]}
    words = subprocess.run(
        [shell, option, line.replace("exec ", 'printf "%s\\0" ', 1)], env=variables, capture_output=True, text=True
    ).stdout.split("\0")
    assert words[:3] == ["python", "-m", "llama3.train.launch"]
    return _parsed(words[3:-1])


def test_job_set() -> None:
    read = rendered("JobSet", queue="research", namespace="team")
    assert (read["apiVersion"], read["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert read["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert read["metadata"]["namespace"] == "team"
    assert read["spec"]["failurePolicy"] == {"maxRestarts": 0}
    (job,) = read["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"], spec["backoffLimit"]) == (
        2, 2, "Indexed", 0
    )  # fmt: skip
    told = agent(spec["template"], JOB_COMPLETION_INDEX="1")
    assert (told.node, told.processes, told.per_node, told.ranks) == (1, 16, 8, range(8, 16))
    # <set>-<job>-<number of job>-<number of pod>.<set>, the host names that JobSet documents
    assert told.address == f"{read['metadata']['name']}-{job['name']}-0-0.{read['metadata']['name']}"
    assert (told.job, told.logs) == (JOB, LOGS)


def test_pytorch_job() -> None:
    read = rendered("PyTorchJob", processes=24)
    assert (read["apiVersion"], read["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert read["spec"]["runPolicy"] == {"backoffLimit": 0, "cleanPodPolicy": "All"}
    parts = read["spec"]["pytorchReplicaSpecs"]
    assert {name: part["replicas"] for name, part in parts.items()} == {"Master": 1, "Worker": 2}
    for part in parts.values():
        assert part["restartPolicy"] == "Never"
        assert "restartPolicy" not in part["template"]["spec"]
        (container,) = part["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["ports"][0]["name"] == "pytorchjob-port"
    told = agent(parts["Worker"]["template"], RANK="2", MASTER_ADDR="main-master-0", MASTER_PORT="29500")
    assert (told.node, told.ranks, told.address, told.port) == (2, range(16, 24), "main-master-0", 29500)
    alone = rendered("PyTorchJob", processes=8)
    assert list(alone["spec"]["pytorchReplicaSpecs"]) == ["Master"]  # no workers, rather than none of them


@pytest.mark.parametrize("kind", ["JobSet", "PyTorchJob"])
@pytest.mark.parametrize("gpus", [True, False])
def test_what_every_pod_needs(kind: str, gpus: bool) -> None:
    read = rendered(kind, gpus=gpus, environment={"NCCL_SOCKET_IFNAME": "eth0"}, grace_s=45)
    assert DNS_LABEL.fullmatch(read["metadata"]["name"])
    assert sum(count for count, _ in pods(read)) == 2
    for _, pod in pods(read):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["terminationGracePeriodSeconds"] == 45
        limits = container["resources"]["limits"]
        assert limits == container["resources"]["requests"]
        assert limits["cpu"] == 64
        assert limits.get("nvidia.com/gpu") == (8 if gpus else None)
        assert QUANTITY.fullmatch(limits["memory"])
        variables = {entry["name"]: entry["value"] for entry in container["env"]}
        assert variables["NCCL_SOCKET_IFNAME"] == "eth0"
        assert all(isinstance(value, str) for value in variables.values())  # a number is refused by the API
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"root": "/herd", "shm": "/dev/shm"}
        assert {volume["name"] for volume in spec["volumes"]} == set(mounts)


def test_names_are_what_kubernetes_allows() -> None:
    for name in ("main-1A2b", "ramp_1", "a" * 90, "long stage/name-"):
        made = job_name(name)
        assert DNS_LABEL.fullmatch(made)
        assert len(f"{made}-node-0-15") <= 63


def test_a_root_that_pods_cannot_see_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(launcher="kubernetes")
    with pytest.raises(ValueError, match=r"cluster\.kubernetes\.mount: .* is not below /herd"):
        manifest(cluster, "herd-main", tmp_path / "job.json", 1, LOGS)


def test_no_kubectl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"cluster\.launcher: kubernetes needs kubectl on the PATH"):
        KubernetesLauncher(Cluster(), "main")


def test_ends_are_read_from_conditions() -> None:
    def told(*conditions: tuple[str, str]) -> dict[str, Any]:
        return {"status": {"conditions": [{"type": kind, "status": status} for kind, status in conditions]}}

    assert ended({}) is None
    assert ended(told(("Created", "True"), ("Running", "True"))) is None
    assert ended(told(("Running", "False"), ("Succeeded", "True"))) == (0, "Succeeded:")
    assert ended(told(("Completed", "True"))) == (0, "Completed:")
    assert ended(told(("Failed", "False"))) is None
    failed = {"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "a job failed"}
    assert ended({"status": {"conditions": [failed]}}) == (1, "Failed: FailedJobs a job failed")


def test_capacity_counts_nodes_that_are_ready_and_open() -> None:
    def node(ready: str, gpus: str, **spec: Any) -> dict[str, Any]:
        conditions = [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}]
        return {"spec": spec, "status": {"conditions": conditions, "allocatable": {"nvidia.com/gpu": gpus}}}

    listed = {"items": [
        node("True", "8"), node("True", "7"), node("Unknown", "8"), node("True", "8", unschedulable=True)
    ]}  # fmt: skip
    assert ready_nodes(listed, "nvidia.com/gpu", 8) == 1
    assert ready_nodes(listed, "", 8) == 2
