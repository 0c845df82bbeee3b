"""What a run would reuse, resume and make, from keys alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from herd.llama3.recipe.load import load_recipe
from herd.storage.artifact import Artifact, ArtifactSpec
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks import pipeline_steps as table
from herd.tasks.cluster import Cluster
from herd.tasks.pipeline_steps import StepKind, latest
from herd.tasks.plan.steps import plan_steps, steps_table
from herd.tasks.step import Context, WorkInProgress, ensure_artifact

RECIPE = load_recipe(Path("recipes/quickstart.yaml"))


def collected(seed: int = 1) -> ArtifactSpec:
    return ArtifactSpec("collected", RECIPE.name, 1, {"seed": seed}, {})


def curated(collected_key: str, jaccard: float = 0.8) -> ArtifactSpec:
    return ArtifactSpec("curated", RECIPE.name, 1, {"dedup": {"jaccard": jaccard}}, {"collected": collected_key})


def collect(context: Context) -> Artifact:
    return ensure_artifact(context, "collect", collected(), built)


def curate(context: Context, collected: Artifact) -> Artifact:
    work = WorkInProgress("curate", resumes=lambda: 7_000_000 if context.cluster.attempts == 2 else None)
    return ensure_artifact(context, "curate", curated(collected.key), built, work)


def judge(context: Context, curated: Artifact) -> None:
    raise AssertionError("nothing is decided")


def built(*_: object) -> dict[str, Any]:
    raise AssertionError("nothing is made")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """An empty root, and a pipeline of three steps."""
    kinds = (
        StepKind("collect", lambda: collect),
        StepKind("curate", lambda: curate, {"collected": latest("collect")}),
        StepKind("promote", lambda: judge, {"curated": latest("curate")}),
    )
    monkeypatch.setattr(table, "PIPELINE", kinds)
    return Root.parse(tmp_path / "root")


def commit(root: Root, spec: ArtifactSpec) -> Artifact:
    store = open_store(root)
    with store.staging() as folder:
        (folder / "file").write_text("text")
        return store.commit(spec, folder, {}, "quickstart-1", "code", 1.0)


def planned(root: Root, cluster: Cluster | None = None) -> list[tuple[str, str]]:
    return [(step.outcome, step.why) for step in plan_steps(RECIPE, root, cluster or Cluster())]


def test_an_empty_root_has_nothing_and_gets_nothing(root: Root) -> None:
    assert planned(root) == [
        ("new", "nothing of this name was made before"),
        ("new", "collect is new"),
        ("new", "curate is new"),
    ]
    assert not root.local.exists()


def test_the_first_difference_says_why_a_step_is_new(root: Root) -> None:
    first = commit(root, collected())
    commit(root, curated(first.key, jaccard=0.7))
    assert planned(root) == [
        ("reused", first.label),
        ("new", "dedup.jaccard 0.7 -> 0.8"),
        ("new", "curate is new"),
    ]


def test_what_exists_is_reused_and_judged_again(root: Root) -> None:
    second = commit(root, curated(commit(root, collected()).key))
    assert planned(root)[1:] == [("reused", second.label), ("new", "every run decides")]


def test_work_in_progress_is_resumed(root: Root) -> None:
    commit(root, collected())
    assert planned(root, Cluster(attempts=2))[1] == ("resumed at 7M", "nothing of this name was made before")


def test_a_damaged_artifact_is_not_reused_and_stays_where_it_is(root: Root) -> None:
    artifact = commit(root, collected())
    (artifact.folder / "file").unlink()
    assert planned(root)[0][0] == "new"
    assert artifact.folder.is_dir()


def test_a_file_that_cannot_be_read_leaves_the_rest_unknown(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(context: Context) -> Artifact:
        raise ValueError("sources.general.0.uri: s3://corpus/web does not answer\nmore")

    monkeypatch.setattr(table, "PIPELINE", (StepKind("collect", lambda: unreadable), *table.PIPELINE[1:]))
    assert planned(root) == [
        ("unknown", "sources.general.0.uri: s3://corpus/web does not answer"),
        ("unknown", "collect is unknown"),
        ("unknown", "curate is unknown"),
    ]


def test_the_table_shows_the_graph(root: Root) -> None:
    shown = steps_table(plan_steps(RECIPE, root, Cluster()))
    assert [[*column.cells] for column in shown.columns[:2]] == [
        ["collect", "curate", "promote"],
        ["", "collect", "curate"],
    ]
