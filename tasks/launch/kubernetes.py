"""Start the trainer on Kubernetes: a JobSet or TrainJob per attempt, one pod and one agent per node.

The supervisor restarts, not the controller: only it knows whether an attempt made progress and how many nodes are left.
So both kinds fail at the first failed pod. Trainer makes the JobSet of a TrainJob from a TrainingRuntime, which is
created with it. The manifest is kept with the logs. Pods see the root on a shared volume.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from herd.llama3.train.job import AttemptResult, first_failure, read_outcomes
from herd.storage.filesystem import write_atomic
from herd.storage.processes import parallel_map
from herd.tasks.cluster import Cluster
from herd.tasks.errors import SchedulerRefused
from herd.tasks.launch.base import (
    NO_OUTCOME,
    Excluded,
    Fault,
    agent_command,
    agent_variables,
    answer_of,
    keep_job,
    query,
    same_job,
    trainer_environment,
)
from herd.tasks.launch.local import Agents

API = {"JobSet": "jobset.x-k8s.io/v1alpha2", "TrainJob": "trainer.kubeflow.org/v1alpha1"}
CREATED = {"JobSet": ["JobSet"], "TrainJob": ["TrainingRuntime", "TrainJob"]}
"""Kind -> the objects of an attempt, in the order in which they are created."""
ENDED = {"Completed": 0, "Complete": 0, "Failed": 1}
"""Types of condition that end a JobSet (Completed) or a TrainJob (Complete), and the status they mean."""
PORT = 29500
CACHED_S = 60.0
"""How long the webhooks of a TrainJob may deny that its runtime, created before, exists."""
LONGEST_NAME = 36
"""Pods append their own endings, and a host name has at most 63 characters."""
MERGE_KEYS = {
    **dict.fromkeys(("containers", "initContainers", "env", "volumes", "imagePullSecrets", "replicatedJobs"), "name"),
    **{"volumeMounts": "mountPath", "ports": "containerPort", "hostAliases": "ip", "volumeDevices": "devicePath"},
}
"""List -> the field by which Kubernetes merges its objects."""
Manifest = dict[str, Any]


run_on_nodes = None  # a pod that only looks would need a manifest, an image and its logs


class KubernetesLauncher:
    """Creates jobs with kubectl, in the cluster of its current context."""

    def __init__(self, cluster: Cluster, name: str, excluded: Excluded = dict) -> None:
        """Jobs are called `herd-<name>`. Raises ValueError if kubectl is not on the PATH."""
        if not shutil.which("kubectl"):
            raise ValueError("cluster.launcher: kubernetes needs kubectl on the PATH; install it, or write local")
        self.cluster, self.name, self.excluded = cluster, job_name(name), excluded

    def capacity(self) -> int:
        """Return how many processes the ready nodes could run, including nodes in use."""
        settings, processes = self.cluster.kubernetes, self.cluster.processes
        below = Path(settings.mount)  # the paths do not matter, only what the pods ask for, with the overlay
        spec = job_set(self.cluster, self.name, below / "job.json", processes, below / "logs")["spec"]
        pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        listed, excluded = json.loads(get("nodes")), self.excluded()
        listed["items"] = [node for node in listed["items"] if node["metadata"]["name"] not in excluded]
        per_node = min(settings.processes_per_node, processes)
        return min(places(listed, pod, settings.gpu if settings.gpus else "", per_node) * per_node, processes)

    def live(self, job: Path) -> KubernetesLaunch | None:
        """Return the job of this name that has not ended, or None."""
        launch = KubernetesLaunch(self.cluster, self.name)
        resource = launch.object = launch.read()
        if resource is None or ended(resource) is not None:
            return None
        launch.logs = Path(resource["metadata"]["annotations"]["herd/logs"])
        if not same_job(launch, job):
            launch.stop()
            return None
        return launch

    def start(self, job: Path, processes: int, logs: Path) -> KubernetesLaunch:
        """Create the job of an attempt, in place of one that has ended. Raises SchedulerRefused."""
        logs.mkdir(parents=True, exist_ok=True)
        objects = manifests(self.cluster, self.name, job, processes, logs, sorted(self.excluded()))
        keep_job(job, logs)
        write_atomic(logs / "job.yaml", yaml_of(objects))
        launch = KubernetesLaunch(self.cluster, self.name)
        earlier = launch.read()
        if earlier is not None and ended(earlier) is not None:
            launch.stop()
        try:
            for resource in objects:
                create(resource)
        except Exception:  # for example, another process created a job of this name: do not delete it
            raise
        except BaseException:
            launch.stop()  # interrupted while it was created
            raise
        launch.logs = logs
        return launch


def launcher(cluster: Cluster, name: str, agents: Agents, excluded: Excluded) -> KubernetesLauncher:
    return KubernetesLauncher(cluster, name, excluded)


def running_job(logs: Path) -> KubernetesLaunch | None:
    """Return the job that was created for the attempt with log folder `logs`, if it has not ended."""
    manifest = logs / "job.yaml"
    if not manifest.exists() or not shutil.which("kubectl"):
        return None
    *_, job = yaml.safe_load_all(manifest.read_text())
    settings = {"kind": job["kind"], "namespace": job["metadata"]["namespace"]}
    launch = KubernetesLaunch(Cluster.model_validate({"kubernetes": settings}), job["metadata"]["name"])
    resource = launch.read()  # of an earlier attempt, if that has the same name
    if resource is None or ended(resource) or resource["metadata"]["annotations"]["herd/logs"] != str(logs):
        return None
    launch.logs = logs
    return launch


class KubernetesLaunch:
    """One created job."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.settings, self.name = cluster.kubernetes, name
        self.label = f"{self.settings.kind} {name}"
        self.logs, self.polled_at = Path(), float("-inf")
        self.object: Manifest | None = None
        self.kubectl_args = [f"--namespace={self.settings.namespace}", f"{self.settings.kind.lower()}/{name}"]

    def read(self) -> Manifest | None:
        """Return the job as `kubectl get` shows it, or None if it does not exist."""
        text = get(*self.kubectl_args, "--ignore-not-found")
        return json.loads(text) if text else None

    def poll(self) -> AttemptResult | None:
        """Return how the job ended, or None while it waits or runs; calls kubectl every `poll_s`."""
        if time.monotonic() - self.polled_at >= self.settings.poll_s:
            self.object, self.polled_at = self.read(), time.monotonic()
            if self.object is None:
                return self._outcome(NO_OUTCOME, "it was deleted")
        result = ended(self.object) if self.object else None
        return None if result is None else self._outcome(*result)

    def waits(self) -> bool:
        """Return whether a pod does not run yet."""
        selector = f"--selector=herd/job={self.name}"
        listed = json.loads(get("pods", self.kubectl_args[0], selector))["items"]
        return not listed or any(pod["status"]["phase"] != "Running" for pod in listed)

    def used_s(self) -> None:
        return None  # its processes are on other machines

    def stop(self) -> None:
        """Delete the job and wait until its pods are gone: they get SIGTERM, save and exit within the grace."""
        kubectl("delete", *self.kubectl_args, "--ignore-not-found", "--cascade=foreground", "--wait=true")
        if self.settings.kind == "TrainJob":
            kubectl("delete", self.kubectl_args[0], "trainingruntime", f"--selector=herd/job={self.name}")

    def _outcome(self, status: int, message: str) -> AttemptResult:
        outcomes = read_outcomes(self.logs)
        worst = first_failure(outcomes) if status and outcomes else None
        if worst is not None and worst.status:
            return worst
        return AttemptResult(status=status, message=f"{self.settings.kind} {self.name}: {message}")


