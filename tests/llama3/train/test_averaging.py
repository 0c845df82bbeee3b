"""Averages of a stage's weights: what each rule is, under any layout and restart, and which weights the stage keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from herd.llama3.evaluate.held_out import ValidationDocument
from herd.llama3.model import files
from herd.llama3.model.files import CheckpointModel
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Average
from herd.llama3.train import metrics
from herd.llama3.train.averaging import FILE, Choice, average_positions
from herd.llama3.train.checkpoint.dcp import save_state
from herd.llama3.train.checkpoint.manager import load_state
from herd.llama3.train.checkpoint.manifest import CheckpointManifest
from herd.llama3.train.journal import read_journal
from herd.llama3.train.state import FP32_SUM_TERMS, Precision, TrainState
from herd.llama3.train.validation import pack_sequences
from tests.dist import run
from tests.llama3.train.checkpoint_samples import ALONE
from tests.llama3.train.test_validation import SEQ, Bytes, documents
from tests.llama3.train.train_samples import STEP, job, output, recipe, stages, train, work

STEPS = 5


def asked(average: str, **more: Any) -> Recipe:
    saving = {"every": f"{STEP} tokens", "keep": {"last": 9}}
    return recipe(stages=[stages(STEPS)[0] | {"weight_averaging": average, **more}], checkpoint=saving)


def many() -> list[ValidationDocument]:
    """Return eight documents a domain."""
    return [
        ValidationDocument(f"{each.id}-{number}", each.domain, f"{each.text} {number}")
        for number in range(4)
        for each in documents()
    ]


def trained(folder: Path, average: str, held: bool = True, **more: Any) -> Path:
    path = job(folder, asked(average, **more), micro_batch=4)
    if held:
        work(path).mkdir(exist_ok=True)
        pack_sequences(many(), Bytes(), SEQ).write(work(path))
    assert run(1, train, path) == [0], output(path)
    return path


def parts(path: Path) -> list[dict[str, torch.Tensor]]:
    """Return the weights after every step."""
    saved = [work(path) / "checkpoints" / f"{step * STEP:018}" for step in range(1, STEPS)]
    return [dict(CheckpointModel(state)) for state in [*saved, work(path) / "result" / "state"]]


def model(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(work(path) / "result" / "model" / "model.safetensors")
    return found


def choice(path: Path) -> Choice:
    return Choice.model_validate_json((work(path) / "result" / FILE).read_text())


def test_an_average_is_written_as_it_is_read_and_nothing_else_is_one() -> None:
    for text in ("last 8", "polyak", "ema 0.99"):
        assert str(Average.parse(text)) == text
    assert Average.parse(8) == Average.parse("last 8")
    for wrong in ("last 1", "ema 1", "ema 0.0", "ema -0.5", "mean", "1", None, ""):
        with pytest.raises(ValueError, match="is not an average: write 'last 8'"):
            Average.parse(wrong)


@pytest.fixture(scope="module")
def polyak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("polyak"), "polyak")


def test_polyak_is_the_mean_over_every_step(polyak: Path) -> None:
    every = parts(polyak)
    for name, value in model(polyak).items():
        torch.testing.assert_close(value, sum(part[name] for part in every) / STEPS, rtol=1e-13, atol=1e-18)


def test_a_checkpoint_is_read_with_few_of_its_files_open(polyak: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of 16K processes are more than a process may map; their headers are read once."""
    state, opened = work(polyak) / "result" / "state", list[Path]()
    whole, names = dict(CheckpointModel(state)), sorted(path.name for path in state.glob("*.safetensors"))
    assert len(names) > 2

    def counted(path: Path) -> Any:
        opened.append(path)
        return safe_open(path, framework="pt")

    monkeypatch.setattr(files, "_open", counted)
    assert dict(CheckpointModel(state, "average.")).keys() == whole.keys()
    assert sorted(path.name for path in opened) == names

    monkeypatch.setattr(files, "OPEN_FILES", 2)
    saved = CheckpointModel(state)
    for name, tensor in saved:
        assert torch.equal(tensor, whole[name])
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(state) in line}
        assert len(mapped) <= 2


