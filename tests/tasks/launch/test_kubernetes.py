"""The Kubernetes manifests: rendered, parsed again, and held against the controllers' own schemas.

Kubeflow's package of API models has TrainJob, TrainingRuntime, JobSet, the Job in it and the pod, generated from their
OpenAPI documents: types, required fields, and no field that the schema does not know. Not checked by it: rules between
fields and patterns (an API server's admission). Nothing was ever applied to a cluster here.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from pydantic import ValidationError

from herd.llama3.train import launch
from herd.llama3.train.job import AttemptResult
from herd.tasks.cluster import Cluster, load_cluster
from herd.tasks.errors import SchedulerRefused
from herd.tasks.launch import base, kubernetes
from herd.tasks.launch.base import orphans, stopped_on_error, wait
from herd.tasks.launch.kubernetes import (
    KubernetesLauncher,
    ended,
    job_name,
    job_set,
    manifests,
    scheduler_faults,
    yaml_of,
)

JOB, LOGS = Path("/herd/work/main-1a2b/job.json"), Path("/herd/runs/tiny-1/logs/main/attempt 2")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"\d+(\.\d+)?([KMGT]i?)?")


KINDS = ["JobSet", "TrainJob"]


def rendered(kind: str, processes: int = 16, logs: Path = LOGS, **settings: Any) -> list[dict[str, Any]]:
    """Return the objects of an attempt as a cluster would read them: through YAML."""
    cluster = Cluster.model_validate({
        "processes": processes, "launcher": "kubernetes", "kubernetes": {"kind": kind, **settings}
    })  # fmt: skip
    text = yaml_of(manifests(cluster, job_name("main-1a2b"), JOB, processes, logs))
    assert "&id" not in text  # references are YAML, but hard to read
    return list(yaml.safe_load_all(text))


def job_set_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the `spec` of the JobSet, which is that of a TrainJob's runtime too."""
    spec: dict[str, Any] = objects[0]["spec"]
    return spec if objects[0]["kind"] == "JobSet" else spec["template"]["spec"]


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the template of the pods."""
    (job,) = job_set_of(objects)["replicatedJobs"]
    pod: dict[str, Any] = job["template"]["spec"]["template"]
    return pod


def agent(pod: dict[str, Any], **variables: str) -> Any:
    """Return what the pod's agent would be told: its own parser reads what a shell makes of the command."""
    (container,) = pod["spec"]["containers"]
    shell, option, line = container["command"]
    variables |= {entry["name"]: entry.get("value", "") for entry in container["env"]}
    message = subprocess.run(
        [shell, option, line.replace("exec ", 'printf "%s\\0" ', 1)], env=variables, capture_output=True, text=True
    ).stdout.split("\0")
    assert message[:3] == ["python", "-m", "herd.llama3.train.launch"]
    with (
        patch.object(launch, "run_attempt", return_value=AttemptResult(status=0)) as run,
        patch.object(launch, "preload"),
    ):
        assert launch.agent(message[3:-1]) == 0
    return run.call_args.args[0]


MODELS = {
    "JobSet": "jobset_v1alpha2_job_set.JobsetV1alpha2JobSet",
    "TrainJob": "trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob",
    "TrainingRuntime": "trainer_v1alpha1_training_runtime.TrainerV1alpha1TrainingRuntime",
}


