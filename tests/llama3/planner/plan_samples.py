"""A small model, a small cluster and a recipe for both, on which a search takes a tenth of a second."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from herd.llama3.hardware.topology import Fabric, make_fabric
from herd.llama3.planner.collectives import Network
from herd.llama3.planner.device_curves import Curves, prior_curves
from herd.llama3.planner.layout_search import LayoutQuery
from herd.llama3.planner.projection import Projection, StagePlacement, project
from herd.llama3.planner.step_time import StepModel
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Model

VOCAB_SIZE = 128_256
SMALL = {
    "layers": 6,
    "dim": 2048,
    "ffn": 8192,
    "heads": 16,
    "kv_heads": 8,
    "max_seq_len": 16384,
    "tied_embeddings": False,
}
MAIN = "{name: main, until: 64Mi, seq_len: 4096, batch: 1Mi, mix: base}"
LONG = "{name: long, for: 16Mi, seq_len: 16384, batch: 1Mi, mix: base}"
CLUSTER: dict[str, Any] = {
    "name": "small",
    "accelerator": "h100",
    "server": "grand-teton",
    "network": "roce",
    "routing": "e-ecmp",
    "queue_pairs": 4,
    "tiers": [
        {"name": "rack", "gpus": 16},
        {"name": "pod", "gpus": 32},
        {"name": "cluster", "gpus": 64, "oversubscription": 4},
    ],
}


def cluster_file(folder: Path, **changes: Any) -> Path:
    """Write the small cluster as a YAML file."""
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**CLUSTER, **changes}))
    return path


def fabric(**changes: Any) -> Fabric:
    """Return the small cluster."""
    return make_fabric({**CLUSTER, **changes})


def recipe(*overrides: str) -> Recipe:
    """Return a recipe of two stages that trains the small model."""
    shape = ", ".join(f"{name}: {str(value).lower()}" for name, value in SMALL.items())
    words = [f"model={{{shape}}}", f"stages=[{MAIN}, {LONG}]", "evaluate.after=[main]", *overrides]
    return load_recipe(Path("recipes/llama3-8b.yaml"), words)


@cache
def curves() -> Curves:
    """Return what is assumed of the H100."""
    return prior_curves(fabric().accelerator)


def config(**changes: Any) -> Model:
    """Return the small model's shape."""
    return Model.model_validate({**SMALL, **changes})


def step_model(**changes: Any) -> StepModel:
    """Return the model of steps of the small model on the small cluster."""
    return StepModel(config(**changes), VOCAB_SIZE, Network(fabric()), curves())


def layout_query(**changes: Any) -> LayoutQuery:
    """Return 256 sequences of 4,096 tokens on 32 of the cluster's GPUs."""
    asked = {
        "config": config(),
        "vocab_size": VOCAB_SIZE,
        "seq_len": 4096,
        "batch": 2**20,
        "world": 32,
        "memory_bytes": 80e9,
    }
    return LayoutQuery(**{**asked, **changes})


@cache
def projection() -> Projection:
    """Return the small recipe on the small cluster: its first stage on 64 GPUs, the second on 32."""
    return project(recipe(), VOCAB_SIZE, fabric(), curves(), {"long": StagePlacement(32)})
