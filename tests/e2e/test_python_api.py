"""`import herd`: the blocks of docs/tutorials/from-python.md as printed, on the tiny recipe and its run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import herd as package
from tests.dist import Forked
from tests.e2e.conftest import Herd, NewHerd, copy_artifacts

PAGE = Path("docs/tutorials/from-python.md")


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


def test_wrong_names_say_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tiny-99"):
        package.open_run("tiny-99", root=tmp_path)
    with pytest.raises(
        AttributeError, match="'herd' has no attribute 'train'; it has LoadedModel, Recipe, Run, evaluate"
    ):
        _ = package.train
    assert set(package.__all__) < set(dir(package))