def validated(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the objects as Kubeflow's models have them: without what these do not know.

    The import takes two CPU seconds of the one worker that needs it.
    """
    names = [MODELS[each["kind"]].split(".") for each in objects]
    models = [getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), name) for module, name in names]
    return [model.from_dict(each).to_dict() for model, each in zip(models, objects, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [1, 16])
@pytest.mark.parametrize("gpus", [True, False])
def test_manifests_are_what_the_schemas_allow(kind: str, processes: int, gpus: bool) -> None:
    """The models drop what they do not know, so what comes back must be what went in."""
    read = rendered(kind, processes, queue="research", topology="rack", gpus=gpus)
    assert validated(read) == read
    read = rendered(kind, processes, gpus=gpus, **FULL)
    assert validated(read) == read


def test_the_schemas_refuse_what_a_cluster_would_refuse() -> None:
    for kind in KINDS:
        read = rendered(kind)
        job_set_of(read)["replicatedJobs"][0]["template"]["spec"]["completions"] = "2"
        with pytest.raises(ValidationError, match="completions"):
            validated(read)
        read = rendered(kind)
        job_set_of(read)["maxRestarts"] = 0  # belongs into failurePolicy
        assert validated(read) != read
    read = rendered("TrainJob")
    read[1]["spec"]["podTemplateOverrides"] = []  # of an earlier version of Trainer
    assert validated(read) != read
    del read[1]["spec"]["runtimeRef"]
    with pytest.raises(ValidationError, match="runtimeRef"):
        validated(read)


def test_job_set() -> None:
    (read,) = rendered("JobSet", queue="research", namespace="team")
    assert (read["apiVersion"], read["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert read["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert read["metadata"]["namespace"] == "team"
    told = agent(pod_of([read]), JOB_COMPLETION_INDEX="1")
    assert (told.node, told.processes, told.per_node, told.ranks) == (1, 16, 8, range(8, 16))
    # <set>-<job>-<number of job>-<number of pod>.<set>, the host names that JobSet documents
    assert told.address == f"{read['metadata']['name']}-node-0-0.{read['metadata']['name']}"
    assert (told.job, told.logs) == (JOB, LOGS)


def test_train_job() -> None:
    """Its controller makes a JobSet of its name from the runtime, and sets the variables of torchrun."""
    runtime, job = rendered("TrainJob", processes=24, queue="research", namespace="team")
    assert (runtime["apiVersion"], runtime["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    name = {"name": runtime["metadata"]["name"], "kind": "TrainingRuntime"}
    assert job["spec"]["runtimeRef"] == {"apiGroup": "trainer.kubeflow.org", **name}
    assert job["spec"]["trainer"] == {"numNodes": 3, "numProcPerNode": 8}
    assert job["metadata"]["name"] == job_name("main-1a2b")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert job["metadata"]["annotations"] == {"herd/logs": str(LOGS)}
    assert job["metadata"]["namespace"] == runtime["metadata"]["namespace"] == "team"
    assert runtime["spec"]["mlPolicy"] == {"torch": {}}, "the policy that sets PET_*"
    (replicated,) = job_set_of([runtime])["replicatedJobs"]
    # by this label and these two names the controller finds what it fills in, and its webhook refuses others
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (replicated["name"], replicated["replicas"]) == ("node", 1)
    assert [container["name"] for container in pod_of([runtime])["spec"]["containers"]] == ["node"]
    address = f"{job['metadata']['name']}-node-0-0.{job['metadata']['name']}"
    told = agent(pod_of([runtime]), PET_NODE_RANK="2", PET_MASTER_ADDR=address, PET_MASTER_PORT="29500")
    assert (told.node, told.ranks, told.address, told.port) == (2, range(16, 24), address, 29500)
    other, _ = rendered("TrainJob", processes=24, logs=LOGS.with_name("attempt 3"))
    assert other["metadata"]["name"] != runtime["metadata"]["name"], "a cache may have the last attempt's"


@pytest.mark.parametrize("kind", KINDS)
def test_the_controllers_restart_nothing(kind: str) -> None:
    spec = job_set_of(rendered(kind))
    (job,) = spec["replicatedJobs"]
    of_job = job["template"]["spec"]
    assert spec["failurePolicy"] == {"maxRestarts": 0}
    assert (of_job["backoffLimit"], of_job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert (of_job["parallelism"], of_job["completions"], of_job["completionMode"]) == (2, 2, "Indexed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus", [True, False])
def test_what_every_pod_needs(kind: str, gpus: bool) -> None:
    read = rendered(kind, gpus=gpus, environment={"NCCL_SOCKET_IFNAME": "eth0"}, grace_s=45)
    assert all(DNS_LABEL.fullmatch(each["metadata"]["name"]) for each in read)
    pod = pod_of(read)
    assert pod["metadata"] == {"labels": {"herd/job": read[-1]["metadata"]["name"]}}
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert spec["terminationGracePeriodSeconds"] == 45
    limits = container["resources"]["limits"]
    assert limits == container["resources"]["requests"]
    assert limits["cpu"] == 64
    assert limits.get("nvidia.com/gpu") == (8 if gpus else None)
    assert QUANTITY.fullmatch(limits["memory"])
    *given, host = container["env"]
    assert host == {"name": "HERD_HOST", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    variables = {entry["name"]: entry.get("value") for entry in given}
    assert variables["NCCL_SOCKET_IFNAME"] == "eth0"
    assert all(isinstance(value, str) for value in variables.values())  # a number is refused by the API
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"root": "/herd", "shm": "/dev/shm"}
    assert {volume["name"] for volume in spec["volumes"]} == set(mounts)


FULL = {
    "shm": "32Gi",
    "rdma": {"rdma/hca_shared_devices_a": 1},
    "node_selector": {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}],
    "image_pull_secrets": ["registry"],
    "secrets": ["herd-s3", "herd-hub"],
}
"""What a pool of GPU nodes needs besides."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_is_where_the_schema_has_it(kind: str) -> None:
    spec = pod_of(rendered(kind, **FULL))["spec"]
    (container,) = spec["containers"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}} in spec["volumes"]
    assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert container["envFrom"] == [{"secretRef": {"name": "herd-s3"}}, {"secretRef": {"name": "herd-hub"}}]
    assert spec["nodeSelector"] == FULL["node_selector"]
    assert spec["tolerations"] == FULL["tolerations"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]


