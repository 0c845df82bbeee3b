"""The launcher with kubectl itself, which talks to a server of a few requests; and kubectl's own merge of patches.

The server keeps objects, refuses fields that the schemas do not know, and answers once as a webhook of Trainer that
does not know a runtime yet. It makes no pods and collects no garbage.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from herd.tasks.cluster import Cluster
from herd.tasks.errors import SchedulerRefused
from herd.tasks.launch import kubernetes
from herd.tasks.launch.base import orphans
from herd.tasks.launch.kubernetes import KubernetesLauncher, scheduler_faults, strategic_merge
from tests.tasks.launch.test_kubernetes import FAILED, FULL, KINDS, pod_of, rendered, validated

KUBECTL = Path(__file__).parents[3] / ".venv/kubernetes/bin/kubectl"
SERVED = {
    "api/v1": ["Pod", "Node", "Namespace", "PersistentVolumeClaim"],
    "apis/jobset.x-k8s.io/v1alpha2": ["JobSet"],
    "apis/trainer.kubeflow.org/v1alpha1": ["TrainJob", "TrainingRuntime"],
    "apis/kueue.x-k8s.io/v1beta1": ["LocalQueue"],
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not KUBECTL.exists(), reason="needs kubectl; run `make .venv/kubernetes/bin/kubectl`"),
]


class ApiServer(ThreadingHTTPServer):
    """Objects by their path, and every request that changed one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.objects: dict[str, dict[str, Any]] = {}
        self.changes: list[tuple[str, str, str]] = []
        self.lag = 1
        """How many TrainJobs the webhook refuses whose runtime was just created."""


