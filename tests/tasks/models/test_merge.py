"""A merge is a checkpoint with its parents: found, evaluated, judged and promoted as any other."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from herd.flows.run_lifecycle import find_checkpoint
from herd.llama3.model.files import open_model
from herd.llama3.tokens.tokenizer import MODEL_FILE, TEMPLATE_FILE
from herd.storage.processes import free_port
from herd.tasks.models import export
from herd.tasks.models.lookup import model_folder
from herd.tasks.models.merge import merge_checkpoints
from herd.tasks.promotion.log import PROMOTED, PromotionLog
from herd.tasks.stages import gate
from herd.tasks.stages.evaluate import evaluate_model
from herd.tasks.stages.gate import Override
from herd.tasks.stages.promote import append_decision
from tests.tasks.mlflow_server import use
from tests.tasks.promotion_workspace import PromotionWorkspace


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PromotionWorkspace:
    use(monkeypatch, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(gate, "evaluate_model", evaluate_model.fn)
    monkeypatch.setattr(export, "smoke_test", lambda folder: None)  # test_served_model.py has it
    return PromotionWorkspace(tmp_path, "promote.when={eval/bpb: better}")


def test_it_goes_through_the_gate(workspace: PromotionWorkspace) -> None:
    parents = [workspace.checkpoint(1), workspace.checkpoint(2)]
    merged = merge_checkpoints(workspace.context, parents, [3, 1])
    assert merged.metadata["merged"] == {parents[0].label: 0.75, parents[1].label: 0.25}
    assert {parent.key for parent in parents} < set(merged.manifest.inputs.values())
    folder = model_folder(workspace.root, merged.label)
    found, models = open_model(folder), [open_model(parent.path_of("model")) for parent in parents]
    for name in found.names():
        rows = [model.tensor(name).double().numpy() for model in models]
        assert np.array_equal(found.tensor(name).numpy(), np.average(rows, axis=0, weights=[3, 1]).astype(np.float32))
    target = find_checkpoint(workspace.root, merged.label)
    assert (target.checkpoint.label, target.record.name) == (merged.label, "quickstart-1")
    scored = evaluate_model.fn(workspace.context, target.stage, merged, workspace.curated)
    log = PromotionLog(workspace.root, "quickstart")
    decision = append_decision(workspace.context, log, merged, scored, workspace.curated, Override())
    assert (decision.kind, decision.artifact) == (PROMOTED, merged.label)
    assert model_folder(workspace.root, "quickstart@champion") == folder


def test_the_same_merge_is_made_once_and_another_beside_it(workspace: PromotionWorkspace) -> None:
    parents = [workspace.checkpoint(1), workspace.checkpoint(2)]
    first = merge_checkpoints(workspace.context, parents, [1, 1])
    assert merge_checkpoints(workspace.context, parents, [2, 2]).label == first.label
    other = merge_checkpoints(workspace.context, parents, [2, 1])
    assert other.label != first.label
    steps = [step.artifact for step in workspace.context.record.steps.values()]
    assert {first.label, other.label} < set(steps)


def test_models_that_differ_are_refused_and_nothing_is_left(workspace: PromotionWorkspace, tmp_path: Path) -> None:
    one = workspace.checkpoint(1)
    chats = workspace.checkpoint(2, lambda model: (model / TEMPLATE_FILE).write_text("{{ messages }}"))
    other = workspace.checkpoint(3, lambda model: (model / MODEL_FILE).write_text("bG8= 0\n"))
    before = {step.artifact for step in workspace.context.record.steps.values()}
    for parents, message in (
        ([one, chats], f"{chats.label} has a chat template and {one.label} has none; merge base models with base"),
        ([chats, one], f"{chats.label} has a chat template and {one.label} has none"),
        ([one, other], f"{other.label} has another tokenizer than {one.label}; merge models that share one"),
        ([one, one], f"{one.label} is named twice; give it a larger weight instead"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_checkpoints(workspace.context, parents, [1, 1])
    assert {step.artifact for step in workspace.context.record.steps.values()} == before
    shutil.rmtree(other.folder)
    with pytest.raises(ValueError, match="changed since it was committed"):
        merge_checkpoints(workspace.context, [one, other], [1, 1])
