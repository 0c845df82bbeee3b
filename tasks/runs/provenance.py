"""What a run is made with: code and its changes, packages, cluster, user, command, prices; and how runs differ in it.

None of it is part of an artifact's key. What only the trainer knows (devices, hosts, NCCL) comes from its rank 0, see
`herd.llama3.train.device`. Secrets are replaced by ***.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from herd import __version__
from herd.llama3.train.job import HourlyCosts
from herd.storage.artifact import flatten
from herd.storage.filesystem import write_atomic
from herd.storage.processes import PACKAGE_FOLDER
from herd.storage.root import Root
from herd.storage.secrets import names_secret, scrub

if TYPE_CHECKING:
    from herd.tasks.cluster import Cluster

MAX_DIFF = 2**20
"""Bytes of a diff that are kept."""
MAX_NEW_FILE = 2**18
SOURCES = (".py", ".yaml", ".yml", ".toml", ".txt", ".md", ".sh", ".html", ".css", ".cu", ".cpp")
"""New files with these endings are part of the diff."""
PACKAGES = (
    *("herd-llm", "torch", "triton", "numpy", "numba", "safetensors", "tokenizers", "tiktoken", "pyarrow", "duckdb"),
    *("fsspec", "s3fs", "huggingface_hub", "pydantic", "prefect", "prefect-dask", "prefect-ray", "mlflow"),
)
CLUSTER = "cluster.yaml"
"""File of a run's folder with its cluster, as `herd run --cluster` reads it."""


class Provenance(BaseModel):
    """What the last attempt at a run is made with, as the machine knows it that started the run."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    user: str
    host: str
    command: str
    """Command line, or name of the Prefect deployment."""
    source: Literal["LOCAL", "JOB"] = "LOCAL"
    """JOB: started by a Prefect deployment."""
    commit: str = ""
    """Full commit of the checkout; empty outside git."""
    diff: str = ""
    """Digest of the changes to it, which are in `code-<digest>.diff` beside the record; empty: none."""
    packages: dict[str, str] = {}
    cluster: str = ""
    """Settings that differ from the defaults, as YAML."""

    @property
    def diff_file(self) -> str:
        """The file of the run's folder with the changes, or ""."""
        return f"code-{self.diff}.diff" if self.diff else ""

    def tags(self) -> dict[str, str]:
        """Return tags for MLflow; those with its prefix fill its columns User, Source and Version."""
        return {
            "mlflow.user": self.user,
            "mlflow.source.name": " ".join(PurePath(word).name or word for word in self.command.split()),
            "mlflow.source.type": self.source,
            **({"mlflow.source.git.commit": self.commit} if self.commit else {}),
            "command": self.command,
            "host": self.host,
            "packages": ", ".join(f"{name} {number}" for name, number in self.packages.items()),
            **({"code.diff": self.diff} if self.diff else {}),
        }


def record_provenance(
    root: Root, run: str, cluster: Cluster, command: str, source: Literal["LOCAL", "JOB"]
) -> Provenance:
    """Return the provenance of `run`, and write its cluster and the changes to the code into its folder."""
    changes = scrub(code_changes())
    provenance = Provenance(
        user=user_name(),
        host=socket.gethostname(),
        command=scrub(command),
        source=source,
        commit=_git("rev-parse", "HEAD"),
        diff=hashlib.sha256(changes.encode()).hexdigest()[:12] if changes else "",
        packages=package_versions(),
        cluster=cluster_yaml(cluster),
    )
    for name, text in ((CLUSTER, provenance.cluster), (provenance.diff_file, changes)):
        if name:
            write_atomic(root.file("runs", run, name), text)
            if not root.is_local:
                root.write(text, "runs", run, name)
    return provenance


def user_name() -> str:
    """Return the user of this process; its number where a container has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def package_versions() -> dict[str, str]:
    """Return the installed versions of the packages that decide how a run behaves."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def cluster_yaml(cluster: Cluster) -> str:
    """Return the cluster as the YAML file that describes it, without defaults and secrets."""
    plain = cluster.model_dump(mode="json", exclude_defaults=True)
    always = {name: getattr(cluster, name) for name in ("launcher", "processes", "micro_batch", "threads")}
    for section in (plain.get(cluster.launcher, {}), plain):
        if variables := section.get("environment"):
            section["environment"] = {name: "***" if names_secret(name) else value for name, value in variables.items()}
    return scrub(yaml.safe_dump({**always, **plain}, sort_keys=False, width=120))


