"""A stage of conversations in the trainer: what its loss means, and that neither restart nor layout shows."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from herd.llama3.model.files import load_model
from herd.llama3.parallel.comms import cp_positions
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.conversations import ConversationStream, prepare_conversations
from herd.llama3.tokens.stream import TokenStream
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.llama3.train.averaging import FILE, Choice
from herd.llama3.train.data_loader import Batches
from herd.llama3.train.journal import read_attempts
from herd.llama3.train.validation import pack_sequences
from tests.dist import run
from tests.llama3.train.test_validation import Bytes
from tests.llama3.train.test_validation import documents as held_out
from tests.llama3.train.train_samples import (
    STEP,
    job,
    losses,
    output,
    recipe,
    records,
    train,
    train_until_signal,
    weights,
    work,
)
from tests.llama3.train.train_samples import stages as documents

SEQ, BATCH, STEPS = 64, 128, 8
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2-cp2-pp2": (8, {"tp": 2, "cp": 2, "pp": 2}),
}
CODER = Tokenizer([bytes([value]) for value in range(256)])


def tuned(folder: Path, **more: Any) -> Recipe:
    """Two steps of documents, then eight of conversations, a quarter of the sequences replayed.

    Two short conversations share a sequence; a long one has its answer at the end.
    """
    rows = [{"prompt": "q" * (1 if n % 3 else 31), "response": chr(97 + n % 26) * (1 + n % 5)} for n in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = {"name": "chat", "kind": "sft", "for": f"{STEPS * BATCH} tokens", "seq_len": SEQ, "batch": f"{BATCH} tokens"}
    chat |= {"mix": "base", "replay": "25%", "lr": "linear from 1e-2 to 0", "weight_averaging": "ema 0.7"}
    model = {"layers": 2, "dim": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "max_seq_len": SEQ}
    fields: dict[str, Any] = {"stages": [*documents(2), chat], "model": model}
    fields["evaluate"] = {"val_interval": f"{3 * BATCH} tokens"}
    fields["conversations"] = [{"uri": str(folder / "chats.jsonl")}]
    fields["curate"] = {"validation_fraction": "0%"}
    return recipe(**{**fields, **more})


def chat_job(folder: Path, name: str, asked: Recipe, parent: Path | None, **more: Any) -> Path:
    chats = folder / "chats"
    if not chats.exists():
        chats.mkdir()
        prepare_conversations(asked, CODER, chats)
    path = job(folder, asked, "chat", name, conversations=chats, parent=parent, **more)
    work(path).mkdir(exist_ok=True)
    pack_sequences(held_out(), Bytes(), 16).write(work(path))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stage of documents, trained once, and the stage of conversations after it."""
    folder = tmp_path_factory.mktemp("sft")
    asked = tuned(folder)
    assert run(1, train, job(folder, asked, name="main")) == [0]
    assert run(1, train, chat_job(folder, "chat", asked, state(folder))) == [0]
    return folder


def state(folder: Path) -> Path:
    return folder / "main" / "result" / "state"


def batches(folder: Path) -> Batches:
    asked = tuned(folder)
    documents = TokenStream(folder / "tokens", asked)
    return Batches(ConversationStream(folder / "chats", documents, Schedule(asked).span("chat")))


