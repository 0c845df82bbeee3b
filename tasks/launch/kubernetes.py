"""Start the trainer on Kubernetes: a JobSet or PyTorchJob per attempt, one pod and one agent per node.

The supervisor restarts, not the controller: only it knows whether an attempt made progress and how many nodes are left.
So both kinds fail at the first failed pod. The manifest stays beside the logs. Pods see the root through a shared
volume.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from llama3.train.job import AttemptResult, first_failure, outcomes_in
from storage.filesystem import write_atomic
from tasks.cluster import Cluster
from tasks.launch.base import agent_command, agent_variables, keep_job, same_job, trainer_environment

API = {"JobSet": "jobset.x-k8s.io/v1alpha2", "PyTorchJob": "kubeflow.org/v1"}
ENDED = {"Completed": 0, "Succeeded": 0, "Failed": 1}
"""Types of condition that end a JobSet or a PyTorchJob, and the status they mean."""
PORT = 29500
STARTED = ("Running",)
NO_OUTCOME = -signal.SIGKILL
LONGEST_NAME = 36
"""Pods add their own endings, and a host name ends at 63 characters."""
Manifest = dict[str, Any]


class KubernetesLauncher:
    """Applies manifests with kubectl, in whatever cluster its context names."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        """Jobs are called `herd-<name>`. Raises ValueError if there is no kubectl on the PATH."""
        if not shutil.which("kubectl"):
            raise ValueError("cluster.launcher: kubernetes needs kubectl on the PATH; install it, or write local")
        self.cluster, self.name = cluster, job_name(name)

    def capacity(self) -> int:
        """Return how many processes the nodes that are ready could run, whoever uses them now."""
        settings = self.cluster.kubernetes
        listed = json.loads(kubectl("get", "nodes", "--output=json"))
        nodes = ready_nodes(listed, settings.gpu if settings.gpus else "", settings.processes_per_node)
        return min(nodes * settings.processes_per_node, self.cluster.processes)

    def live(self, job: Path) -> KubernetesLaunch | None:
        """Return the job of this name that has not ended, whoever created it, or None."""
        launch = KubernetesLaunch(self.cluster, self.name)
        found = launch.seen()
        if found is None or ended(found) is not None:
            return None
        launch.at(Path(found["metadata"]["annotations"]["herd/logs"]), found)
        if not same_job(launch, job):
            launch.delete()
            return None
        return launch

    def start(self, job: Path, processes: int, logs: Path) -> KubernetesLaunch:
        """Create the job of an attempt, in place of one that has ended. Raises RuntimeError with kubectl's words."""
        logs.mkdir(parents=True, exist_ok=True)
        text = manifest_text(self.cluster, self.name, job, processes, logs)
        keep_job(job, logs)
        write_atomic(logs / "job.yaml", text)
        launch = KubernetesLaunch(self.cluster, self.name)
        found = launch.seen()
        if found is not None and ended(found) is not None:
            launch.delete()
        try:
            kubectl("create", f"--namespace={self.cluster.kubernetes.namespace}", "--filename=-", given=text)
        except Exception:  # such as: one of this name is there, which is not ours to delete
            raise
        except BaseException:
            launch.delete()  # stopped while it was created
            raise
        return launch.at(logs, None)


