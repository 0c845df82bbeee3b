"""Chaos finds what it is there to find: a short one breaks nothing, and damage done after it is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from benchmarks.chaos import FAULTS, World
from benchmarks.chaos_checks import broken_promises, chaos_rows, undisturbed
from herd.storage.filesystem import filesystem_of
from herd.storage.root import Root
from herd.tasks.runs.records import Runs


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_minute_of_faults_breaks_nothing_and_damage_afterwards_is_named(tmp_path: Path) -> None:
    said: list[str] = []
    world = World(tmp_path, 7, said.append)
    with world.running():
        reference = undisturbed(world)
        world.inject(1)
        broken, true_after = broken_promises(world, reference)
        assert broken == [], "\n".join([*said[-40:], *broken])
        rows = {row.name: row.value for row in chaos_rows(world, reference, broken, true_after)}
        assert rows["chaos/faults"]
        assert rows["chaos/runs"] == 3
        assert {f"recovery/{kind}" for kind in FAULTS} <= rows.keys()

        family, uri = world.lanes[0].ended[0]
        record = Runs(Root.parse(uri, str(tmp_path / "look" / family))).find(f"{family}-1")
        files = filesystem_of(uri).find(f"{uri}/{record.steps['anneal'].artifact}")
        shard = next(file for file in files if file.endswith(".safetensors"))
        content = bytearray(filesystem_of(uri).cat_file(f"s3://{shard}"))
        content[-1] ^= 1
        filesystem_of(uri).pipe_file(f"s3://{shard}", bytes(content))
        MlflowClient(world.mlflow.uri).set_terminated(record.mlflow_run, "FAILED")
        broken, _ = broken_promises(world, reference)
        assert any(Path(shard).name in why for why in broken), broken
        assert any("MLflow FAILED" in why for why in broken), broken