def scheduler_faults(cluster: Cluster) -> list[Fault]:
    """Return what Kubernetes lacks: an answer, the kinds and the right to create them, namespace, claim, queue."""
    settings = cluster.kubernetes
    namespace, group = settings.namespace, API[settings.kind].partition("/")[0]
    kinds = [f"{kind.lower()}s.{group}" for kind in CREATED[settings.kind]]
    asked = {
        **{kind: ["auth", "can-i", "create", kind, f"--namespace={namespace}"] for kind in kinds},
        "namespace": ["get", "namespace", namespace],
        "claim": ["get", "persistentvolumeclaim", settings.claim, f"--namespace={namespace}"],
    }
    if settings.queue:
        asked["queue"] = ["get", "localqueue", settings.queue, f"--namespace={namespace}"]
    commands = [["kubectl", *words, "--request-timeout=5s"] for words in asked.values()]
    answers = dict(zip(asked, parallel_map(lambda words: answer_of(*words), commands), strict=True))
    faults: list[Fault] = []
    for kind in kinds:
        _, allowed, message = answers.pop(kind)
        if "doesn't have a resource type" in message:
            return [(f"the cluster does not know {kind}", f"install the controller of {settings.kind}")]
        if allowed.strip() not in ("yes", "no"):
            context = "check the context (kubectl config current-context)"
            return [(f"kubectl auth can-i: {message or 'no answer'}", context)]
        if allowed.strip() == "no":
            what = f"you may not create {kind} in the namespace {namespace}"
            faults.append((what, "ask for the right, or correct kubernetes.namespace"))
    for field, (status, _, message) in answers.items():
        if status and "NotFound" in message:  # a right to look at it may be missing too
            value = getattr(settings, field)
            faults.append(
                (f"cluster.kubernetes.{field}: {value} is not there", "create it, or correct the cluster file")
            )
    return faults