def test_a_mean_over_many_steps_is_exact() -> None:
    """In fp32, each of these additions would be rounded to multiples of 2**-4."""
    state = TrainState(recipe(precision="fp32"), 64, Precision(torch.float32), ALONE, 0)
    state.fill(lambda _, shape: torch.full(shape, 0.02), ALONE)
    state.make_average(2**20)
    for total in state.sum.values():
        total.fill_(2**20)
    for _ in range(100):
        state.add_to_average()
    assert all((total.double() - (2**20 + 2.0)).abs().max() < 1e-6 for total in state.sum.values())
    assert state.averaged == 2**20 + 100


def test_a_long_sum_goes_on_in_fp64_also_one_of_an_earlier_version(tmp_path: Path) -> None:
    """Earlier versions kept every sum in the weights' own precision."""
    now, before = (TrainState(recipe(precision="fp32"), 64, Precision(torch.float32), ALONE, 0) for _ in range(2))
    before.fill(lambda _, shape: torch.full(shape, 0.5), ALONE)
    before.make_average(FP32_SUM_TERMS - 2)
    before.add_to_average()
    assert {total.dtype for total in before.sum.values()} == {torch.float32}
    before.add_to_average()
    assert {total.dtype for total in before.sum.values()} == {torch.float64}
    before.sum = {name: total.float() for name, total in before.sum.items()}
    save_state(tmp_path / "saved", before, "main", ALONE)
    load_state(tmp_path / "saved", CheckpointManifest.read(tmp_path / "saved"), now, ALONE)
    assert now.averaged == FP32_SUM_TERMS
    assert all((total == 1.0).all() and total.dtype == torch.float64 for total in now.sum.values())


def test_the_average_is_judged_against_its_parts(tmp_path: Path) -> None:
    path = trained(tmp_path, "last 3")
    found = choice(path)
    journal = {record.position: record.metrics for record in read_journal(work(path) / "journal.jsonl")}
    assert found.by_position == {place * STEP: journal[place * STEP][metrics.HELD_OUT] for place in (2, 4, 5)}
    assert found.last == found.by_position[STEPS * STEP]
    assert found.kept == "average"
    assert found.average is not None
    assert found.average != found.last
    assert str(found) in output(path)
    every = parts(path)
    averaged = [every[step - 1] for step in (2, 4, 5)]
    for name, value in model(path).items():
        torch.testing.assert_close(value, sum(part[name] for part in averaged) / 3, rtol=1e-14, atol=1e-18)


def test_the_better_weights_are_kept(polyak: Path, tmp_path: Path) -> None:
    """Early weights of a short stage are so bad that their mean is worse than the end."""
    path = trained(tmp_path, "polyak", select="best")
    found = choice(path)
    assert found.average is not None
    assert found.last is not None
    assert found.last < found.average
    assert found.kept == "last"
    last = parts(path)[-1]
    assert all(torch.equal(value, last[name]) for name, value in model(path).items())
    assert found.low is not None
    assert found.low > 0
    assert choice(polyak).average == found.average
    assert choice(polyak).kept == "average"


def test_the_last_weights_are_kept_only_if_the_documents_show_that_they_are_better(tmp_path: Path) -> None:
    path = trained(tmp_path, "last 2", select="best")
    found = choice(path)
    assert found.low is not None
    assert found.high is not None
    assert found.average is not None
    assert found.last is not None
    assert found.low <= found.average - found.last <= found.high
    assert (found.kept == "last") == (found.low > 0)
    assert f"(average - last: 95% {found.low:.4f} to {found.high:.4f})" in output(path)


def test_without_held_out_documents_the_average_is_kept_and_said(tmp_path: Path) -> None:
    path = trained(tmp_path, "last 3", held=False)
    assert choice(path) == Choice(rule="last 3", kept="average")
    assert "no held-out document was scored" in output(path)


def test_positions_are_spread_evenly_and_end_with_the_stage() -> None:
    for count, steps in ((2, [3, 5]), (3, [2, 4, 5]), (9, [1, 2, 3, 4, 5])):
        span = Schedule(asked(f"last {count}")).span("main")
        assert average_positions(span) == [step * STEP for step in steps]
