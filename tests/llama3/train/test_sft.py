"""A stage of conversations in the trainer: what its loss means, and that no restart or number of processes shows."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from llama3.model.files import load_model
from llama3.recipe.base import DOMAINS
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from llama3.tokens.batch import Batches
from llama3.tokens.conversations import ConversationStream, prepare_conversations
from llama3.tokens.stream import TokenStream
from llama3.tokens.tokenizer import Tokenizer
from tests.dist import run
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

SEQ = 32
CODER = Tokenizer([bytes([value]) for value in range(256)])


def tuned(folder: Path, **more: Any) -> Recipe:
    """Two steps of documents, then eight of conversations, a quarter of the sequences replayed."""
    rows = [{"prompt": "q", "response": chr(97 + n % 26) * (1 + n % 5)} for n in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = {"name": "chat", "kind": "sft", "for": f"{8 * STEP} tokens", "seq_len": SEQ, "mix": "base", "replay": "25%"}
    fields: dict[str, Any] = {"stages": [*documents(2), chat | {"lr": "linear from 1e-2 to 0"}]}
    fields["conversations"] = [{"uri": str(folder / "chats.jsonl")}]
    return recipe(**{**fields, **more})


def chat_job(folder: Path, name: str, asked: Recipe, parent: Path | None, **more: Any) -> Path:
    chats = folder / "chats"
    if not chats.exists():
        chats.mkdir()
        prepare_conversations(asked, CODER, chats)
    return job(folder, asked, "chat", name, conversations=chats, parent=parent, **more)


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
    batch = batches(folder).sequences(2 * STEP, SEQ, 0, STEP // SEQ)
    with torch.no_grad():
        model = load_model(folder / "main" / "result" / "model")
        nll = model(batch.tokens_BS, batch.documents_BS, batch.targets_BS)
    is_target = batch.targets_BS != -100
    assert first.metrics["train/loss"] == pytest.approx((nll.sum() / is_target.sum()).item(), rel=1e-12)
    chats = batch.domains_BS == len(DOMAINS)
    mean = nll[chats].sum() / is_target[chats].sum()
    assert first.metrics["train/loss/conversations"] == pytest.approx(mean.item(), rel=1e-12)
    assert first.metrics["train/target_tokens"] == is_target.sum()
    assert is_target.sum() < STEP / 2 < chats.sum()


def test_metrics_say_what_was_read(folder: Path) -> None:
    last = records(folder / "chat.json")[-1].metrics
    assert last["data/fraction/conversations"] == last["data/target_fraction/conversations"] == 0.75
    assert sum(last[f"data/fraction/{domain}"] for domain in DOMAINS) == pytest.approx(0.25)
    stream = batches(folder).stream
    assert isinstance(stream, ConversationStream)
    assert last["data/epochs/conversations"] == 8 * STEP // SEQ * 0.75 / stream.sequences_per_epoch
    assert "train/target_tokens" not in records(folder / "main.json")[-1].metrics
    rates = [record.metrics["train/lr"] for record in records(folder / "chat.json")]
    assert rates == pytest.approx([1e-2 * (1 - step / 8) for step in range(8)])


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


def test_two_processes_equal_one(folder: Path) -> None:
    path = chat_job(folder, "pair", tuned(folder), state(folder))
    assert run(2, train, path) == [0, 0]
    one = losses(folder / "chat.json")
    assert losses(path).keys() == one.keys()
    for position, values in losses(path).items():
        assert values == pytest.approx(one[position], rel=1e-9), f"position {position}"


@pytest.mark.slow
def test_other_data_or_another_past_is_refused(folder: Path) -> None:
    """A stage in progress does not go on with another length, share of replay or set of conversations."""
    path = chat_job(folder, "changed", tuned(folder), state(folder))
    with pytest.raises(RuntimeError, match="died"):
        run(1, train_until_signal, path, signal.SIGKILL, "torch.optim:AdamW.step", 5, True)
    plain = tuned(folder).model_dump(mode="json", by_alias=True)
    for field, value in (("replay", "10%"), ("for", f"{9 * STEP} tokens")):
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
