"""The data steps on Slurm, by the script of the tutorial."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from herd.storage.object_artifact import open_store
from herd.storage.processes import free_ports
from herd.storage.root import Root
from herd.tasks.runs.records import Runs
from tests.e2e.conftest import wait_for
from tests.tasks.slurm_daemons import slurm_for_children

PAGE = Path("docs/tutorials/curate-on-a-cluster.md")


def write_recipe(folder: Path) -> None:
    """Write a recipe of 300 documents, some of them copies, in 12 files."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklm", k=6)) for _ in range(2000)]
    texts = [" ".join(rng.choices(words, k=120)) for _ in range(280)]
    texts += [f"{text} again" for text in texts[:20]]
    for file in range(12):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[file::12])
        (folder / f"{file}.jsonl").write_text("".join(lines))
    recipe = {
        "name": "corpus",
        "sources": {"general": [{"uri": str(folder / "*.jsonl"), "language": "en"}]},
        "curate": {"quality": {"rules": []}},
        "tokenizer": {"train": {"vocab": 300}},
        "mix": {"base": {"general": "100%"}},
        "model": {"preset": "tiny"},
        "lr": {"peak": 1e-3, "warmup": "1 steps", "cosine": {"to": 1e-4, "over": "4Ki"}},
        "stages": [{"name": "main", "for": "4Ki", "seq_len": 64, "batch": "1Ki", "mix": "base"}],
    }
    (folder / "corpus.yaml").write_text(yaml.safe_dump(recipe))


def digests(root: Path) -> dict[str, str]:
    at = Root.parse(str(root), str(root))
    artifact = open_store(at).load(Runs(at).find("corpus-1").steps["curate"].artifact)
    return {name: file.sha256 for name, file in artifact.manifest.files.items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_of_the_tutorial_curates_on_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", PAGE.read_text(), re.DOTALL)
    server, scheduler = free_ports(2)
    for printed, here in {
        "4200": str(server),
        "8786": str(scheduler),
        "--ntasks-per-node=4": "--ntasks-per-node=2",
        " --mem-per-cpu=4G": "",
        "$(hostname -I | cut -d' ' -f1)": "127.0.0.1",
        ".venv/bin/": f"{Path(sys.executable).parent}/",
    }.items():
        assert printed in script
        script = script.replace(printed, here)
    write_recipe(tmp_path)
    (tmp_path / "curate.sbatch").write_text(script)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    with slurm_for_children():
        monkeypatch.setenv("HERD_ROOT", str(tmp_path / "slurm"))
        sent = subprocess.run(
            ["sbatch", "--parsable", "--wait", "curate.sbatch"], cwd=tmp_path, capture_output=True, text=True
        )
        said = "\n".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
        assert sent.returncode == 0, said
        wait_for(lambda: not subprocess.run(["squeue", "-h"], capture_output=True).stdout, "the end of the job")
    assert yaml.safe_load((tmp_path / "slurm-data.yaml").read_text())["data_workers"] == 4
    assert said.count("Registered to") == 4, "a worker for each task of both nodes"
    environment = {**os.environ, "HERD_ROOT": str(tmp_path / "threads")}
    subprocess.run(
        [sys.executable, "-P", "-m", "herd.flows.cli.main", "data", "corpus.yaml"],
        cwd=tmp_path, env=environment, check=True, capture_output=True,
    )  # fmt: skip
    assert digests(tmp_path / "slurm") == digests(tmp_path / "threads")
