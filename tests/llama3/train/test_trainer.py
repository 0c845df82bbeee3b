"""The trainer as a whole, each run in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from herd.llama3.model.files import load_model
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.tokens.stream import TokenStream
from herd.llama3.train.averaging import average_positions
from herd.llama3.train.callbacks import Callback, StepResult
from herd.llama3.train.data_loader import Batches, Step
from herd.storage.artifact import ArtifactSpec, Store
from tests.dist import run
from tests.llama3.train.train_samples import (
    STEP,
    VOCAB_SIZE,
    initial_digest,
    job,
    losses,
    output,
    recipe,
    records,
    stages,
    train,
    weights,
    work,
    write_tokens,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "tiny-loss.json"


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Both stages of the tiny recipe, trained once."""
    folder = tmp_path_factory.mktemp("chain")
    first = job(folder, name="main")
    second = job(folder, stage="anneal", name="anneal", parent=folder / "main" / "result" / "state")
    assert run(1, train, first) == [0]
    assert run(1, train, second) == [0]
    return first, second


def test_golden_losses(chain: tuple[Path, Path]) -> None:
    """To make the file again after an intended change: write `measured` into it and say why in the commit."""
    measured = {str(position): values for path in chain for position, values in losses(path).items()}
    golden = json.loads(GOLDEN.read_text())
    assert measured.keys() == golden.keys()
    for position, values in measured.items():
        assert values == pytest.approx(golden[position], rel=1e-9), f"position {position}"


