"""The page about cluster files is what the model says."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import yaml

from herd.llama3.recipe.reference import json_schema
from herd.tasks.cluster import Cluster, cluster_reference


def test_the_written_reference_is_the_current_one() -> None:
    written = Path("docs/reference/cluster.md").read_text()
    assert written == cluster_reference(), "write it again: herd schema --cluster > docs/reference/cluster.md"


def test_an_editor_accepts_the_files_of_the_tutorials() -> None:
    validator = jsonschema.Draft202012Validator(json_schema(Cluster))
    for page in ("slurm", "kubernetes"):
        (text,) = re.findall(r"```yaml\n(.*?)```", Path(f"docs/tutorials/{page}.md").read_text(), re.S)
        assert [error.message for error in validator.iter_errors(yaml.safe_load(text))] == []
    assert not validator.is_valid({"micro_batch": "many"})
