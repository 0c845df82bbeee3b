"""What a run is made with: the diff of a changed checkout, the cluster, prices, and no secret in any of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from herd import __version__
from herd.storage.root import Root
from herd.storage.secrets import names_secret, scrub
from herd.tasks.cluster import Cluster, load_cluster
from herd.tasks.runs import provenance
from herd.tasks.runs.provenance import (
    Provenance,
    cluster_yaml,
    code_changes,
    code_version,
    differences_line,
    hourly_costs,
    provenance_facts,
    record_provenance,
)

TOKEN = "tok-0123456789abcdef"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, which herd takes for its own."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "train.py").write_text("rate = 1\n")
    (folder / "pyproject.toml").touch()
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    monkeypatch.setattr(provenance, "PACKAGE_FOLDER", folder)
    for function in (code_changes, code_version):
        function.cache_clear()
        monkeypatch.setattr(provenance, function.__name__, function.__wrapped__)
    return folder


def test_the_diff_has_changes_and_new_sources_and_leaves_the_index_alone(checkout: Path) -> None:
    assert provenance.code_changes() == ""
    assert re.fullmatch("[0-9a-f]{12}", provenance.code_version()), "clean"
    # another length: of two equal ones that are written within a clock tick of the commit, git cannot see the second
    (checkout / "train.py").write_text("rate = 20\n")
    (checkout / "new.py").write_text("batch = 3\n")
    (checkout / "data.bin").write_bytes(b"\0" * 100)
    text = provenance.code_changes()
    assert "-rate = 1\n+rate = 20" in text
    assert "+batch = 3" in text
    assert "data.bin" not in text
    assert provenance.code_version().endswith("+changes")
    shown = subprocess.run(["git", "-C", str(checkout), "status", "--porcelain"], capture_output=True, text=True)
    assert shown.stdout.split() == ["M", "train.py", "??", "data.bin", "??", "new.py"]


def test_a_large_diff_is_cut_and_says_so(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "MAX_DIFF", 200)
    (checkout / "train.py").write_text("rate = 2\n" * 100)
    text = provenance.code_changes()
    assert len(text.encode()) < 260
    assert text.endswith("characters in all\n")


def test_an_installed_herd_does_not_take_another_repository_for_its_own(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = checkout / "venv" / "site-packages" / "herd"
    site.mkdir(parents=True)
    monkeypatch.setattr(provenance, "PACKAGE_FOLDER", site)
    assert (provenance.code_version(), provenance.code_changes()) == (f"v{__version__}", "")


def test_no_secret_is_recorded(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (checkout / "train.py").write_text(f"login('{TOKEN}')\nurl = 's3://user:{TOKEN[::-1]}@host/x'\n")
    place = Cluster.model_validate({"launcher": "slurm", "slurm": {"environment": {"NCCL_IB_HCA": "mlx5"}}})
    place.slurm.environment["WANDB_API_KEY"] = "w" * 20  # a cluster file with it is refused
    root = Root.parse(tmp_path / "root")
    made = record_provenance(root, "tiny-1", place, f"herd run x.yaml --set a={TOKEN}", "LOCAL")
    kept = made.model_dump_json() + "".join(path.read_text() for path in root.file("runs", "tiny-1").iterdir())
    for secret in (TOKEN, TOKEN[::-1], "w" * 20):
        assert secret not in kept
    assert "login('***')" in root.file("runs", "tiny-1", made.diff_file).read_text()
    assert yaml.safe_load(made.cluster)["slurm"]["environment"] == {"WANDB_API_KEY": "***", "NCCL_IB_HCA": "mlx5"}
    assert made.tags()["mlflow.source.name"] == "herd run x.yaml --set a=***"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("hf_" + "a" * 30, "hf_***"),
        ("AWS_SECRET_ACCESS_KEY=abcdefghij/k", "AWS_SECRET_ACCESS_KEY=***"),
        ("https://h/x?X-Amz-Signature=abcd&y=1", "https://h/x?X-Amz-Signature=***&y=1"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END", "-----BEGIN PRIVATE KEY-----***-----END"),
        ("tokens: {max_epochs: 4}, token = tokens[0]", "tokens: {max_epochs: 4}, token = tokens[0]"),
    ],
)  # fmt: skip
def test_secrets_are_known_by_their_shape(text: str, hidden: str) -> None:
    assert scrub(text) == hidden


def test_names_of_secrets() -> None:
    assert all(map(names_secret, ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "MLFLOW_AUTH", "api-key")))
    assert not any(map(names_secret, ("TOKENIZERS_PARALLELISM", "NCCL_IB_HCA", "DATA", "MONKEY", "AUTHOR", "USER")))


def test_the_recorded_cluster_is_a_cluster_file(tmp_path: Path) -> None:
    place = Cluster.model_validate({"processes": 8, "layout": {"tp": 2}, "slurm": {"partition": "h100"}})
    (tmp_path / "cluster.yaml").write_text(cluster_yaml(place))
    assert load_cluster(tmp_path / "cluster.yaml") == place


def test_costs_are_of_the_cluster_file_or_say_that_they_are_assumed() -> None:
    given = hourly_costs(Cluster(gpu_hour_usd=3.0, gpu_watts=1000.0), True, {"gpu_hours": 10.0, "usd": 30.0})
    assert given.of(2.0) == {"gpu_hours": 2.0, "usd": 6.0, "kwh": 2.0}
    assert given.so_far(2.0) == {"gpu_hours": 12.0, "usd": 36.0, "kwh": 2.0}
    assert given.basis == "3 USD per GPU-hour, 1,000 W per GPU"
    assumed = hourly_costs(Cluster(fabric="roce-24k"), True, {})
    assert assumed.of(2.0) == pytest.approx({"gpu_hours": 2.0, "usd": 5.0, "kwh": 2 * (700 * 0.9 + 300) * 1.1 / 1000})
    assert assumed.basis.count("assumed by the planner") == 2
    assert hourly_costs(Cluster(), True, {}).of(1.0) == {"gpu_hours": 1.0, "usd": 2.5}, "unknown GPU: no energy"
    assert hourly_costs(Cluster(), False, {}).of(1.0) == {"gpu_hours": 1.0}, "processors have no price"


def test_differences_in_a_line() -> None:
    def facts(torch: str, diff: str, layout: str, processes: int) -> dict[str, str]:
        made = Provenance(user="ann", host="a", command="herd run", diff=diff, packages={"torch": torch},
                          cluster=f"processes: {processes}\nslurm: {{partition: h100}}\n")  # fmt: skip
        return provenance_facts("c0de", made, [{"torch": torch, "layout": layout, "hosts": f"n{processes}"}])

    first, second = facts("2.13", "aaa", "dp 8", 8), facts("2.14", "bbb", "tp 2 dp 4", 8)
    rows = {name: [first[name], second[name]] for name in first}
    assert differences_line(rows) == "git diff differs; torch 2.13 -> 2.14; layout dp 8 -> tp 2 dp 4"
    third = facts("2.13", "", "dp 8", 16)
    rows = {name: [first[name], third[name]] for name in first}
    assert differences_line(rows) == "git diff aaa -> none; cluster.processes 8 -> 16"
    stages = provenance_facts("c0de", None, [{"layout": "dp 8", "hosts": "n1"}, {"layout": "tp 2"}, {"layout": "dp 8"}])
    assert (stages["layout"], stages["hosts"]) == ("dp 8 / tp 2", "n1"), "of all stages"
