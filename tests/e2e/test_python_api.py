"""`import herd`: the blocks of docs/tutorials/from-python.md and the notebook as printed, on the tiny recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import herd as package
from tests.dist import Forked
from tests.e2e.conftest import Herd, NewHerd, copy_artifacts

PAGE = Path("docs/tutorials/from-python.md")
NOTEBOOK = Path("docs/tutorials/two-runs.ipynb")


def program(herd: Herd, *numbers: int) -> str:
    """Return blocks of the page, with the tiny recipe and its run in place of the quickstart's."""
    text = PAGE.read_text().replace('"quickstart"', repr(herd.recipe))
    text = text.replace("quickstart-1", "tiny-1").replace("quickstart@champion", "tiny@champion")
    blocks = re.findall(r"```python\n(.*?)```\n", text, re.DOTALL)
    assert len(blocks) == 5
    return "\n".join(["import herd", *(blocks[number] for number in numbers)])


def printed_by(herd: Herd, code: str, folder: Path) -> str:
    """Run `code` in a process of its own, in `folder`; return what it prints."""
    process = Forked("-c", code, environment={**herd.environment, "PREFECT_API_URL": herd.api}, folder=folder)
    printed, _ = process.communicate(timeout=560)
    assert process.returncode == 0, printed
    return printed


def test_a_program_reads_plans_runs_and_models(herd: Herd, tmp_path: Path) -> None:
    code = program(herd, 0, 3, 4) + "\nprint(run.record.verdict, run.recipe.name, run.model.is_dir(), len(losses))"
    printed = printed_by(herd, code, tmp_path)
    assert "98,304 tokens" in printed
    assert "main 16384 81920" in printed
    assert re.search(r"loss 6\.\d\d at 1,024 tokens, [45]\.\d\d at 98,304", printed)
    assert "'eval/bpb': " in printed
    assert "'eval/arithmetic': " in printed.splitlines()[-2]
    assert printed.splitlines()[-1] == "promoted tiny True 56"
    with pytest.raises(ValueError, match=r"^key: tiny-1 has no metric 'train/los'; did you mean 'train/loss'\? it has"):
        package.open_run("tiny-1", root=herd.root).metrics("train/los")


@pytest.mark.slow
def test_a_program_runs_a_recipe_and_plans_for_a_cluster(new_herd: NewHerd, herd: Herd, tmp_path: Path) -> None:
    """The second run reuses every artifact of the first, whose data the session's run made."""
    made, folder = new_herd(tmp_path / "root"), tmp_path / "folder"
    folder.mkdir()
    copy_artifacts(herd, made.root)
    printed = printed_by(made, program(made, 2, 2, 1), folder)
    assert re.findall(r"^tiny-\d .*", printed, re.MULTILINE) == ["tiny-1 finished promoted", "tiny-2 finished promoted"]
    assert re.search(r"^\d+ days, \d+\.\dM GPU-hours$", printed, re.MULTILINE), printed
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_the_notebook_runs_as_printed(new_herd: NewHerd, herd: Herd, tmp_path: Path) -> None:
    """Its kernel has a running event loop, in which Prefect's flows and the progress must work."""
    import nbformat
    from nbclient import NotebookClient

    made, folder = new_herd(tmp_path / "root"), tmp_path / "folder"
    folder.mkdir()
    copy_artifacts(herd, made.root)
    notebook = nbformat.reads(NOTEBOOK.read_text().replace('\\"quickstart\\"', f"'{herd.recipe}'"), as_version=4)
    client = NotebookClient(notebook, timeout=560, resources={"metadata": {"path": str(folder)}})
    client.execute(env={**made.environment, "PREFECT_API_URL": made.api})
    cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    printed = ["".join(p.get("text") or p.get("data", {}).get("text/plain", "") for p in outputs) for outputs in cells]
    assert "98,304 tokens" in printed[0]
    assert printed[1].splitlines()[-1] == "tiny-1 promoted"
    assert "evaluate-main" in printed[1], "the progress of the steps"
    assert "tok/s" in printed[1], "and of the training"
    assert re.search(r"^main +reused ", printed[2], re.MULTILINE)
    assert re.search(r"^anneal +created ", printed[2], re.MULTILINE)
    assert "image/png" in cells[3][-1].data
    assert "'eval/bpb'" in printed[4]
    assert printed[5]
    assert all(not cell.outputs and cell.execution_count is None for cell in nbformat.read(NOTEBOOK, 4).cells[1::2])


def test_wrong_names_say_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tiny-99"):
        package.open_run("tiny-99", root=tmp_path)
    with pytest.raises(
        AttributeError, match="'herd' has no attribute 'train'; it has LoadedModel, Recipe, Run, evaluate"
    ):
        _ = package.train
    assert dir(package) == sorted([*package.__all__, "__version__"])


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda root: package.load_model(root, dtype="fp16"), "dtype: 'fp16' is unknown; write bf16 or fp32"),
        (lambda root: package.load_model(root, device="cuda:9"), r"device: 'cuda:9' cannot be used .*; write cpu"),
        (lambda root: package.load_model(root, device="gpu"), r"device: 'gpu' cannot be used .*; write cpu"),
        (lambda root: package.evaluate(root, ["quick"], limit=0), "limit: 0 is below 1; write 1 or more, or None"),
        (lambda root: package.evaluate(root, ["quick"], shots=-1), "shots: -1 is below 0; write 0 or more, or None"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(call: Callable[[Path], object], fault: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=fault):
        call(tmp_path)


def test_a_single_text_is_a_list_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def stand_in(*arguments: object, **_: object) -> None:
        seen.append(arguments)
        raise KeyError

    loaded = package.load_recipe("quickstart", "seed=7")
    assert loaded.seed == 7
    model = package.LoadedModel(None, None)  # type: ignore[arg-type]
    for name in ("tasks.plan.cluster.plan_on_cluster", "llama3.evaluate.generate.generate"):
        monkeypatch.setattr(f"herd.{name}", stand_in)
    monkeypatch.setattr("herd.llama3.evaluate.suite.render_suites", stand_in)
    monkeypatch.setattr("herd.api.plan", lambda *_, **__: None)
    for gpus in (8, "8192", ["main=4", 8]):
        with pytest.raises(KeyError):
            package.plan_on_cluster(loaded, "roce-24k", gpus)  # type: ignore[arg-type]
    for call in (lambda: package.generate(model, "Hi", stop="Answer"), lambda: package.evaluate(model, "quick")):
        with pytest.raises(KeyError):
            call()
    assert [arguments[2] for arguments in seen[:3]] == [["8"], ["8192"], ["main=4", "8"]]
    assert seen[3][-1] == ["Answer"]
    assert seen[4][0] == ["quick"]