class Requests(BaseHTTPRequestHandler):
    server: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, value: dict[str, Any], code: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, code: int, reason: str, message: str = "") -> None:
        kind = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self.answer({**kind, "code": code, "reason": reason, "message": message or self.path}, code)

    def do_GET(self) -> None:
        url, objects = urlsplit(self.path), self.server.objects
        path, wanted = url.path.strip("/"), parse_qs(url.query).get("labelSelector", [""])[0]
        groups = [api.split("/")[1:] for api in SERVED if api.startswith("apis/")]
        if path == "api":
            self.answer({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "apis":
            versions = [{"groupVersion": f"{name}/{version}", "version": version} for name, version in groups]
            listed = [{"name": name, "versions": [each]} for (name, _), each in zip(groups, versions, strict=True)]
            self.answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})
        elif path in SERVED:
            verbs = {"verbs": ["create", "delete", "get", "list", "watch"]}
            resources = [
                {"name": f"{kind.lower()}s", "singularName": kind.lower(), "kind": kind, "namespaced": True, **verbs}
                for kind in SERVED[path]
            ]
            version = path.partition("/")[2]
            self.answer(
                {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
            )
        elif path == "openapi/v3":
            self.answer({"paths": {"api/v1": {"serverRelativeURL": "/v1"}}})
        elif path == "v1":  # by this kubectl finds out whether the server checks fields, also of custom resources
            kind = {"x-kubernetes-group-version-kind": {"group": "", "version": "v1", "kind": "Namespace"}}
            checks = {"patch": {**kind, "parameters": [{"name": "fieldValidation", "in": "query"}]}}
            self.answer({"openapi": "3.0.0", "paths": {"/api/v1/namespaces/{name}": checks}})
        elif path.endswith("/customresourcedefinitions"):
            custom = [
                {"spec": {"group": api.split("/")[1], "names": {"kind": kind}}}
                for api, kinds in SERVED.items()
                for kind in kinds
            ]
            self.answer({"kind": "List", "apiVersion": "v1", "items": custom})
        elif path in objects:
            self.answer(objects[path])
        elif path.rpartition("/")[2] in {f"{kind.lower()}s" for kinds in SERVED.values() for kind in kinds}:
            key, _, value = wanted.partition("=")
            items = [
                each
                for at, each in objects.items()
                if at.rpartition("/")[0] == path and each["metadata"].get("labels", {}).get(key, "") == value
            ]
            self.answer({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items})
        else:
            self.refuse(404, "NotFound")

    def do_POST(self) -> None:
        url, body = urlsplit(self.path), self.body()
        if url.path.endswith("/selfsubjectaccessreviews"):  # as a protocol buffer
            review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
            self.answer({**review, "status": {"allowed": b"trainingruntimes" not in body}}, 201)
            return
        made = json.loads(body)
        at = f"{url.path.strip('/')}/{made['metadata']['name']}"
        assert parse_qs(url.query)["fieldValidation"] == ["Strict"]
        if validated([made]) != [made]:
            self.refuse(400, "BadRequest", "strict decoding error: unknown field")
        elif at in self.server.objects:
            self.refuse(409, "AlreadyExists", f"{at} already exists")
        elif made["kind"] == "TrainJob" and self.server.lag:
            self.server.lag -= 1
            denied = 'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: spec.runtimeRef: '
            unseen = 'TrainingRuntime.trainer.kubeflow.org "x" not found: specified trainingRuntime must be created '
            self.refuse(403, "Forbidden", f"{denied}Invalid value: {{}}: {unseen}before the TrainJob is created")
        else:
            self.server.changes.append(("create", made["kind"], ""))
            made["metadata"]["uid"] = str(len(self.server.changes))
            self.server.objects[at] = made
            self.answer(made, 201)

    def do_DELETE(self) -> None:
        at, options = urlsplit(self.path).path.strip("/"), json.loads(self.body() or "{}")
        if at not in self.server.objects:
            self.refuse(404, "NotFound")
            return
        gone = self.server.objects.pop(at)
        self.server.changes.append(("delete", gone["kind"], options.get("propagationPolicy", "")))
        self.answer(gone)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    served = ApiServer()
    threading.Thread(target=served.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{served.server_port}"}}],
        "contexts": [{"name": "it", "context": {"cluster": "it"}}],
        "current-context": "it",
    }
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{KUBECTL.parent}:{os.environ['PATH']}")
    yield served
    served.shutdown()
    served.server_close()


def cluster_of(kind: str, folder: Path) -> Cluster:
    settings = {"kind": kind, "mount": str(folder), "poll_s": 1e-9, "queue": "research", **FULL}
    return Cluster.model_validate({"launcher": "kubernetes", "kubernetes": settings})


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_created_found_replaced_and_deleted(server: ApiServer, kind: str, tmp_path: Path) -> None:
    job, first, second = (tmp_path / name for name in ("job", "attempt-1", "attempt-2"))
    job.write_text("{}")
    launcher = KubernetesLauncher(cluster_of(kind, tmp_path), "main-1a2b")
    assert launcher.live(job) is None
    launch = launcher.start(job, 8, first)
    assert launch.poll() is None
    assert launch.waits(), "it has no pods"
    made = {"JobSet": ["JobSet"], "TrainJob": ["TrainingRuntime", "TrainJob"]}[kind]
    creations = [("create", each, "") for each in made]
    assert server.changes == creations
    with pytest.raises(SchedulerRefused, match="AlreadyExists"):
        launcher.start(job, 8, first)
    found = KubernetesLauncher(cluster_of(kind, tmp_path), "main-1a2b").live(job)
    assert found is not None
    assert [one.label for one in orphans([first])] == [found.label] == [f"{kind} herd-main-1a2b"]
    (shown,) = (each for each in server.objects.values() if each["kind"] == kind)
    shown["status"] = {"conditions": [FAILED]}
    over = found.poll()
    assert over is not None
    assert (over.status, over.message) == (1, f"{kind} herd-main-1a2b: Failed: FailedJobs a job failed")
    again = launcher.start(job, 8, second)
    again.stop()
    assert server.objects == {}
    deletions = [("delete", kind, "Foreground"), *([("delete", made[0], "Background")] if len(made) > 1 else [])]
    assert server.changes == [*creations, *deletions, *creations, *deletions]
    again.stop()  # what is gone already is no error
    gone = again.poll()
    assert gone is not None
    assert "it was deleted" in gone.message


def test_a_webhook_that_never_knows_the_runtime_ends_the_wait(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "CACHED_S", 0.1)
    server.lag = 9
    (tmp_path / "job").write_text("{}")
    with pytest.raises(SchedulerRefused, match=r"kubectl create .*must be created before the TrainJob"):
        KubernetesLauncher(cluster_of("TrainJob", tmp_path), "main").start(tmp_path / "job", 8, tmp_path / "logs")


@pytest.mark.parametrize("kind", KINDS)
def test_doctor_asks_for_rights_and_for_what_the_file_names(server: ApiServer, kind: str, tmp_path: Path) -> None:
    refused = "you may not create trainingruntimes.trainer.kubeflow.org in the namespace default"
    missing = [
        f"cluster.kubernetes.{what} is not there" for what in ("namespace: default", "claim: herd", "queue: research")
    ]
    faults = [what for what, _ in scheduler_faults(cluster_of(kind, tmp_path))]
    assert faults == [*([refused] if kind == "TrainJob" else []), *missing]


def test_an_unknown_field_is_refused(server: ApiServer, tmp_path: Path) -> None:
    overlay = {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"backofLimit": 1}}}]}}
    asked = Cluster.model_validate({"kubernetes": {"mount": str(tmp_path), "overlay": overlay}})
    (tmp_path / "job").write_text("{}")
    with pytest.raises(SchedulerRefused, match="strict decoding error"):
        KubernetesLauncher(asked, "main").start(tmp_path / "job", 8, tmp_path / "logs")


