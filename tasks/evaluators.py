"""The processes that score a model on this machine: forked from the agent that also forks the trainer's ranks.

The scores have the same bytes on any number of processes, and what a score used is given back when they end. What this
gives up: other machines (a flow run of `evaluate` per checkpoint spreads checkpoints over machines instead), and a
model must fit one device.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llama3.evaluate.main import MISTAKE, REFUSED, EvaluateJob
from llama3.recipe.load import to_yaml
from llama3.recipe.schema import Recipe
from llama3.train.attempt import Attempt
from tasks.cluster import Cluster
from tasks.failures import EvaluationFailed
from tasks.launch import Agents


def score(
    recipe: Recipe, model: Path, documents: Path, folder: Path, cluster: Cluster, agents: Agents
) -> dict[str, Any]:
    """Score the model in folder `model`, which holds its tokenizer, into `folder`; return the facts of `evaluate`.

    Raises ValueError as `evaluate` does, OSError for a full disk, and EvaluationFailed if a process died.
    """
    with TemporaryDirectory(prefix="evaluate-") as temporary:
        place = Path(temporary)
        (place / "recipe.yaml").write_text(to_yaml(recipe))
        threads = max(1, cluster.threads // cluster.evaluators)
        job = EvaluateJob(
            recipe=place / "recipe.yaml",
            model=model,
            tokenizer=model,
            documents=documents,
            folder=folder,
            facts=place / "facts.json",
            threads=threads,
            device=cluster.device,
        )
        (place / "job.json").write_text(job.model_dump_json())
        attempt = Attempt(program="evaluate", job=place / "job.json", logs=place / "logs", processes=cluster.evaluators)
        outcome = agents.start(attempt, cluster.process_threads).wait()
        if outcome.status == 0:
            facts: dict[str, Any] = json.loads(job.facts.read_text())
            return facts
    mistakes = [line for line in outcome.words.splitlines() if line.startswith(MISTAKE)]
    if outcome.status == REFUSED and mistakes:
        raise ValueError(mistakes[-1].removeprefix(MISTAKE))
    if os.strerror(errno.ENOSPC) in outcome.words:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    raise EvaluationFailed(f"an evaluator ended with status {outcome.status}:\n{outcome.words}")