def test_it_learns_and_the_journal_has_every_step(chain: tuple[Path, Path]) -> None:
    environment = json.loads((work(chain[1]) / "result" / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["processors"].isdigit()
    found = losses(chain[0]) | losses(chain[1])
    assert list(found) == [STEP * step for step in range(1, 21)]
    assert found[STEP][0] == pytest.approx(torch.log(torch.tensor(VOCAB_SIZE)).item(), rel=0.01)  # uniform at the start
    assert found[20 * STEP][0] < 0.8 * found[STEP][0]


def test_metrics_of_a_step(chain: tuple[Path, Path]) -> None:
    rates = Schedule(recipe())
    for record in records(chain[0]) + records(chain[1]):
        values = record.metrics
        assert values["train/lr"] == rates.lr_at(record.position - STEP)
        assert values["train/step"] * STEP == record.position
        assert values["train/seq_len"] == (16 if record.position <= 16 * STEP else 32)
        assert sum(values[f"data/fraction/{d}"] for d in ("general", "math", "code", "multilingual")) == pytest.approx(
            1
        )
        assert values["data/target_fraction/code"] == pytest.approx(0.17)
        assert values["throughput/tokens_per_s"] == pytest.approx(STEP / values["time/step_s"])
        assert 0 < values["time/data_wait_s"] < values["time/step_s"]
        assert 0 < values["time/goodput"] <= 1
        assert 0.05 < values["memory/host_gib"] < 8
        assert "throughput/mfu" not in values  # the peak of a CPU is not known
        assert "recovery/restarts" not in values
    assert records(chain[1])[-1].metrics["time/remaining_s"] == 0
    saved = [r.position for r in records(chain[0]) if "time/checkpoint_s" in r.metrics]
    assert saved == [4 * STEP, 7 * STEP, 10 * STEP]  # every 3 steps, told with the step after


def test_loss_is_the_mean_over_targets_and_domains_add_up(chain: tuple[Path, Path]) -> None:
    stream = TokenStream(work(chain[0]).parent / "tokens", recipe())
    for record in records(chain[0]):
        batch = Batches(stream).sequences(record.position - STEP, 16, 0, 16)
        counts = torch.bincount(batch.domains_BS[batch.targets_BS != -100], minlength=4).double()
        domains = [record.metrics.get(f"train/loss/{d}", 0.0) for d in ("general", "math", "code", "multilingual")]
        mean = (torch.tensor(domains, dtype=torch.float64) * counts).sum() / counts.sum()
        assert record.metrics["train/loss"] == pytest.approx(mean.item(), rel=1e-12)


def test_the_next_stage_goes_on_from_the_same_weights(chain: tuple[Path, Path]) -> None:
    """The first loss of the second stage is that of the first stage's model on the same tokens."""
    stream = TokenStream(work(chain[0]).parent / "tokens", recipe())
    batch = Batches(stream).sequences(12 * STEP, 16, 0, 16)
    with torch.no_grad():
        nll = load_model(work(chain[0]) / "result" / "model")(batch.tokens_BS, batch.documents_BS, batch.targets_BS)
    mean = nll.sum() / (batch.targets_BS != -100).sum()
    assert losses(chain[1])[13 * STEP][0] == pytest.approx(mean.item(), rel=1e-12)


def test_each_stage_says_the_longest_sequence_that_its_model_was_trained_on(chain: tuple[Path, Path]) -> None:
    """The recipe allows 64; a reader of the model takes what its folder says."""
    assert [load_model(work(path) / "result" / "model").config.max_seq_len for path in chain] == [16, 32]


def test_metrics_table_equals_the_journal(chain: tuple[Path, Path]) -> None:
    rows = pq.read_table(work(chain[1]) / "result" / "metrics.parquet").to_pylist()
    expected = [
        {"time": record.time, "position": record.position, "key": key, "value": value}
        for record in records(chain[1])
        for key, value in record.metrics.items()
    ]
    assert rows == expected


class Calls(Callback):
    """Keeps what the loop calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_step_start(self, step: Step, data_wait_s: float) -> None:
        self.calls.append(("start", step.start))

    def on_step_end(self, step: Step, result: StepResult) -> None:
        self.calls.append((result.decision.kind, step.end))

    def on_save_start(self) -> None:
        self.calls.append(("save", len(self.calls)))

    def on_train_end(self) -> None:
        self.calls.append(("train end", len(self.calls)))


def train_with_calls(path: Path, pipelined: bool) -> list[tuple[str, int]]:
    from herd.llama3.train.trainer import Trainer

    kept, setup = Calls(), Trainer.__init__

    def with_calls(self: Trainer, *arguments: Any) -> None:
        setup(self, *arguments)
        self.callbacks.insert(0, kept)
        self.pipelined = pipelined

    Trainer.__init__ = with_calls  # type: ignore[method-assign]
    assert train(path) == 0
    return kept.calls


def test_a_callback_sees_every_step_and_save(tmp_path: Path) -> None:
    (calls,) = run(1, train_with_calls, job(tmp_path, recipe(stages=stages(4))), False)
    steps = [call for n in range(4) for call in [("start", n * STEP), ("continue", (n + 1) * STEP)]]
    assert calls == [*steps[:6], ("save", 6), *steps[6:], ("train end", 9), ("save", 10)]


def test_a_device_gets_the_next_step_before_the_last_one_is_read_back_except_at_saves(tmp_path: Path) -> None:
    """As on a GPU, in its format. The journal, and so the losses, are those of a host that waits for each step."""
    asked = recipe(stages=stages(5), precision="bf16")
    waiting, pipelined = job(tmp_path, asked, name="waiting"), job(tmp_path, asked, name="pipelined")
    assert run(1, train, waiting) == [0]
    (calls,) = run(1, train_with_calls, pipelined, True)
    assert calls == [
        ("start", 0),
        ("start", STEP),
        ("continue", STEP),
        ("start", 2 * STEP),
        ("continue", 2 * STEP),
        ("continue", 3 * STEP),
        ("save", 6),
        ("start", 3 * STEP),
        ("start", 4 * STEP),
        ("continue", 4 * STEP),
        ("continue", 5 * STEP),
        ("train end", 11),
        ("save", 12),
    ]
    assert losses(pipelined) == losses(waiting)
    assert weights(pipelined) == weights(waiting)
    model = load_file(work(pipelined) / "result" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in model.values()} == {torch.float32}
    saved = [[r.position for r in records(path) if "time/checkpoint_s" in r.metrics] for path in (pipelined, waiting)]
    assert saved == [[4 * STEP]] * 2


def test_average_positions_are_even_and_all_of_a_shorter_stage() -> None:
    span = Schedule(recipe()).span("anneal")
    assert average_positions(span) == [15 * STEP, 18 * STEP, 20 * STEP]
    asked = recipe(stages=[stages(2)[0] | {"weight_averaging": 8}])
    assert average_positions(Schedule(asked).span("main")) == [STEP, 2 * STEP]


def test_initial_weights_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    path = job(tmp_path)
    assert run(1, initial_digest, path) * 2 == run(2, initial_digest, path)


@pytest.mark.slow
def test_equal_jobs_give_equal_bytes(tmp_path: Path, chain: tuple[Path, Path]) -> None:
    path = job(tmp_path)
    assert run(1, train, path) == [0]
    assert weights(path) == weights(chain[0])


@pytest.mark.parametrize("harm", ["bit", "cut", "index"])
@pytest.mark.fault("F3")
def test_changed_token_shards_are_refused_before_the_first_token(tmp_path: Path, harm: str) -> None:
    """As on a machine that did not look at them yet; the next look of every machine reads them again."""
    store, design = Store(tmp_path), ArtifactSpec("tokens", "tiny", 1, {}, {})
    with store.staging() as folder:
        tokens = store.commit(design, write_tokens(folder, recipe()), {}, "tiny-1", "c0de", 1.0).folder
    name = "tokens.json" if harm == "index" else "math/tokens-00000.bin"
    data = bytearray((tokens / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tokens / name).write_bytes(data[:-2] if harm == "cut" else data)
    path = job(tmp_path, tokens=tokens)
    assert run(1, train, path) == [2]
    assert f"trainer: artifact {design.label}: {name} changed since it was committed" in output(path)
    assert not (work(path) / "journal.jsonl").exists()
    assert not (tmp_path / ".verified" / design.label).exists()