def overlay(**pod: Any) -> dict[str, Any]:
    """Return a patch of the pods."""
    return {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}}


@pytest.mark.parametrize("kind", KINDS)
def test_an_overlay_is_merged_as_kubectl_merges_one(kind: str) -> None:
    trainer = {
        "name": "node",
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "NCCL_ALGO", "value": "Ring"}],
        "volumeMounts": [{"mountPath": "/scratch", "name": "scratch"}, {"mountPath": "/dev/shm", "$patch": "delete"}],
        "resources": {"limits": {"cpu": None, "memory": "1Ti"}},
        "command": ["sh", "-c", "true"],
    }
    patch = overlay(
        containers=[trainer, {"name": "sidecar", "image": "x"}],
        volumes=[{"name": "scratch", "hostPath": {"path": "/nvme"}}, {"name": "shm", "$patch": "delete"}],
        priorityClassName="training",
    )
    patch["metadata"] = {"annotations": {"team": "llm"}}
    before, read = rendered(kind), rendered(kind, overlay=patch)
    assert validated(read) == read
    assert read[-1]["metadata"]["annotations"] == {**before[-1]["metadata"]["annotations"], "team": "llm"}
    was, pod = pod_of(before), pod_of(read)
    container, sidecar = pod["spec"]["containers"]
    known = {entry["name"]: entry.get("value") for entry in was["spec"]["containers"][0]["env"]}
    assert {entry["name"]: entry.get("value") for entry in container["env"]} == {
        **known, "NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"
    }  # fmt: skip
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/herd", "/scratch"]
    limits = was["spec"]["containers"][0]["resources"]["limits"]
    assert container["resources"]["limits"] == {**{k: v for k, v in limits.items() if k != "cpu"}, "memory": "1Ti"}
    assert container["command"] == ["sh", "-c", "true"], "a list without a merge key is replaced"
    assert sidecar == {"name": "sidecar", "image": "x"}
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["root", "scratch"]
    assert pod["spec"]["priorityClassName"] == "training"
    replaced = rendered(kind, overlay={"spec": {"network": {"$patch": "replace", "subdomain": "x"}}})
    assert job_set_of(replaced)["network"] == {"subdomain": "x"}


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"metadata": {"name": "x"}}, r"overlay\n.*metadata\.name is set by herd"),
        ({"kind": "Job"}, r"kind is set by herd"),
        (overlay(containers=[{"name": "node", "env": [{"name": "HF_TOKEN", "value": "x"}]}]),
         r"HF_TOKEN is a secret.*kubernetes\.secrets"),
        (overlay(containers=[{"image": "x"}]), r"overlay\.spec\.replicatedJobs.*has no name, by which"),
        (overlay(containers=[{"name": "trainer", "tty": True}]), r"container trainer has no image; .*or write node"),
        ({"spec": {"$patch": "delete"}}, r"overlay\.spec: \$patch: 'delete' is unknown here"),
    ],
)  # fmt: skip
def test_a_patch_that_would_break_something_is_refused(patch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        rendered("JobSet", overlay=patch)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_are_placed_by_the_topology_of_the_nodes(kind: str) -> None:
    """Kueue's annotation of pods, by which it also numbers them; for a TrainJob it reads the runtime's."""
    assert "annotations" not in pod_of(rendered(kind))["metadata"]
    level = "cloud.provider.com/topology-rack"
    annotations = pod_of(rendered(kind, topology=level))["metadata"]["annotations"]
    assert annotations == {"kueue.x-k8s.io/podset-preferred-topology": level}


def test_names_are_what_kubernetes_allows() -> None:
    for name in ("main-1A2b", "ramp_1", "a" * 90, "long stage/name-"):
        made = job_name(name)
        assert DNS_LABEL.fullmatch(made)
        assert len(f"{made}-node-0-15") <= 63


def test_a_root_that_pods_cannot_see_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(launcher="kubernetes")
    with pytest.raises(ValueError, match=r"cluster\.kubernetes\.mount: .* is not below /herd"):
        job_set(cluster, "herd-main", tmp_path / "job.json", 1, LOGS)


@pytest.mark.parametrize("kind", KINDS)
def test_no_pod_comes_to_an_excluded_node(kind: str) -> None:
    cluster = Cluster.model_validate({"processes": 16, "launcher": "kubernetes", "kubernetes": {"kind": kind}})
    read = manifests(cluster, "herd-main", JOB, 16, LOGS, ["n1", "n2"])
    assert validated(read) == read
    required = pod_of(read)["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]  # terms are alternatives, the fields of one are not
    assert [(field["operator"], field["values"]) for field in term["matchFields"]] == [
        ("NotIn", ["n1"]), ("NotIn", ["n2"])
    ]  # fmt: skip
    assert "affinity" not in pod_of(manifests(cluster, "herd-main", JOB, 16, LOGS))["spec"]


def test_no_kubectl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"cluster\.launcher: kubernetes needs kubectl on the PATH"):
        KubernetesLauncher(Cluster(), "main")


KUBECTL = """\
#!{python}
# Stands for kubectl and a cluster with room for one job: a file per kind. If there is a file `away`, the next call
# fails. A TrainJob is refused once, as by a webhook whose cache lags behind; nothing deletes a runtime with its job.
import json, sys, yaml
from pathlib import Path
here, words = Path(__file__).parent, [word for word in sys.argv[1:] if not word.startswith("--")]
away, seen = here / "away", here / "seen"
if away.exists():
    away.unlink()
    sys.exit("Unable to connect to the server")
if words[0] == "get" and "--request-timeout=30s" not in sys.argv:
    sys.exit("it may hang")
match words:
    case ["auth", "can-i", "create", kind]:
        print("no" if kind.startswith("trainingruntimes.") else "yes")
    case ["get", "pods"]:
        jobs = [kind for kind in ("jobset", "trainjob") if (here / f"{{kind}}.json").exists()]
        print(json.dumps({{"items": [{{"status": {{"phase": "Running"}}}}] * len(jobs)}}))
    case ["get", name]:
        file = here / f"{{name.partition('/')[0]}}.json"
        print(file.read_text() if file.exists() else "", end="")
    case ["create"]:
        read = yaml.safe_load(sys.stdin)
        file = here / f"{{read['kind'].lower()}}.json"
        if file.exists():
            sys.exit("Error from server (AlreadyExists)")
        if read["kind"] == "TrainJob" and not seen.exists():
            seen.touch()
            sys.exit('admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: spec.runtimeRef: '
                     'Invalid value: {{}}: TrainingRuntime.trainer.kubeflow.org "x" not found: specified '
                     'trainingRuntime must be created before the TrainJob is created')
        file.write_text(json.dumps(read))
    case ["delete", "trainingruntime"]:
        (selector,) = [word.removeprefix("--selector=") for word in sys.argv if word.startswith("--selector=")]
        file = here / "trainingruntime.json"
        key, _, value = selector.partition("=")
        if file.exists() and json.loads(file.read_text())["metadata"]["labels"][key] == value:
            file.unlink()
    case ["delete", name]:
        (here / f"{{name.partition('/')[0]}}.json").unlink(missing_ok=True)
"""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> Cluster:
    """A cluster with the kubectl above."""
    (tmp_path / "kubectl").write_text(KUBECTL.format(python=sys.executable))
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = {"kind": kind, "mount": str(tmp_path), "poll_s": 1e-9}
    return Cluster.model_validate({"launcher": "kubernetes", "kubernetes": settings})


@pytest.mark.parametrize("kind", ["JobSet"], indirect=True)
def test_a_job_outlives_an_api_server_that_does_not_answer(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, away = tmp_path / "job", tmp_path / "away"
    job.write_text("{}")
    launcher = KubernetesLauncher(cluster, "main-1a2b")
    launch = launcher.start(job, 1, tmp_path / "attempt-1")
    away.touch()
    assert launch.poll() is None, "one call failed"
    assert not away.exists()
    away.touch()
    assert not launch.waits()
    monkeypatch.setattr(base, "LOST_S", 0.0)
    away.touch()
    remedy = (
        r"(?s)kubectl get .*Unable to connect.*JobSet herd-main-1a2b was not stopped.*the same command .*follows it"
    )
    with pytest.raises(SchedulerRefused, match=remedy):
        wait(launch)
    live = launcher.live(job)
    assert live is not None
    away.touch()
    with pytest.raises(SchedulerRefused, match=r"(?s)kubectl delete .*was not stopped"), stopped_on_error(live):
        raise KeyboardInterrupt
    assert launcher.live(job) is not None
    with pytest.raises(KeyboardInterrupt), stopped_on_error(live):
        raise KeyboardInterrupt
    assert launcher.live(job) is None


def test_a_new_supervisor_finds_the_job(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    job, first, second = (tmp_path / name for name in ("job", "attempt-1", "attempt-2"))
    job.write_text("{}")
    launcher = KubernetesLauncher(cluster, "main-1a2b")
    assert launcher.live(job) is None
    launch = launcher.start(job, 1, first)
    assert launch.poll() is None
    assert not launch.waits()
    with pytest.raises(RuntimeError, match="AlreadyExists"):
        launcher.start(job, 1, second)
    found = KubernetesLauncher(cluster, "main-1a2b").live(job)
    assert found is not None
    assert (found.logs, found.label) == (first, f"{kind} herd-main-1a2b")
    assert [(one.logs, one.label) for one in orphans([first, second])] == [(first, f"{kind} herd-main-1a2b")]
    shown = tmp_path / f"{kind.lower()}.json"
    shown.write_text(json.dumps(json.loads(shown.read_text()) | {"status": {"conditions": [FAILED]}}))
    assert list(orphans([first])) == []
    over = found.poll()
    assert over is not None
    assert (over.status, over.message) == (1, f"{kind} herd-main-1a2b: Failed: FailedJobs a job failed")
    assert launcher.live(job) is None
    again = launcher.start(job, 1, second)  # in place of the one that has ended
    job.write_text("{ }")  # asked for something else since
    assert launcher.live(job) is None
    assert launcher.live(job) is None
    assert not (tmp_path / "trainingruntime.json").exists(), "the runtime goes with its job"
    ended_by_us = again.poll()
    assert ended_by_us is not None
    assert "it was deleted" in ended_by_us.message


@pytest.mark.parametrize("kind", ["TrainJob"], indirect=True)
def test_a_runtime_that_a_webhook_does_not_know_is_waited_for(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "CACHED_S", -1.0)
    (tmp_path / "job").write_text("{}")
    with pytest.raises(SchedulerRefused, match=r"must be created before the TrainJob"):
        KubernetesLauncher(cluster, "main-1a2b").start(tmp_path / "job", 1, tmp_path / "attempt-1")


def test_rights_are_asked_for_each_kind_that_is_created(cluster: Cluster, kind: str) -> None:
    refused = "you may not create trainingruntimes.trainer.kubeflow.org in the namespace default"
    faults = [what for what, _ in scheduler_faults(cluster)]
    assert faults == ([refused] if kind == "TrainJob" else [])


FAILED = {"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "a job failed"}


def test_ends_are_read_from_conditions() -> None:
    def told(*conditions: tuple[str, str]) -> dict[str, Any]:
        return {"status": {"conditions": [{"type": kind, "status": status} for kind, status in conditions]}}

    assert ended({}) is None
    assert ended(told(("Suspended", "True"))) is None, "Kueue holds it back"
    assert ended(told(("Suspended", "False"), ("Complete", "True"))) == (0, "Complete:"), "of a TrainJob"
    assert ended(told(("Completed", "True"))) == (0, "Completed:"), "of a JobSet"
    assert ended(told(("Failed", "False"))) is None
    assert ended({"status": {"conditions": [FAILED]}}) == (1, "Failed: FailedJobs a job failed")


TAINT = {"key": "team", "value": "llm", "effect": "NoSchedule"}


def node(ready: str = "True", gpus: str = "8", labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a node as `kubectl get nodes` lists it."""
    conditions = [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}]
    status = {"conditions": conditions, "allocatable": {"nvidia.com/gpu": gpus}}
    return {"metadata": {"name": "n1", "labels": labels or {}}, "spec": spec, "status": status}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("nodes", "settings", "capacity"),
    [
        ([node(), node(gpus="7"), node(ready="Unknown"), node(unschedulable=True)], {}, 8),
        ([node(), node(gpus="0")], {"gpus": False}, 16),
        ([node()], {"processes_per_node": 4}, 8),
        ([node(labels={"pool": "a"}), node(labels={"pool": "b"}), node()], {"node_selector": {"pool": "a"}}, 8),
        ([node(taints=[TAINT]), node()], {}, 8),
        ([node(taints=[TAINT])], {"tolerations": [{"key": "team", "operator": "Exists"}]}, 8),
        ([node(taints=[TAINT])], {"tolerations": [{"key": "team", "value": "llm", "effect": "NoSchedule"}]}, 8),
        ([node(taints=[TAINT])], {"tolerations": [{"key": "team", "value": "web"}]}, 0),
        ([node(taints=[TAINT])], {"tolerations": [{"operator": "Exists", "effect": "NoExecute"}]}, 0),
        ([node(taints=[{"key": "team", "effect": "PreferNoSchedule"}])], {}, 8),
        ([node(taints=[{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}])], {}, 8),
    ],
)  # fmt: skip
def test_capacity_is_what_the_nodes_can_hold(
    monkeypatch: pytest.MonkeyPatch, kind: str, nodes: list[dict[str, Any]], settings: dict[str, Any], capacity: int
) -> None:
    monkeypatch.setattr(kubernetes, "get", lambda _: json.dumps({"items": nodes}))
    monkeypatch.setattr(shutil, "which", lambda command: f"/usr/bin/{command}")
    cluster = {"processes": 24, "launcher": "kubernetes", "kubernetes": {"kind": kind, **settings}}
    assert KubernetesLauncher(Cluster.model_validate(cluster), "main").capacity() == capacity


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory: lots", r"memory: invalid quantity 'lots'; write it as Kubernetes does: 512Gi"),
        ("memory: 512GB", r"memory: invalid quantity '512GB'"),
        ("memory: 64", r"memory: invalid quantity 64"),
        ("shm: 64GB", r"shm: invalid quantity '64GB'"),
        ("shm: 65Gi", r"shm: 65Gi is more than memory: 64Gi.*raise memory, or lower shm"),
        ("rdma: {x: -1}", r"rdma\.x: -1: input should be greater than or equal to 1"),
        ("mount: herd", r"mount: 'herd' is not an absolute path.*write e\.g\. /herd"),
        ("tolerations: [{kee: gpu}]", r"tolerations\.0: unknown key 'kee'; the keys of a toleration are key, operator"),
        ("tolerations: [{key: gpu, operator: Exits}]", r"tolerations\.0: invalid operator 'Exits'; write Exists or"),
        ("tolerations: [{key: gpu, effect: NoSchedul}]", r"tolerations\.0: invalid effect 'NoSchedul'; write NoSch"),
        ("tolerations: [{key: gpu, value: true}]", r'tolerations\.0: true is not text.*in quotes: "true"'),
        ("tolerations: [{key: gpu, tolerationSeconds: 1m}]", r"tolerations\.0: invalid tolerationSeconds '1m'"),
        ("tolerations: [{key: gpu, effect: NoSchedule, tolerationSeconds: 60}]",
         r"tolerations\.0: tolerationSeconds is only for effect: NoExecute"),
        ("tolerations: [{key: gpu, operator: Exists, value: a}]", r"tolerations\.0: value 'a' is not for operator: Ex"),
        ("tolerations: [{value: a}]", r"tolerations\.0: a toleration without key has operator: Exists; write that"),
        ("node_selector: {gpu: true}", r'node_selector\.gpu: true is not text.*write it in quotes: "true"'),
        ("overlay: {spec: {replicatedJob: []}}", r"overlay: spec\.replicatedJob is not a field of a JobSet.*Jobs"),
        ("overlay: {spec: {replicatedJobs: [{name: nodes}]}}",
         r"overlay: spec\.replicatedJobs: 'nodes' is not in the manifest; write node"),
        ("{kind: TrainJob, overlay: {spec: {trainer: {}}}}", r"overlay: spec\.trainer is not a field of a JobSet, "),
        ("{kind: PyTorchJob, overlay: {spec: {pytorchReplicaSpecs: {}}}}",
         r"kind: PyTorchJob belongs to Kubeflow's training operator v1, .*; write TrainJob, or JobSet$"),
    ],
)  # fmt: skip
def test_what_the_api_server_would_refuse_is_refused_before_any_work(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cluster.yaml").write_text(f"launcher: kubernetes\nkubernetes:\n  {text}\n")
    with pytest.raises(ValueError, match=rf"cluster\.kubernetes\.{message}"):
        load_cluster(tmp_path / "cluster.yaml")


@pytest.mark.parametrize(
    ("given", "gloo"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "eth0"),
        ({"NCCL_SOCKET_IFNAME": "enp1s0f0np0"}, "enp1s0f0np0"),
        ({"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "ens5"}, "ens5"),
        *(({"NCCL_SOCKET_IFNAME": several}, None) for several in ("eth", "^lo", "=eth0", "eth0,eth1")),
        ({}, None),
    ],
)
def test_gloo_uses_the_interface_of_nccl_if_that_is_one(given: dict[str, str], gloo: str | None) -> None:
    (container,) = pod_of(rendered("JobSet", environment=given))["spec"]["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables.get("GLOO_SOCKET_IFNAME") == gloo
