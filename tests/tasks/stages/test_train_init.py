"""A run that goes on from a checkpoint: the same bits as in one run, and refused where it does not fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.recipe.load import RecipeError, parse_recipe, resolved
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.tokenizer import TEMPLATE_FILE, Tokenizer
from herd.storage.artifact import Artifact, ArtifactSpec
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import TerminalConsole
from herd.tasks.models.card import make_card
from herd.tasks.models.start import init_from_faults
from herd.tasks.operate.preflight import check_run
from herd.tasks.pipeline_steps import next_step, step_names
from herd.tasks.plan.recipe import make_plan, stage_rows, summary_lines
from herd.tasks.report.progress import run_work_dir_name, training_step
from herd.tasks.runs.records import Runs, StepRecord
from herd.tasks.stages.train import init_weights, train_stage
from herd.tasks.step import Context
from herd.tasks.tracking.mlflow import MLflowTracker
from tests.agents import shared_agents
from tests.llama3.train.train_samples import STEP, VOCAB_SIZE, recipe, write_tokens

CODER = Tokenizer([bytes([byte]) for byte in range(256)])
MAIN = 12 * STEP
"""Position at which the stage `main` ends."""


class Workspace:
    """A root with token shards and a tokenizer, on which runs train for real."""

    def __init__(self, folder: Path) -> None:
        self.root = Root.parse(folder)
        self.store, self.runs = open_store(self.root), Runs(self.root)
        self.tokens = self._commit(ArtifactSpec("tokens", "tiny", 1, {}, {}), lambda at: write_tokens(at, asked()))
        self.tokenizer = self._commit(ArtifactSpec("tokenizer", "tiny", 1, {}, {}), CODER.save)

    def _commit(self, design: ArtifactSpec, write: Any) -> Artifact:
        with self.store.staging() as folder:
            write(folder)
            return self.store.commit(design, folder, {"digest": CODER.digest}, "a test", "c0de", 1.0)

    def begin(self, recipe_: Recipe) -> Context:
        """Return a new run that has its tokens."""
        record = self.runs.begin(recipe_, "c0de")
        for step, artifact in {"tokenizer": self.tokenizer, "tokenize": self.tokens}.items():
            record.steps[step] = StepRecord(artifact=artifact.label, outcome="reused")
        self.runs.save(record)
        tracker = MLflowTracker(self.root, recipe_.name)
        place, console = Cluster(threads=1), TerminalConsole()
        return Context(recipe_, place, self.store, self.runs, record, tracker, console, [], agents=shared_agents())

    def train(self, context: Context, stage: str, parent: Artifact | None) -> Artifact:
        return train_stage.fn(context, stage, self.tokens, self.tokenizer, parent, self.tokens)

    def faults(self, recipe_: Recipe) -> list[str]:
        return init_from_faults(self.store, self.runs, recipe_)


def asked(**changes: Any) -> Recipe:
    return recipe(**{"evaluate": {"val_interval": "never"}, **changes})


def going_on(origin: str, **changes: Any) -> Recipe:
    """Return the recipe that goes on behind `main`, under a name of its own so that nothing is found ready."""
    return asked(**{"name": "on", "init_from": {"path": origin, "format": "checkpoint", "after": "main"}, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, Artifact, Artifact]:
    """A run of both stages, with no interruption."""
    workspace = Workspace(tmp_path_factory.mktemp("start") / "root")
    context = workspace.begin(asked())
    main = workspace.train(context, "main", None)
    return workspace, main, workspace.train(context, "anneal", main)


Trained = tuple[Workspace, Artifact, Artifact]


@pytest.fixture(scope="module")
def went_on(trained: Trained) -> tuple[Context, Artifact]:
    """A run that goes on from the end of `main`."""
    workspace, _, _ = trained
    context = workspace.begin(going_on("tiny-1/main"))
    start = init_weights.fn(context, workspace.tokenizer)
    assert next_step(context.recipe, context.record.steps, False) == "collect"
    return context, workspace.train(context, "anneal", start)


def test_it_comes_to_the_very_model_of_the_uninterrupted_run(
    trained: Trained, went_on: tuple[Context, Artifact]
) -> None:
    _, main, anneal = trained
    context, again = went_on
    assert again.label != anneal.label
    assert context.record.steps["anneal"].outcome == "created"
    assert again.metadata["model_sha256"] == anneal.metadata["model_sha256"] != main.metadata["model_sha256"]
    assert (again.metadata["start"], again.metadata["end"]) == (MAIN, 20 * STEP)
    assert [span.name for span in Schedule(context.recipe).trained] == ["anneal"]
    assert Schedule(context.recipe).names == {"main", "anneal"}


def test_the_run_s_lineage_names_it(trained: Trained, went_on: tuple[Context, Artifact], tmp_path: Path) -> None:
    workspace, main, _ = trained
    context, again = went_on
    assert context.record.steps["init-weights"].artifact == main.label
    assert again.manifest.inputs["parent"] == main.key
    parts = context.store, context.recipe, context.record
    assert not run_work_dir_name(*parts, training_step(context.recipe, "anneal")).endswith("unknown")
    card = make_card(workspace.root, "on-1", again.path_of("model"), tmp_path, "hf", "bf16", "")
    assert card.digests["started from"] == "tiny-1/main"
    assert card.digests["started from, as an artifact"] == main.label
    assert card.training is not None
    assert card.training.tokens == 20 * STEP
    assert sum(line.tokens for line in card.training.mix) == 8 * STEP
    assert sum(line.planned for line in card.training.mix) == pytest.approx(1)


def test_a_label_names_it_as_well(trained: Trained) -> None:
    workspace, main, _ = trained
    assert workspace.faults(going_on(main.label)) == []
    check_run(going_on(main.label), Cluster(threads=1), workspace.root)
    assert init_weights.fn(workspace.begin(going_on(main.label)), workspace.tokenizer).key == main.key


def test_with_the_same_name_nothing_is_trained_again(trained: Trained) -> None:
    workspace, _, anneal = trained
    context = workspace.begin(going_on("tiny-1/main", name="tiny"))
    again = workspace.train(context, "anneal", init_weights.fn(context, workspace.tokenizer))
    assert (again.label, context.record.steps["anneal"].outcome) == (anneal.label, "reused")


def test_the_steps_are_those_that_are_taken() -> None:
    steps = step_names(going_on("tiny-1/main"))
    assert steps == ["collect", "annotate", "curate", "tokenizer", "tokenize", "anneal", "evaluate-anneal", "promote"]
    assert "init-weights" in step_names(asked(init_from={"path": "x"}, tokenizer={"use": "tokenizer.model"}))


def test_the_plan_says_what_is_not_trained() -> None:
    plan, whole = (make_plan(one, []) for one in (going_on("tiny-1/main"), asked()))
    assert [(row[0], row[6] == "not trained") for row in stage_rows(plan)] == [("main", True), ("anneal", False)]
    assert "start    from tiny-1/main; 2048 tokens are trained here" in [
        line.replace("2.048K", "2048") for line in summary_lines(plan)
    ]
    assert 0 < plan.flops()[0] < 0.5 * whole.flops()[0]


@pytest.mark.parametrize(
    ("origin", "changes", "fault"),
    [
        ("checkpoint/tiny-main-00000000", {}, r"init_from\.path: .*not found under"),
        ("tiny-9/main", {}, r"init_from\.path: 'tiny-9/main': run 'tiny-9' does not exist"),
        ("tiny-1/late", {}, r"init_from\.path: .*has not finished such a stage; it has tiny-1/main, tiny-1/anneal"),
        ("tiny-1/tokenize", {}, "has not finished such a stage"),
        ("tiny-1/anneal", {}, r"init_from\.after: 'main' ends at token 3,072, checkpoint/tiny-anneal-.* at 5,120; "
         r"write until: 5120 tokens there.*stages end: main at 3,072, anneal at 6,144"),
        ("tiny-1/main", {"model": {"layers": 3}}, r"init_from\.path: tiny-1/main has layers 2, model\.layers is 3"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_work(
    trained: Trained, origin: str, changes: dict[str, Any], fault: str
) -> None:
    workspace, _, _ = trained
    plain = resolved(going_on(origin))
    plain["model"] |= changes.get("model", {})
    plain["stages"][-1]["for"] = f"{12 * STEP} tokens"
    with pytest.raises(RecipeError, match=fault):
        check_run(parse_recipe(plain, "on.yaml"), Cluster(threads=1), workspace.root)


def test_the_stage_that_ends_there_is_named(trained: Trained) -> None:
    workspace, _, _ = trained
    stages = resolved(asked())["stages"]
    parts = [{**stages[0], "name": "first", "for": f"{6 * STEP} tokens"}, {**stages[0], "for": f"{6 * STEP} tokens"}]
    start = {"path": "tiny-1/main", "format": "checkpoint", "after": "first"}
    (fault,) = workspace.faults(asked(name="on", stages=[*parts, stages[1]], init_from=start))
    assert "at 3,072; write after: main (stages end: first at 1,536, main at 3,072" in fault


def test_another_tokenizer_is_refused(trained: Trained, tmp_path: Path) -> None:
    workspace, main, _ = trained
    other = Tokenizer([bytes([byte]) for byte in reversed(range(256))])
    other.save(tmp_path / "other")
    used = going_on("tiny-1/main", tokenizer={"use": str(tmp_path / "other" / "tokenizer.model")})
    (fault,) = workspace.faults(used)
    assert fault.startswith(f"tokenizer.use: gives a tokenizer with digest {other.digest[:12]}, but {main.label}")
    remedy = str(main.path_of("model/tokenizer.model"))
    assert f"write tokenizer: {{use: {remedy}}}" in fault
    assert workspace.faults(going_on("tiny-1/main", tokenizer={"use": remedy})) == []
    with workspace.store.staging() as folder:
        other.save(folder)
        made = workspace.store.commit(ArtifactSpec("tokenizer", "other", 1, {}, {}), folder, {}, "a test", "c0de", 1.0)
    with pytest.raises(RecipeError, match=r"tokenizer\.train: gives a tokenizer with digest"):
        init_weights.fn(workspace.begin(going_on("tiny-1/main")), made)


@pytest.mark.parametrize(
    ("start", "fault"),
    [
        ({"path": "x-1/main", "format": "checkpoint"}, "after is missing: write the stage of this recipe"),
        ({"path": "x", "after": "main"}, "only a checkpoint has a position; write format: checkpoint"),
        (
            {"path": "x-1/main", "format": "checkpoint", "after": "late"},
            r"init_from\.after: 'late' is not a stage; .* main, anneal",
        ),
        (
            {"path": "x-1/main", "format": "checkpoint", "after": "anneal"},
            "is the last stage, so there is nothing to train",
        ),
    ],
)
def test_a_start_that_says_too_little_is_refused(start: dict[str, str], fault: str) -> None:
    with pytest.raises(RecipeError, match=fault):
        parse_recipe(resolved(asked()) | {"init_from": start}, "on.yaml")


def test_rows_are_those_of_the_shards() -> None:
    assert CODER.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("chats", [False, True])
def test_imported_weights_chat_if_those_that_they_come_from_did(trained: Trained, tmp_path: Path, chats: bool) -> None:
    workspace, main, _ = trained
    folder = tmp_path / "model"
    shutil.copytree(main.path_of("model"), folder)
    if chats:
        (folder / TEMPLATE_FILE).write_text("{{ messages }}")
    start = {"path": str(folder), "format": "herd"}
    context = workspace.begin(
        asked(name=f"from-{chats}".lower(), init_from=start, tokenizer={"use": "tokenizer.model"})
    )
    made = init_weights.fn(context, workspace.tokenizer).path_of("model")
    assert (made / TEMPLATE_FILE).is_file() is chats
    assert Tokenizer.load(made).digest == Tokenizer.load(workspace.tokenizer.path).digest
