"""Packed conversations and their stream: what is trained on at every position, and how often."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.readers.files import SourceError
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.base import CONVERSATIONS, DOMAINS
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Model
from herd.llama3.tokens.chat import encode_conversation
from herd.llama3.tokens.conversations import HELD_OUT, ConversationStream, pack, prepare_conversations
from herd.llama3.tokens.kernels import IGNORED
from herd.llama3.tokens.stream import TokenStream
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.llama3.train.data_loader import Batches
from tests.llama3.tokens.token_samples import LENGTHS, recipe, stage, write_shards

SEQ = 96
CODER = Tokenizer([bytes([value]) for value in range(256)])
"""A token is a byte."""


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]}


CHATS = [
    chat(f"q{n}" * (1 + n % 4), f"a{n}" * (1 + n % 5), *(("more?", f"b{n}") if n % 3 == 0 else ())) for n in range(30)
]


def sft(folder: Path, rows: list[dict[str, Any]] = CHATS, tokens: int = 60 * SEQ, **more: Any) -> Recipe:
    """One stage of documents, then one of conversations, which are written into `folder`."""
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tuned = stage("chat", tokens, SEQ, 4 * SEQ) | {"kind": "sft", "replay": "10%"} | more.pop("stage", {})
    before = more.pop("before", [stage("main", 80)])
    more = {"conversations": [{"uri": str(folder / "chats.jsonl"), "license": "CC0"}], **more}
    return recipe([*before, tuned], tokens=more.pop("epochs", {"max_epochs": 1e6}), **more)


def prepared(folder: Path, sft_recipe: Recipe) -> tuple[ConversationStream, dict[str, Any]]:
    """Return the stream of the last stage, and the metadata about its conversations."""
    for name in ("tokens", "chats"):
        (folder / name).mkdir(exist_ok=True)
    write_shards(folder / "tokens", sft_recipe, LENGTHS)
    metadata = prepare_conversations(sft_recipe, CODER, folder / "chats")
    return ConversationStream(
        folder / "chats", TokenStream(folder / "tokens", sft_recipe), Schedule(sft_recipe).spans[-1]
    ), metadata


def all_of(stream: ConversationStream) -> list[np.ndarray]:
    return list(stream.sequences(stream.span.start, SEQ, stream.span.tokens // SEQ))


def test_every_conversation_is_whole_in_one_sequence_once_an_epoch(tmp_path: Path) -> None:
    stream, metadata = prepared(tmp_path, sft(tmp_path, curate={"validation_fraction": "0%"}, stage={"replay": "0%"}))
    count = stream.sequences_per_epoch
    tokens, targets, segments, domains = stream.sequences(stream.span.start, SEQ, count)
    sequences: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for row in range(count):
        for number in range(int(segments[row].max()) + 1):
            own = segments[row] == number
            ids = tuple(tokens[row][own].tolist())
            if ids[0] == CODER.begin:  # the rest is padding
                sequences[ids, tuple(targets[row][own].tolist())] += 1
            else:
                assert set(targets[row][own].tolist()) == {IGNORED}
    expected = []
    for each in CHATS:
        ids, mask = encode_conversation(CODER, each["messages"])
        after = [token if target else IGNORED for token, target in zip(ids[1:], mask[1:], strict=True)]
        expected.append((tuple(ids), (*after, IGNORED)))
    assert sequences == Counter(expected)
    assert set(domains.ravel().tolist()) == {len(DOMAINS)}
    assert metadata["tokens"] == sum(len(ids) for ids, _ in expected)
    assert metadata["target_tokens"] == sum(token != IGNORED for _, targets in expected for token in targets)
    assert (metadata["conversations"], metadata["turns"], metadata["held_out"]) == (30, 40, 0)
    assert metadata["packing"][str(SEQ)]["padding"] == count * SEQ - metadata["tokens"]
    assert metadata["licenses"] == {"CC0": metadata["tokens"]}


def test_attention_stays_inside_a_conversation(tmp_path: Path) -> None:
    """The loss on packed conversations is that on each conversation alone."""
    stream, _ = prepared(tmp_path, sft(tmp_path, curate={"validation_fraction": "0%"}, stage={"replay": "0%"}))
    config = Model(layers=2, dim=32, ffn=64, heads=4, kv_heads=2, max_seq_len=SEQ)
    model = build_model(config, CODER.vocab_size, 0, torch.float64, torch.device("cpu"))
    batch = Batches(stream).sequences(stream.span.start, SEQ, 0, stream.sequences_per_epoch)
    with torch.no_grad():
        packed = model(batch.tokens_BS, batch.documents_BS, batch.targets_BS)
        alone = 0.0
        for each in CHATS:
            ids, mask = encode_conversation(CODER, each["messages"])
            targets = torch.tensor([ids[1:]]).masked_fill(~torch.tensor([mask[1:]]), IGNORED)
            alone += model(torch.tensor([ids[:-1]]), None, targets).sum().item()
    assert packed.sum().item() == pytest.approx(alone, rel=1e-9)
    assert ((packed > 0) == (batch.targets_BS != IGNORED)).all()


@given(st.integers(1, 60), st.integers(0, 95), st.integers(1, 7))
def test_replay_is_exact_and_evenly_spread(sequences: int, percent: int, batch: int) -> None:
    share = Fraction(percent, 100)
    sft_recipe = recipe(
        [stage("chat", sequences * SEQ, SEQ, SEQ) | {"kind": "sft", "replay": f"{percent}%"}],
        conversations=[{"uri": "problems", "limit": 1}],
    )
    span = Schedule(sft_recipe).spans[0]
    replayed = span.mix_tokens // SEQ
    assert abs(replayed - sequences * share) <= Fraction(1, 2)
    assert sum(span.shares.values()) == share


def test_replayed_sequences_continue_the_documents(tmp_path: Path) -> None:
    sft_recipe = sft(tmp_path, tokens=40 * SEQ)
    stream, _ = prepared(tmp_path, sft_recipe)
    tokens, targets, segments, domains = all_of(stream)
    replayed = (domains != len(DOMAINS)).all(1)
    assert replayed.sum() == 4
    assert [number // 10 for number in np.flatnonzero(replayed)] == [0, 1, 2, 3], "one in ten"
    documents = TokenStream(tmp_path / "tokens", sft_recipe)
    assert documents.tokens == 80 + 4 * SEQ
    window = documents.sequences(80, SEQ, 4)  # from where the stage before ended
    for column, expected in zip((tokens, targets, segments, domains), window, strict=True):
        assert (column[replayed] == expected).all()
    end = stream.span.end
    assert stream.realized(end)[CONVERSATIONS] == 36 * SEQ
    assert sum(stream.realized(end).values()) == 80 + 40 * SEQ
    assert stream.planned(stream.span.start, end)[CONVERSATIONS] == 36 * SEQ
    assert stream.epochs(end)[CONVERSATIONS] == 36 / stream.sequences_per_epoch


def test_any_part_reads_as_the_whole_does(tmp_path: Path) -> None:
    """Token i does not depend on the batch, the rank or where a restart begins."""
    stream, _ = prepared(tmp_path, sft(tmp_path))
    whole = all_of(stream)
    again = ConversationStream(tmp_path / "chats", TokenStream(tmp_path / "tokens", stream.recipe), stream.span)
    for first, count in ((0, 1), (59, 1), (7, 4), (3, 30), (20, 40), (5, 0)):
        read = again.sequences(again.span.start + first * SEQ, SEQ, count)
        assert all((got == column[first : first + count]).all() for got, column in zip(read, whole, strict=True))
    with pytest.raises(ValueError, match="are not in stage chat"):
        stream.sequences(stream.span.start, SEQ, 61)


def test_epochs_are_shuffled_and_the_seed_decides(tmp_path: Path) -> None:
    sft_recipe = sft(tmp_path, stage={"replay": "0%"}, curate={"validation_fraction": "0%"})
    stream, _ = prepared(tmp_path, sft_recipe)
    tokens, count = all_of(stream)[0], stream.sequences_per_epoch
    first, second = tokens[:count], tokens[count : 2 * count]
    assert (first != second).any()
    assert sorted(map(bytes, first)) == sorted(map(bytes, second))
    other = prepared(tmp_path, sft_recipe.model_copy(update={"seed": 5}))[0]
    assert (all_of(other)[0][:count] != first).any()


def test_held_out_and_repeated_conversations_are_not_trained_on(tmp_path: Path) -> None:
    rows = [*CHATS, *CHATS[:7], chat(" q1 q1 ", "x"), chat("q1 q1", "x\n")]
    quarter = {"curate": {"validation_fraction": "25%"}, "stage": {"replay": "0%"}}
    stream, metadata = prepared(tmp_path, sft(tmp_path, rows, **quarter))
    assert metadata["dropped"] == {"duplicate": 8}, "white space around a content does not count"
    assert metadata["conversations"] + metadata["held_out"] == 31
    assert 2 <= metadata["held_out"] <= 15
    held_out = [json.loads(line) for line in (tmp_path / "chats" / HELD_OUT).read_text().splitlines()]
    text = "".join(CODER.decode(row) for row in all_of(stream)[0].tolist())
    assert len(held_out) == metadata["held_out"]
    for row in held_out:
        ids, _ = encode_conversation(CODER, row["messages"])
        assert CODER.decode(ids) not in text
    again = prepared(tmp_path, sft(tmp_path, rows[::-1], **quarter))[1]
    assert again["held_out"] == metadata["held_out"], "a conversation's text decides, not its place"


@pytest.mark.parametrize(("count", "held_out"), [(30, 10), (12, 4), (2, 0)])
def test_a_small_set_of_conversations_is_judged_by_ten_or_a_third(tmp_path: Path, count: int, held_out: int) -> None:
    curate = {"validation_fraction": "0.001%"}
    _, metadata = prepared(tmp_path, sft(tmp_path, CHATS[:count], curate=curate, stage={"replay": "0%"}))
    assert (metadata["held_out"], metadata["conversations"]) == (held_out, count - held_out)


def test_what_is_longer_than_a_sequence_is_cut_and_counted(tmp_path: Path) -> None:
    rows = [chat("q", "a" * 200), chat("q" * 200, "a"), chat("q", "a")]
    stream, metadata = prepared(
        tmp_path, sft(tmp_path, rows, curate={"validation_fraction": "0%"}, stage={"replay": "0%"})
    )
    packed = metadata["packing"][str(SEQ)]
    assert (packed["cut"], packed["dropped"], packed["sequences"]) == (1, 1, 2)
    tokens, targets, _, _ = stream.sequences(stream.span.start, SEQ, 2)
    ids, mask = encode_conversation(CODER, rows[0]["messages"])
    longest = int(np.argmax((targets != IGNORED).sum(1)))
    assert tokens[longest].tolist() == ids[:SEQ]
    assert (targets[longest] != IGNORED).sum() == sum(mask[1:SEQ])
    with pytest.raises(
        SourceError, match=r"no conversation has a token of the assistant in its first 96; raise seq_len"
    ):
        prepared(tmp_path, sft(tmp_path, rows[1:2], curate={"validation_fraction": "0%"}))


def test_nothing_left_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none is left to train on, 3 are held out"):
        prepared(tmp_path, sft(tmp_path, CHATS[:3], curate={"validation_fraction": "100%"}))


def test_packing_fills_a_sequence_to_its_end() -> None:
    assert pack([7, 3, 5, 5, 10], 10) == [[4], [0, 1], [2, 3]]


@given(st.lists(st.integers(1, 50), max_size=80))
def test_packing_places_each_once_and_wastes_little(lengths: list[int]) -> None:
    sequences = pack(lengths, 50)
    assert sorted(index for members in sequences for index in members) == list(range(len(lengths)))
    used = [sum(lengths[index] for index in members) for members in sequences]
    assert all(0 < size <= 50 for size in used)
    # best-fit decreasing needs at most 11/9 of the best packing and one more (Johnson 1973)
    assert len(sequences) <= 11 / 9 * -(-sum(lengths) // 25) + 1
    assert sum(size <= 25 for size in used) <= 1, "two half-empty sequences would have been one"


def test_a_length_that_contradicts_the_epochs_is_refused_with_the_one_to_write(tmp_path: Path) -> None:
    stream, _ = prepared(tmp_path, sft(tmp_path, stage={"epochs": 2}))
    with pytest.raises(
        ValueError, match=r"stages.chat.epochs: 2 passes over \d+ sequences of 96 .* write for: "
    ) as error:
        stream.check()
    due = str(error.value).rpartition("for: ")[2]
    right, _ = prepared(
        tmp_path, sft(tmp_path, stage={"epochs": 2, "for": due if due[-1].isalpha() else f"{due} tokens"})
    )
    right.check()
    assert right.epochs(right.span.end)[CONVERSATIONS] == pytest.approx(2, abs=4 / right.sequences_per_epoch)
    limited, _ = prepared(tmp_path, sft(tmp_path, epochs={"max_epochs": 2}))
    with pytest.raises(
        ValueError, match=r"stages.chat.for: 5.76K tokens are .* at most tokens.max_epochs 2; write for: "
    ):
        limited.check()


def test_a_stage_of_conversations_alone_needs_no_documents(tmp_path: Path) -> None:
    sft_recipe = sft(tmp_path, before=[], stage={"replay": "0%"})
    stream, _ = prepared(tmp_path, sft_recipe)
    assert stream.replay.tokens == 0
    assert stream.block_bytes == 0
    assert stream.identity(0, 4 * SEQ)["replay"] is None
    assert stream.realized(stream.span.end) == {**dict.fromkeys(DOMAINS, 0), CONVERSATIONS: 60 * SEQ}


def test_documents_are_read_as_without_conversations(tmp_path: Path) -> None:
    """Fine-tuning added to a recipe moves no token of the stages before it."""
    sft_recipe = sft(tmp_path)
    plain = recipe([stage("main", 80)])
    write_shards(tmp_path / "tokens", sft_recipe, LENGTHS)
    with_chat, without = TokenStream(tmp_path / "tokens", sft_recipe), TokenStream(tmp_path / "tokens", plain)
    assert (with_chat.read(0, 80).tokens == without.read(0, 80).tokens).all()
    assert with_chat.identity(0, 80) == without.identity(0, 80)


def test_another_sequence_length_is_refused(tmp_path: Path) -> None:
    stream, _ = prepared(tmp_path, sft(tmp_path))
    other = sft(tmp_path, stage={"seq_len": 48})
    with pytest.raises(ValueError, match="has no sequences of 48 tokens"):
        ConversationStream(tmp_path / "chats", stream.replay, Schedule(other).spans[-1])