def yaml_of(objects: Sequence[Manifest]) -> str:
    """Return Kubernetes objects as YAML, a document for each."""
    return yaml.safe_dump_all(json.loads(json.dumps(objects)), sort_keys=False)  # without aliases for parts used twice


def manifests(
    cluster: Cluster, name: str, job: Path, processes: int, logs: Path, excluded: Sequence[str] = ()
) -> list[Manifest]:
    """Return the Kubernetes objects of one attempt, which does not use the `excluded` nodes; the last is the job.

    Raises ValueError as `job_set` does.
    """
    made, settings = job_set(cluster, name, job, processes, logs, excluded), cluster.kubernetes
    if settings.kind == "JobSet":
        return [made]
    api, per_node = API["TrainJob"], min(settings.processes_per_node, processes)
    spec = {"mlPolicy": {"torch": {}}, "template": {"spec": made["spec"]}}
    # Another name for each attempt: of the last one's, the controller's cache may still have the old content
    named = {"name": f"{name}-{hashlib.sha256(json.dumps(spec).encode()).hexdigest()[:8]}"}
    metadata = {**named, "namespace": settings.namespace, "labels": {"herd/job": name}}
    train = {
        "runtimeRef": {"apiGroup": api.partition("/")[0], "kind": "TrainingRuntime", **named},
        "trainer": {"numNodes": settings.nodes(processes), "numProcPerNode": per_node},
    }
    return [
        {"apiVersion": api, "kind": "TrainingRuntime", "metadata": metadata, "spec": spec},
        {"apiVersion": api, "kind": "TrainJob", "metadata": made["metadata"], "spec": train},
    ]


