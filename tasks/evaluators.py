"""The processes that score a model: this one, or several on this machine that share the work.

Several are started by torchrun and end with it; the scores have the same bytes on any number. What this gives up: other
machines (a flow run of `evaluate` per checkpoint spreads checkpoints over machines instead), and a model must fit one
device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from llama3.recipe.load import to_yaml
from llama3.recipe.schema import Recipe
from tasks.cluster import Cluster

if TYPE_CHECKING:
    from llama3.evaluate.main import EvaluateJob

LAST_LINES = 12
MISTAKE = "evaluate: "
"""What the line of a mistake begins with."""


def score(recipe: Recipe, model: Path, documents: Path, folder: Path, cluster: Cluster) -> dict[str, Any]:
    """Score the model in folder `model`, which holds its tokenizer, into `folder`; return the facts of `evaluate`.

    Raises ValueError as `evaluate` does, and RuntimeError where processes of several failed.
    """
    from llama3.evaluate.main import EvaluateJob, run  # torch

    with TemporaryDirectory(prefix="evaluate-") as temporary:
        place = Path(temporary)
        (place / "recipe.yaml").write_text(to_yaml(recipe))
        job = EvaluateJob(
            recipe=place / "recipe.yaml",
            model=model,
            tokenizer=model,
            documents=documents,
            folder=folder,
            facts=place / "facts.json",
            threads=max(1, cluster.threads // cluster.evaluators),
            device=cluster.device,
        )
        if cluster.evaluators == 1:
            run(job)
        else:
            _together(job, place / "job.json", cluster.evaluators)
        facts: dict[str, Any] = json.loads(job.facts.read_text())
    return facts


def _together(job: EvaluateJob, path: Path, processes: int) -> None:
    path.write_text(job.model_dump_json())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launcher, "-m", "llama3.evaluate.main", str(path)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not ended.returncode:
        return
    lines = ended.stdout.strip().splitlines()
    for line in lines:
        if line.startswith(MISTAKE):
            raise ValueError(line.removeprefix(MISTAKE))
    raise RuntimeError(f"{processes} evaluators ended with {ended.returncode}:\n" + "\n".join(lines[-LAST_LINES:]))