class KubernetesLaunch:
    """One applied job."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.settings, self.name = cluster.kubernetes, name
        self.label = f"{self.settings.kind} {name}"
        self.logs, self.asked = Path(), float("-inf")
        self.object: Manifest | None = None
        self.place = [f"--namespace={self.settings.namespace}", f"{self.settings.kind.lower()}/{name}"]

    def at(self, logs: Path, found: Manifest | None) -> KubernetesLaunch:
        """Return this launch, with its logs in `logs`."""
        self.logs, self.object = logs, found
        return self

    def seen(self) -> Manifest | None:
        """Return the job as the cluster knows it, or None if it does not."""
        text = kubectl("get", *self.place, "--ignore-not-found", "--output=json")
        return json.loads(text) if text else None

    def poll(self) -> AttemptResult | None:
        """Return how the job ended, or None while it waits or runs; asks the cluster every `poll_s`."""
        if time.monotonic() - self.asked >= self.settings.poll_s:
            self.object, self.asked = self.seen(), time.monotonic()
            if self.object is None:
                return self._outcome(NO_OUTCOME, "it was deleted")
        found = ended(self.object) if self.object else None
        return None if found is None else self._outcome(*found)

    def waits(self) -> bool:
        """Return whether not every pod runs."""
        selector = f"--selector=herd/job={self.name}"
        listed = json.loads(kubectl("get", "pods", self.place[0], selector, "--output=json"))["items"]
        return not listed or any(pod["status"]["phase"] not in STARTED for pod in listed)

    def used_s(self) -> None:
        """Its processes are on other machines."""

    def stop(self) -> None:
        """Delete the job: its pods get SIGTERM, save and leave within the grace."""
        self.delete()

    def delete(self) -> None:
        """Return when the job and its pods are gone."""
        kubectl("delete", *self.place, "--ignore-not-found", "--cascade=foreground", "--wait=true")

    def _outcome(self, status: int, words: str) -> AttemptResult:
        said = outcomes_in(self.logs)
        told = first_failure(said) if status and said else None
        if told is not None and told.status:
            return told
        return AttemptResult(status=status, words=f"{self.settings.kind} {self.name}: {words}")


def manifest_text(cluster: Cluster, name: str, job: Path, processes: int, logs: Path) -> str:
    """Return the manifest of one attempt as YAML. Raises ValueError as `manifest` does."""
    made = json.dumps(manifest(cluster, name, job, processes, logs))
    return yaml.safe_dump(json.loads(made), sort_keys=False)  # parts used twice would else become YAML references


def manifest(cluster: Cluster, name: str, job: Path, processes: int, logs: Path) -> Manifest:
    """Return the Kubernetes object of one attempt. Raises ValueError if its files are not on the shared volume."""
    settings = cluster.kubernetes
    for path in (job, logs):
        if not path.is_relative_to(settings.mount):
            raise ValueError(
                f"cluster.kubernetes.mount: {path} is not below {settings.mount}, so pods cannot see it; put the root "
                "on the volume, or correct mount"
            )
    nodes, per_node = settings.nodes(processes), min(settings.processes_per_node, processes)
    labels = {"herd/job": name, **({"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue else {})}
    metadata = {
        "name": name,
        "namespace": settings.namespace,
        "labels": labels,
        "annotations": {"herd/logs": str(logs)},
    }
    agent, files = agent_command(processes, per_node), agent_variables(settings.python or "python", job, logs)
    if settings.kind == "JobSet":
        # JobSet names a pod <set>-<job>-<number of job>-<number of pod> and gives it a host name in the set's domain
        agent += f' --node "$JOB_COMPLETION_INDEX" --address {name}-node-0-0.{name} --port {PORT}'
        spec = _job_set(nodes, _pod(cluster, name, per_node, agent, files))
    else:
        # the operator's RANK and MASTER_ADDR count pods; the agent gives every rank its own
        agent += ' --node "$RANK" --address "$MASTER_ADDR" --port "$MASTER_PORT"'
        spec = _pytorch_job(nodes, _pod(cluster, name, per_node, agent, files))
    return {"apiVersion": API[settings.kind], "kind": settings.kind, "metadata": metadata, "spec": spec}


def _job_set(nodes: int, pod: Manifest) -> Manifest:
    job = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": pod,
    }
    return {
        "failurePolicy": {"maxRestarts": 0},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
    }


def _pytorch_job(nodes: int, pod: Manifest) -> Manifest:
    pod["spec"]["containers"][0]["name"] = "pytorch"  # the operator finds its container by this name
    pod["spec"]["containers"][0]["ports"] = [{"name": "pytorchjob-port", "containerPort": PORT, "protocol": "TCP"}]
    pod["spec"].pop("restartPolicy")
    replicas = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": pod}}
    if nodes > 1:
        replicas["Worker"] = {"replicas": nodes - 1, "restartPolicy": "Never", "template": pod}
    return {"runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "All"}, "pytorchReplicaSpecs": replicas}


def _pod(cluster: Cluster, name: str, per_node: int, agent: str, files: dict[str, str]) -> Manifest:
    settings = cluster.kubernetes
    variables = {**trainer_environment(settings.cpus_per_process), **settings.environment, **files}
    wanted: dict[str, str | int] = {"cpu": settings.cpus_per_process * per_node, "memory": settings.memory}
    if settings.gpus:
        wanted[settings.gpu] = per_node
    container = {
        "name": "trainer",
        "image": settings.image,
        "command": ["bash", "-c", agent],
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": {"requests": wanted, "limits": wanted},
        "volumeMounts": [{"name": "root", "mountPath": settings.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace_s,
        "containers": [container],
        "volumes": [
            {"name": "root", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's shared memory; 64 MB by default are too few
        ],
    }
    return {"metadata": {"labels": {"herd/job": name}}, "spec": spec}


def job_name(name: str) -> str:
    """Return `herd-<name>` as a Kubernetes name; a long one keeps its end, which is a key."""
    plain = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    return f"herd-{plain[-LONGEST_NAME:].strip('-')}"


def ended(found: Manifest) -> tuple[int, str] | None:
    """Return status and words if a JobSet or PyTorchJob, as `kubectl get -o json` prints it, is over."""
    for condition in found.get("status", {}).get("conditions", []):
        if condition["type"] in ENDED and condition["status"] == "True":
            words = f"{condition['type']}: {condition.get('reason', '')} {condition.get('message', '')}"
            return ENDED[condition["type"]], words.strip()
    return None


def ready_nodes(listed: Manifest, resource: str, amount: int) -> int:
    """Return how many nodes of `kubectl get nodes -o json` are ready and open, with `amount` of `resource`, if any."""
    return sum(_is_ready(node, resource, amount) for node in listed["items"])


def _is_ready(node: Manifest, resource: str, amount: int) -> bool:
    ready = {"type": "Ready", "status": "True"}.items()
    if node["spec"].get("unschedulable") or not any(ready <= found.items() for found in node["status"]["conditions"]):
        return False
    return not resource or int(node["status"]["allocatable"].get(resource, 0)) >= amount


def kubectl(*words: str, given: str | None = None) -> str:
    """Return what `kubectl words...` prints, with `given` on its stdin. Raises RuntimeError with its complaint."""
    done = subprocess.run(["kubectl", *words], capture_output=True, text=True, input=given, start_new_session=True)
    if done.returncode:
        raise RuntimeError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