def job_set(
    cluster: Cluster, name: str, job: Path, processes: int, logs: Path, excluded: Sequence[str] = ()
) -> Manifest:
    """Return the JobSet of one attempt, with the overlay; for a TrainJob the one that its controller makes.

    Raises ValueError if its files are not on the shared volume, or the overlay breaks it.
    """
    settings = cluster.kubernetes
    for path in (job, logs):
        if not path.is_relative_to(settings.mount):
            raise ValueError(
                f"cluster.kubernetes.mount: {path} is not below {settings.mount}, so pods cannot see it; put the root "
                "on the volume, or correct mount"
            )
    nodes, per_node = settings.nodes(processes), min(settings.processes_per_node, processes)
    labels = {"herd/job": name, **({"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue else {})}
    logs_at = {"herd/logs": str(logs)}
    metadata = {"name": name, "namespace": settings.namespace, "labels": labels, "annotations": logs_at}
    agent = agent_command(processes, per_node)
    files = agent_variables(settings.python or "python", job, logs)
    template: Manifest = {}
    if settings.kind == "JobSet":
        # JobSet names a pod <set>-<job>-<number of job>-<number of pod> and gives it a host name in the set's domain
        agent += f' --node "$JOB_COMPLETION_INDEX" --address {name}-node-0-0.{name} --port {PORT}'
    else:
        # Trainer's policy `torch` sets these variables in the container `node` of the job with this label
        agent += ' --node "$PET_NODE_RANK" --address "$PET_MASTER_ADDR" --port "$PET_MASTER_PORT"'
        template["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    template["spec"] = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": _pod(cluster, name, per_node, agent, files, excluded),
    }
    spec = {
        "failurePolicy": {"maxRestarts": 0},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
    }
    rendered = {"apiVersion": API["JobSet"], "kind": "JobSet", "metadata": metadata, "spec": spec}
    at = "cluster.kubernetes.overlay"
    merged = strategic_merge(rendered, settings.overlay, at)
    for container in merged["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]:
        if "image" not in container:
            raise ValueError(
                f"{at}: the container {container['name']} has no image; give it one, or write node, the name of the "
                "trainer's container"
            )
    return merged


def _pod(
    cluster: Cluster, name: str, per_node: int, agent: str, files: dict[str, str], excluded: Sequence[str]
) -> Manifest:
    settings = cluster.kubernetes
    variables = {**trainer_environment(settings.cpus_per_process, settings.environment), **files}
    resources: dict[str, str | int] = {"cpu": settings.cpus_per_process * per_node, "memory": settings.memory}
    if settings.gpus:
        resources[settings.gpu] = per_node
    resources |= settings.rdma
    container: Manifest = {
        "name": "node",
        "image": settings.image,
        "command": ["bash", "-c", agent],
        "env": [
            *({"name": key, "value": value} for key, value in variables.items()),
            {"name": "HERD_HOST", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": "root", "mountPath": settings.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    if settings.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in settings.secrets]
    if settings.rdma:  # a card registers memory, which must not be swapped out
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    shm = {"medium": "Memory", **({"sizeLimit": settings.shm} if settings.shm else {})}
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace_s,
        "containers": [container],
        "volumes": [
            {"name": "root", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "shm", "emptyDir": shm},  # NCCL's shared memory; 64 MB by default are too few
        ],
    }
    if settings.node_selector:
        spec["nodeSelector"] = settings.node_selector
    if settings.tolerations:
        spec["tolerations"] = settings.tolerations
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in settings.image_pull_secrets]
    if excluded:  # by name, for which the label kubernetes.io/hostname may have another word; one value each
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in excluded]
        terms = {"nodeSelectorTerms": [{"matchFields": fields}]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    metadata: Manifest = {"labels": {"herd/job": name}}
    if settings.topology:
        metadata["annotations"] = {"kueue.x-k8s.io/podset-preferred-topology": settings.topology}
    return {"metadata": metadata, "spec": spec}


def strategic_merge(resource: Manifest, patch: Manifest, path: str) -> Manifest:
    """Return `resource` with a strategic merge patch; errors begin with `path`.

    As in kubectl: mappings are merged, null deletes, lists of objects with a merge key are merged by it, other lists
    are replaced; `$patch: replace` in a mapping replaces it, `$patch: delete` in an object of a list deletes it. Raises
    ValueError.
    """
    merged = {} if patch.get("$patch") == "replace" else dict(resource)
    for field, value in patch.items():
        before, at = merged.get(field), f"{path}.{field}"
        if field == "$patch":
            if value != "replace":
                raise ValueError(f"{path}: $patch: {value!r} is unknown here; write replace, or null to delete a key")
        elif value is None:
            merged.pop(field, None)
        elif isinstance(value, dict):
            merged[field] = strategic_merge(before if isinstance(before, dict) else {}, value, at)
        elif isinstance(value, list) and (key := MERGE_KEYS.get(field)):
            merged[field] = _merge_list(before or [], value, key, at)
        else:
            merged[field] = value
    return merged


def _merge_list(objects: list[Manifest], patches: list[Manifest], key: str, path: str) -> list[Manifest]:
    """Return `objects` with those of `patches` that have the same `key` merged into them and the others appended."""
    merged = list(objects)
    for patch in patches:
        if not isinstance(patch, dict) or key not in patch:
            raise ValueError(f"{path}: {patch!r} has no {key}, by which the objects of this list are merged")
        index = next((at for at, each in enumerate(merged) if each.get(key) == patch[key]), len(merged))
        if patch.get("$patch") == "delete":
            del merged[index : index + 1]
        else:
            merged[index : index + 1] = [strategic_merge(merged[index] if index < len(merged) else {}, patch, path)]
    return merged


def job_name(name: str) -> str:
    """Return `herd-<name>` as a Kubernetes name; a long one is cut at the front, because the end is a hash."""
    plain = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    return f"herd-{plain[-LONGEST_NAME:].strip('-')}"


def ended(resource: Manifest) -> tuple[int, str] | None:
    """Return status and message if a JobSet or TrainJob, as `kubectl get -o json` prints it, has ended."""
    for condition in resource.get("status", {}).get("conditions", []):
        if condition["type"] in ENDED and condition["status"] == "True":
            message = f"{condition['type']}: {condition.get('reason', '')} {condition.get('message', '')}"
            return ENDED[condition["type"]], message.strip()
    return None


def places(listed: Manifest, pod: Manifest, resource: str, amount: int) -> int:
    """Return how many of `pod` (its spec) the nodes of `kubectl get nodes -o json` can hold, in use or not.

    Each needs `amount` of `resource`; without a resource a node holds one.
    """
    ready, count = {"type": "Ready", "status": "True"}.items(), 0
    selector = pod.get("nodeSelector", {}).items()
    # the admission plugin ExtendedResourceToleration, for example of GKE, tolerates taints named like a resource
    requested = pod["containers"][0]["resources"]["requests"]
    tolerations = [*pod.get("tolerations", []), *({"key": key, "operator": "Exists"} for key in requested)]
    for node in listed["items"]:
        spec, status = node["spec"], node["status"]
        up = any(ready <= condition.items() for condition in status["conditions"]) and not spec.get("unschedulable")
        chosen = selector <= node["metadata"].get("labels", {}).items()
        if up and chosen and all(_tolerated(taint, tolerations) for taint in spec.get("taints", [])):
            count += int(status["allocatable"].get(resource, 0)) // amount if resource else 1
    return count


def _tolerated(taint: Manifest, tolerations: list[Manifest]) -> bool:
    """Return whether pods with `tolerations` can start on a node with `taint`."""
    return taint["effect"] == "PreferNoSchedule" or any(
        each.get("key", taint["key"]) == taint["key"]
        and (each.get("operator") == "Exists" or each.get("value", "") == taint.get("value", ""))
        and each.get("effect") in (None, "", taint["effect"])
        for each in tolerations
    )


def get(*arguments: str) -> str:
    """Return the JSON of `kubectl get`. Raises SchedulerRefused without an answer for LOST_S."""
    return query("kubectl", "get", *arguments, "--output=json", "--request-timeout=30s")


def create(resource: Manifest) -> None:
    """Create a Kubernetes object. Raises SchedulerRefused with kubectl's error message."""
    deadline, namespace = time.monotonic() + CACHED_S, resource["metadata"]["namespace"]
    while True:
        try:
            kubectl("create", f"--namespace={namespace}", "--filename=-", stdin=yaml_of([resource]))
        except SchedulerRefused as refused:
            # The webhooks of Trainer and Kueue look for the runtime in a cache, which may not have it yet
            unseen = re.search(r"(?is)denied the request.*runtime.*not found", str(refused))
            if not unseen or time.monotonic() > deadline:
                raise
            time.sleep(1.0)
        else:
            return


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    """Return the output of `kubectl arguments...`. Raises SchedulerRefused with its error message."""
    done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, input=stdin, start_new_session=True)
    if done.returncode:
        raise SchedulerRefused(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
