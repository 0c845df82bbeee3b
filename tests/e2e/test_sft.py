"""The tiny champion learns to answer: from `init_from: tiny@champion` to an export that transformers talks to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from herd.llama3.model.files import load_model
from herd.llama3.tokens.chat import encode_chat
from herd.llama3.tokens.tokenizer import TEMPLATE_FILE, Tokenizer
from herd.storage.artifact import Store
from herd.storage.root import Root
from herd.tasks.promotion.log import read_log
from tests.e2e.conftest import Herd, record

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is 7 + 8?"}]


@pytest.fixture(scope="module")
def asked(herd: Herd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of the fine-tuning, beside conversations of both forms."""
    folder = tmp_path_factory.mktemp("chat")
    rows = [{"messages": [QUESTION[0], {"role": "assistant", "content": f"It is {n}."}]} for n in range(40)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = yaml.safe_load(Path(herd.recipe).read_text())
    data: dict[str, Any] = {name: plain[name] for name in ("sources", "curate", "mix", "model", "precision", "seed")}
    data |= {
        "name": "tiny-chat",
        "init_from": {"path": "tiny@champion", "format": "herd"},
        "tokenizer": {"use": "tiny@champion"},
        "conversations": [{"uri": "problems", "limit": 300, "license": "CC0"}, {"uri": str(folder / "chats.jsonl")}],
        "lr": {"peak": 3e-3, "warmup": "2 steps", "linear": {"to": 0, "over": "80Ki"}},
        "stages": [{"name": "chat", "kind": "sft", "for": "80Ki", "seq_len": 256, "batch": "2Ki", "mix": "base",
                    "replay": "20%"}],
        "checkpoint": {"every": "16Ki"},
        "evaluate": {"documents": 8, "questions": 20},
        "promote": {"when": {"eval/bpb": "no worse than 50%", "eval/sft/bpb": "better"}},
    }  # fmt: skip
    path = folder / "tiny-chat.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture(scope="module")
def printed(herd: Herd, asked: Path) -> str:
    return herd("run", str(asked))


def chat_checkpoint(herd: Herd) -> Any:
    return Store(herd.root).load(record(herd, "tiny-chat-1").steps["chat"].artifact)


def test_the_run_says_what_it_trains_on(herd: Herd, printed: str) -> None:
    assert "conversations with 20% base" in printed, "the plan's table"
    assert "chats    problems: 300 in" in printed
    assert "epochs   chat: about" in printed
    assert "sequences of 256" in printed
    assert "tiny-chat version 2 is the champion" in printed
    assert "herd serve tiny-chat-1" in printed
    run = record(herd, "tiny-chat-1")
    assert run.verdict == "promoted"
    facts = Store(herd.root).load(run.steps["conversations"].artifact).metadata
    assert facts["conversations"] + facts["held_out"] + facts["dropped"]["duplicate"] == 340
    assert facts["licenses"].keys() == {"CC0", "unknown"}
    metadata = chat_checkpoint(herd).metadata
    assert metadata["last_loss"] < metadata["first_loss"]


def test_the_model_is_compared_with_what_it_started_from(herd: Herd, printed: str) -> None:
    root = Root.parse(herd.root)
    imported, promoted = read_log(root, "tiny-chat")
    assert (imported.kind, imported.gate, imported.position) == ("imported", None, 0)
    assert imported.artifact == record(herd, "tiny-chat-1").steps["init-weights"].artifact
    assert imported.comment.startswith("training started from checkpoint/tiny-")
    assert (promoted.kind, promoted.champion) == ("promoted", imported.artifact)
    assert promoted.gate is not None
    assert all(row.champion is not None for row in promoted.gate.rows if not row.is_check)
    assert "compares with weights/tiny-chat-" in printed
    assert "imported" in herd("promotion-log", "tiny-chat")


def test_the_answers_held_out_are_scored(herd: Herd, printed: str) -> None:
    scores = Store(herd.root).load(record(herd, "tiny-chat-1").steps["evaluate-chat"].artifact)
    rows = {row["key"]: row for row in pq.read_table(scores.path / "scores.parquet").to_pylist()}
    assert 0 < rows["eval/sft/bpb"]["value"] < 8
    assert rows["eval/sft/bpb"]["n"] > 5
    assert "eval/sft/bpb" in (herd.root / "runs" / "tiny-chat-1" / "report.md").read_text()


def test_transformers_gives_the_same_ids_and_the_same_answer(herd: Herd, printed: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="package transformers is not installed")
    folder = tmp_path / "hf"
    herd("export", "tiny-chat@champion", str(folder), "--dtype", "fp32")
    model_folder = chat_checkpoint(herd).path / "model"
    assert (folder / TEMPLATE_FILE).read_text() == (model_folder / TEMPLATE_FILE).read_text()
    card = (folder / "README.md").read_text()
    for text in ("fine-tuned on conversations", "apply_chat_template", "conversations: problems", "CC0"):
        assert text in card
    ours, theirs = Tokenizer.load(model_folder), transformers.AutoTokenizer.from_pretrained(folder)
    ids = encode_chat(ours, QUESTION, True)
    assert theirs.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False) == ids
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert network.config.max_position_embeddings == 256, "what the last stage trained on; the recipe allows 512"
    assert network.generation_config.eos_token_id == [ours.end, theirs.convert_tokens_to_ids("<|eot_id|>")]
    import torch

    written = network.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40)[0, len(ids) :].tolist()
    assert written == greedy(load_model(model_folder, torch.float32), ids, len(written))


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Continue `ids` with the likeliest tokens, each from logits of the whole sequence."""
    import torch

    written: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            written.append(int(model(torch.tensor([[*ids, *written]]))[0, -1].argmax()))
    return written


def test_the_recipe_is_rehearsed(herd: Herd, asked: Path) -> None:
    """The champion that it starts from gives the tokenizer; conversations keep the length of their sequences."""
    # before the test that breaks a line of the conversations
    printed = herd("rehearse", str(asked))
    assert "nothing fails" in printed
    assert "built at full size: chat 2 layers, 160.1K parameters of rank 0" in printed
    assert "sequences of 256, " in printed
    assert "tokenize, conversations of a sample" in printed
    assert "a rank of chat was killed; attempt 2 went on from a checkpoint" in printed


def test_a_second_run_reuses_it_all_and_a_new_question_redoes_the_rest(herd: Herd, printed: str, asked: Path) -> None:
    assert "compares with weights/" not in herd("run", str(asked), "--fresh"), "the champion is another now"
    assert {step.outcome for step in record(herd, "tiny-chat-2").steps.values()} == {"reused"}
    with (asked.parent / "chats.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "Why?"}]}\n')
    fault = "conversations.1.uri: "
    assert fault in herd("run", str(asked), status=2)
    assert "chats.jsonl:41 messages.0.role: the last message is of 'user'" in herd("plan", str(asked), status=2)


def test_a_rollback_goes_back_to_what_it_started_from(herd: Herd, printed: str) -> None:
    start = record(herd, "tiny-chat-1").steps["init-weights"].artifact
    assert f"to {start}" in herd("rollback", "tiny-chat")
    assert "7 + 8" in herd("generate", "tiny-chat@champion", "--prompt", "What is 7 + 8?", "--tokens", "3")
    herd("rollback", "tiny-chat", "--to", "2")


def test_an_alias_that_nobody_holds_is_refused(herd: Herd, printed: str, asked: Path) -> None:
    words = ("--set", "init_from.path=other@champion", "--set", "tokenizer.use=other@champion")
    assert "init_from.path: no model of" in herd("run", str(asked), *words, status=2)