@pytest.mark.parametrize(
    "patch",
    [
        {
            "containers": [
                {"name": "node", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "X", "value": "1"}]}
            ]
        },
        {"containers": [{"name": "node", "volumeMounts": [{"mountPath": "/dev/shm", "$patch": "delete"}]}]},
        {"containers": [{"name": "node", "resources": {"limits": {"cpu": None, "memory": "1Ti"}}, "tty": True}]},
        {"containers": [{"name": "node", "command": ["sh"], "envFrom": [{"secretRef": {"name": "other"}}]}]},
        {"containers": [{"name": "node", "ports": [{"containerPort": 29500}]}, {"name": "sidecar", "image": "x"}]},
        {"containers": [{"name": "node", "securityContext": {"$patch": "replace", "runAsUser": 0}}]},
        {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "nvme", "hostPath": {"path": "/n"}}]},
        {"volumes": [{"name": "root", "$patch": "delete"}]},
        {"imagePullSecrets": [{"name": "second"}], "tolerations": [{"key": "team", "operator": "Exists"}]},
        {"nodeSelector": {"cloud.google.com/gke-accelerator": None, "pool": "a"}, "hostAliases": [{"ip": "10.0.0.1"}]},
        {"terminationGracePeriodSeconds": 300, "priorityClassName": "training", "hostNetwork": True},
    ],
)
def test_patches_are_merged_as_kubectl_merges_them(patch: dict[str, Any], tmp_path: Path) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "it"},
        "spec": pod_of(rendered("JobSet", **FULL))["spec"],
    }

    def merged(pod: dict[str, Any], patch: dict[str, Any]) -> Any:
        """Return the pod as kubectl has it after the patch: with its own spelling of quantities."""
        (tmp_path / "pod.json").write_text(json.dumps(pod))
        command = [KUBECTL, "patch", "--local", "--type=strategic", "--output=json", f"--patch={json.dumps(patch)}"]
        done = subprocess.run([*command, "-f", tmp_path / "pod.json"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return by_key(json.loads(done.stdout)["spec"])

    ours = strategic_merge(pod, {"spec": patch}, "overlay")
    assert merged(ours, {}) == merged(pod, {"spec": patch})
    assert merged(ours, {}) != merged(pod, {})


def by_key(value: Any) -> Any:
    """Return `value` with the lists of objects that have names in the order of these, which has no meaning."""
    if isinstance(value, dict):
        return {key: by_key(each) for key, each in value.items()}
    if isinstance(value, list):
        return (
            sorted((by_key(each) for each in value), key=json.dumps) if value and isinstance(value[0], dict) else value
        )
    return value