def test_loss_is_the_mean_over_targets(folder: Path) -> None:
    """The first loss is that of the weights before, over the targets of conversations and replayed documents."""
    first = records(folder / "chat.json")[0]
    batch = batches(folder).sequences(2 * STEP, SEQ, 0, BATCH // SEQ)
    with torch.no_grad():
        model = load_model(folder / "main" / "result" / "model")
        nll = model(batch.tokens_BS, batch.documents_BS, batch.targets_BS)
    is_target = batch.targets_BS != -100
    assert first.metrics["train/loss"] == pytest.approx((nll.sum() / is_target.sum()).item(), rel=1e-12)
    chats = batch.domains_BS == len(DOMAINS)
    mean = nll[chats].sum() / is_target[chats].sum()
    assert first.metrics["train/loss/conversations"] == pytest.approx(mean.item(), rel=1e-12)
    assert first.metrics["train/target_tokens"] == is_target.sum()
    assert is_target.sum() < BATCH / 2 < chats.sum()


def test_metrics_say_what_was_read(folder: Path) -> None:
    last = records(folder / "chat.json")[-1].metrics
    assert last["data/fraction/conversations"] == last["data/target_fraction/conversations"] == 0.75
    assert sum(last[f"data/fraction/{domain}"] for domain in DOMAINS) == pytest.approx(0.25)
    stream = batches(folder).stream
    assert isinstance(stream, ConversationStream)
    assert last["data/epochs/conversations"] == STEPS * BATCH // SEQ * 0.75 / stream.sequences_per_epoch
    assert "train/target_tokens" not in records(folder / "main.json")[-1].metrics
    rates = [record.metrics["train/lr"] for record in records(folder / "chat.json")]
    assert rates == pytest.approx([1e-2 * (1 - step / STEPS) for step in range(STEPS)])


def test_it_learns_to_answer(folder: Path) -> None:
    values = [record.metrics["train/loss/conversations"] for record in records(folder / "chat.json")]
    assert values[-1] < values[0] - 0.3


def test_killed_and_resumed_it_gives_the_same_bits(folder: Path) -> None:
    path = chat_job(folder, "killed", tuned(folder), state(folder))
    with pytest.raises(RuntimeError, match="died"):
        run(1, train_until_signal, path, signal.SIGKILL, "torch.optim:AdamW.step", 5, True)
    assert run(1, train, path) == [0]
    assert losses(path) == losses(folder / "chat.json")
    assert weights(path) == weights(folder / "chat.json")
    assert any("recovery/restarts" in record.metrics for record in records(path))


def test_the_data_hold_what_a_layout_could_get_wrong(folder: Path) -> None:
    """Conversations that share a sequence, unequal numbers of targets, and context-parallel ranks without any."""
    shared = uneven = empty = 0
    for step in range(STEPS):
        batch = batches(folder).sequences(2 * STEP + step * BATCH, SEQ, 0, BATCH // SEQ)
        is_target = batch.targets_BS != -100
        by_row = is_target.sum(1)
        shared += int((batch.documents_BS[batch.domains_BS[:, 0] == len(DOMAINS)] > 1).any())  # two, and padding
        uneven += int(by_row[0] != by_row[1])
        empty += not is_target[:, cp_positions(SEQ, 2)[1]].any()
    assert shared > 1
    assert uneven > STEPS / 2
    assert empty > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "-" in name else name for name in LAYOUTS]
)
def test_any_layout_trains_as_one_process(name: str, folder: Path) -> None:
    """To rounding in float64: every metric that is no measurement of time or memory, and the average of the weights.

    Speed is that of all processes together, and each of them costs its time.
    """
    size, layout = LAYOUTS[name]
    path = chat_job(folder, name, tuned(folder), state(folder), layout=layout, micro_batch=1)
    assert run(size, train, path) == [0] * size, output(path)
    measured = ("time/", "throughput/", "memory/", "cost/")
    for mine, one in zip(records(path), records(folder / "chat.json"), strict=True):
        found, expected = (
            {key: value for key, value in record.metrics.items() if not key.startswith(measured)}
            for record in (mine, one)
        )
        assert found == pytest.approx(expected, rel=1e-11), mine.position
        speed = mine.metrics["throughput/tokens_per_s"]
        assert speed * mine.metrics["time/step_s"] == pytest.approx(BATCH)
        assert mine.metrics["throughput/tokens_per_s_per_device"] == pytest.approx(speed / size)
    assert {len(record.metrics.keys() & {"val/bpb", "val/bpb/code"}) for record in records(path)} == {0, 2}
    (attempt,) = read_attempts(work(path))
    seconds = records(path)[-1].time - attempt["time"]
    assert records(path)[-1].metrics["cost/gpu_hours"] == pytest.approx(size * seconds / 3600, rel=0.05)
    choices = [Choice.model_validate_json((of / "result" / FILE).read_text()) for of in (work(path), folder / "chat")]
    assert choices[0].kept == choices[1].kept == "average"
    assert choices[0].average == pytest.approx(choices[1].average, rel=1e-10)
    assert choices[0].last == pytest.approx(choices[1].last, rel=1e-10)
    expected_weights = load_model(folder / "chat" / "result" / "model").state_dict()
    for weight, value in load_model(work(path) / "result" / "model").state_dict().items():
        assert torch.allclose(value, expected_weights[weight], rtol=1e-9, atol=1e-11), weight


@pytest.mark.slow
def test_other_data_or_another_past_is_refused(folder: Path) -> None:
    """A stage in progress does not go on with another length, share of replay or set of conversations."""
    path = chat_job(folder, "changed", tuned(folder), state(folder))
    with pytest.raises(RuntimeError, match="died"):
        run(1, train_until_signal, path, signal.SIGKILL, "torch.optim:AdamW.step", 5, True)
    plain = tuned(folder).model_dump(mode="json", by_alias=True)
    for field, value in (("replay", "10%"), ("for", f"{9 * BATCH} tokens")):
        changed = {**plain, "stages": [plain["stages"][0], {**plain["stages"][1], field: value}]}
        again = chat_job(folder, "changed", Recipe.model_validate(changed), state(folder))
        assert run(1, train, again) == [2]
        assert f"stages.chat.{field}: decided the first" in output(again)
    moved = Recipe.model_validate({**plain, "conversations": [{"uri": os.fspath(folder / "other.jsonl")}]})
    again = chat_job(folder, "changed", moved, state(folder))
    assert run(1, train, again) == [2]
    assert "conversations.0.uri: decided the first" in output(again)
    assert work(again).exists()


def test_a_job_without_conversations_is_refused(folder: Path) -> None:
    path = job(folder, tuned(folder), "chat", "lacking", parent=state(folder))
    assert run(1, train, path) == [2]
    assert "trainer: conversations: stage chat is of kind sft; name the folder" in output(path)