def hourly_costs(cluster: Cluster, gpus: bool, before: Mapping[str, float]) -> HourlyCosts:
    """Return the costs of an hour of a device; `gpus`: it is a GPU. `before` are the costs of earlier stages."""
    from herd.llama3.hardware.prices import Prices
    from herd.llama3.hardware.topology import load_fabric

    usd, watts, basis = cluster.gpu_hour_usd, cluster.gpu_watts, []
    if usd is not None:
        basis.append(f"{usd:g} USD per GPU-hour")
    elif gpus:
        usd = Prices().gpu_hour
        basis.append(f"{usd:g} USD per GPU-hour (assumed by the planner; set cluster.gpu_hour_usd)")
    if watts is not None:
        basis.append(f"{watts:,.0f} W per GPU")
    elif gpus and cluster.fabric:
        fabric = load_fabric(cluster.fabric)
        overhead = fabric.server.overhead_watts / fabric.server.gpus
        watts = Prices(gpu_watts=fabric.accelerator.watts, server_watts=overhead).watts
        basis.append(f"{watts:,.0f} W per GPU (assumed by the planner for {fabric.name}; set cluster.gpu_watts)")
    return HourlyCosts(usd=usd, watts=watts, basis=", ".join(basis), before=dict(before))


@cache
def code_version() -> str:
    """Return the commit of this checkout, with `+changes` if files differ from it; else the version of the package.

    `unknown` for a checkout without git.
    """
    if not (PACKAGE_FOLDER / "pyproject.toml").is_file():
        return f"v{__version__}"
    commit = _git("rev-parse", "--short=12", "HEAD")
    return (commit + ("+changes" if _git("status", "--porcelain") else "")) if commit else "unknown"


@cache
def code_changes() -> str:
    """Return the diff of this checkout to its commit, new source files included, at most MAX_DIFF bytes of it."""
    if not _git("status", "--porcelain"):
        return ""
    with tempfile.TemporaryDirectory(prefix="herd-index-") as folder:
        index = Path(folder, "index")  # a copy, in which new files can be announced without touching the user's
        shutil.copyfile(PACKAGE_FOLDER / _git("rev-parse", "--git-path", "index"), index)
        new = [
            name
            for name in _git("ls-files", "--others", "--exclude-standard").splitlines()
            if name.endswith(SOURCES) and PACKAGE_FOLDER.joinpath(name).stat().st_size <= MAX_NEW_FILE
        ]
        if new:
            _git("add", "--intent-to-add", "--", *new, GIT_INDEX_FILE=str(index))
        text = _git("diff", "--no-ext-diff", "--no-color", "HEAD", GIT_INDEX_FILE=str(index))
    if len(text.encode()) <= MAX_DIFF:
        return text
    return text.encode()[:MAX_DIFF].decode(errors="ignore") + f"\n... {len(text):,} characters in all\n"


def _git(*arguments: str, **variables: str) -> str:
    """Return git's output about this checkout; "" if it fails, or if another repository holds an installed herd."""
    if not (PACKAGE_FOLDER / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE_FOLDER), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", **variables},
        )
    except OSError:  # git is not installed
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# Differences between runs.


def provenance_facts(
    code: str, provenance: Provenance | None, environments: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """Return everything about code, software, devices and cluster of a run by name, in reading order.

    `environments` are those of its stages; where they differ a fact has several values.
    """
    facts = {"code": code}
    if provenance is not None:
        facts |= {
            "git diff": provenance.diff,
            "user": provenance.user,
            "host": provenance.host,
            "command": provenance.command,
        }
        facts |= provenance.packages
    for name in dict.fromkeys(name for environment in environments for name in environment if name != "topology"):
        values = dict.fromkeys(environment[name] for environment in environments if name in environment)
        facts[name] = " / ".join(values)  # torch: that of the trainer
    cluster = yaml.safe_load(provenance.cluster) if provenance is not None else None
    settings = flatten(cluster or {}, "cluster.")
    return facts | {name: str(value) for name, value in settings.items() if name != "cluster.micro_batch"}


BRIEF = ("command", "host", "hosts", "kernel", "costs", "user")
"""Facts that the line about a difference leaves out; the table has them."""


def differences_line(facts: Mapping[str, Sequence[str]]) -> str:
    """Return how runs differ, in a line: `torch 2.13 -> 2.14; layout dp 8 -> tp 2 dp 4; git diff differs`."""
    parts = []
    for name, values in facts.items():
        if len(set(values)) > 1 and name not in BRIEF:
            shown = [value or "none" for value in values]
            parts.append(f"{name} differs" if name == "git diff" and all(values) else f"{name} {' -> '.join(shown)}")
    return "; ".join(parts)
