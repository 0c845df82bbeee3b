"""Rows of conversations: both forms, packed files, and what is said about every kind of broken row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from herd.llama3.data.readers.conversations import read_conversations, survey_conversations
from herd.llama3.data.readers.files import SourceError
from herd.llama3.recipe.data_schema import ConversationSource

USER, ANSWER = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Be brief."}


def source(path: Path, **more: Any) -> ConversationSource:
    return ConversationSource(uri=str(path), **more)


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path: Path, **more: Any) -> list[list[dict[str, str]]]:
    return [row.messages for row in read_conversations(source(path, **more), 0)]


def test_the_form_is_found_per_file(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"messages": [SYSTEM, USER, ANSWER, USER, ANSWER]}, "", {"messages": [USER, ANSWER]})
    write(tmp_path / "b.jsonl", {"prompt": "1 + 1?", "response": "2"})
    write(tmp_path / "c.jsonl", {"prompt": "1 + 1?", "completion": "2", "id": 7})
    write(tmp_path / "README.md", "about the set")
    assert read(tmp_path) == [[SYSTEM, USER, ANSWER, USER, ANSWER], *[[USER, ANSWER]] * 3]
    assert len(read(tmp_path, limit=2)) == 2


def test_a_list_of_conversations_is_read(tmp_path: Path) -> None:
    rows = [{"instruction": "1 + 1?", "input": "", "output": "2"}] * 2
    (tmp_path / "a.json").write_text("\ufeff \n" + json.dumps(rows, indent=2))
    write(tmp_path / "b.json", {"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER]})
    assert read(tmp_path) == [[USER, ANSWER]] * 4
    (tmp_path / "a.json").write_text(json.dumps([*rows, {"instruction": "1 + 1?"}]))
    with pytest.raises(SourceError, match=r"a.json:3 output: is missing"):
        read(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(rows)[:-2])
    with pytest.raises(SourceError, match=r"a.json' is not JSON .*; repair the list"):
        read(tmp_path)


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_packed_files_are_read(tmp_path: Path, ending: str) -> None:
    data = (json.dumps({"messages": [USER, ANSWER]}) + "\n").encode() * 3
    packed = gzip.compress(data) if ending == "gz" else pa.Codec("zstd").compress(data, asbytes=True)
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(packed)
    assert len(read(path)) == 3
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(SourceError, match=r"a.jsonl.* cannot be read to its end"):
        read(path)


def test_a_license_is_the_source_s_or_the_row_s(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER], "license": "MIT"}, {"messages": [USER, ANSWER]})
    assert [row.license for row in read_conversations(source(path), 0)] == ["MIT", "unknown"]
    assert [row.license for row in read_conversations(source(path, license="CC0"), 0)] == ["CC0", "CC0"]


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


BROKEN = {
    "not json": ("{'a'", "2 is not JSON"),
    "no object": ([1, 2], "2 messages: is missing, and the file begins with rows that have it"),
    "other form": ({"prompt": "a", "response": "b"}, "2 messages: is missing"),
    "no list": ({"messages": "hello"}, "2 messages: 'hello' is not a list"),
    "no message": ({"messages": []}, r"2 messages: '\[\]' is not a list"),
    "two users": (chat(USER, USER, ANSWER), "2 messages.1.role: 'user' where 'assistant' is expected; write user and"),
    "begins with the answer": (chat(ANSWER), "2 messages.0.role: 'assistant' where 'user' or 'system' is expected"),
    "late system": (chat(USER, ANSWER, SYSTEM), "2 messages.2.role: 'system' where 'user' is expected"),
    "two systems": (chat(SYSTEM, SYSTEM, USER, ANSWER), "2 messages.1.role: 'system' where 'user' is expected"),
    "ends with the user": (chat(USER, ANSWER, USER), "2 messages.2.role: the last message is of 'user'; end with"),
    "system alone": (chat(SYSTEM), "2 messages.0.role: the last message is of 'system'"),
    "unknown role": (chat(USER, {"role": "bot", "content": "2"}), "2 messages.1.role: 'bot' where 'assistant'"),
    "no role": (chat({"content": "2"}), "2 messages.0.role: None where"),
    "no mapping": (chat("hello"), "2 messages.0.role: None where"),
    "empty": (chat(USER, {"role": "assistant", "content": " \n"}), "2 messages.1.content: is empty; write a text"),
    "parts": (chat({"role": "user", "content": [{"type": "text"}]}, ANSWER), "2 messages.0.content: is list, not text"),
    "tools": (
        {"messages": [USER, ANSWER], "tools": [{"type": "function"}]},
        "2 tools: tools are not supported; remove",
    ),
    "a call": (chat(USER, {**ANSWER, "tool_calls": [{"id": "1"}]}), "2 messages.1.tool_calls: calls of tools are not"),
    "old call": (
        chat(USER, {"role": "assistant", "function_call": {"name": "f"}}),
        "2 messages.1.function_call: calls",
    ),
    "a result": (
        chat(USER, ANSWER, {"role": "tool", "content": "3"}),
        "2 messages.2.role: 'tool' is of a tool, which is",
    ),
    "no loss": (chat(USER, {**ANSWER, "weight": 0}), "2 messages.1.weight: 0 is not supported"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_row_is_named_with_what_to_write(tmp_path: Path, kind: str) -> None:
    row, fault = BROKEN[kind]
    path = write(tmp_path / "chats.jsonl", chat(USER, ANSWER), row, chat(USER, ANSWER))
    with pytest.raises(SourceError, match=f"chats.jsonl:{fault}"):
        read(path)


def test_a_broken_pair_is_named(tmp_path: Path) -> None:
    good = {"prompt": "a", "completion": "b"}
    for row, fault in (
        ({"prompt": "a"}, "completion: is missing"),
        ({"prompt": "a", "completion": ""}, "completion: is"),
    ):
        with pytest.raises(SourceError, match=f"a.jsonl:2 {fault}"):
            read(write(tmp_path / "a.jsonl", good, row))
    with pytest.raises(SourceError, match=r"a.jsonl:1 has 'text'; write"):
        read(write(tmp_path / "a.jsonl", {"text": "a"}))


def test_sharegpt_and_alpaca_are_read(tmp_path: Path) -> None:
    turns = [("human", "1 + 1?"), ("gpt", "2")]
    said = [{"from": speaker, "value": text, "weight": None} for speaker, text in turns]
    first = {"from": "system", "value": "Be brief."}
    rows = [{"id": 1, "conversations": [first, *said]}, {"conversations": said, "system": "Be brief.", "tools": []}]
    rows.append({"conversations": [SYSTEM, USER, ANSWER]})
    assert read(write(tmp_path / "a.jsonl", *rows)) == [[SYSTEM, USER, ANSWER]] * 3
    rows = [
        {"instruction": "1 + 1?", "input": "", "output": "2"},
        {"instruction": "1 + 1?", "output": "2", "system": "Be brief.", "history": []},
        {"instruction": "Add.", "input": "1 and 1", "output": "2"},
    ]
    added = [{"role": "user", "content": "Add.\n\n1 and 1"}, ANSWER]
    assert read(write(tmp_path / "b.jsonl", *rows)) == [[USER, ANSWER], [SYSTEM, USER, ANSWER], added]
    both = {"messages": [USER, ANSWER], "prompt": "x", "response": "y"}
    assert read(write(tmp_path / "c.jsonl", both)) == [[USER, ANSWER]]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"conversations": [{"from": "human", "value": "a"}]}, "conversations.0.from: the last message is of 'user'"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "conversations.0.from: 'bot' where 'user' or 'system'"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{}"}]},
            "conversations.1.from: 'function_call' is of a tool",
        ),
        ({"conversations": [{"from": "human", "value": ""}]}, "conversations.0.value: is empty"),
        ({"conversations": []}, r"conversations: '\[\]' is not a list"),
        ({"instruction": "a", "input": "b"}, "has 'instruction', 'input'; write"),
        ({"instruction": "a", "input": ["b"], "output": "c"}, "input: is list, not text"),
        ({"instruction": "", "output": "c"}, "instruction: is empty"),
        ({"instruction": "a", "output": None}, "output: is NoneType, not text"),
        (
            {"instruction": "a", "output": "b", "history": [["c", "d"]]},
            "history: earlier turns are read only as messages",
        ),
        ({"prompt": "a", "response": "b", "functions": [1]}, "functions: functions are not supported"),
    ],
)
def test_broken_rows_of_other_shapes_are_named(tmp_path: Path, row: dict[str, Any], fault: str) -> None:
    with pytest.raises(SourceError, match=f"a.jsonl:1 {fault}"):
        read(write(tmp_path / "a.jsonl", row))


def test_half_pairs_are_dropped_as_in_documents(tmp_path: Path) -> None:
    half = r'{"messages": [{"role": "user", "content": "1 + 1?\ud83d"}, {"role": "assistant", "content": "2"}]}'
    assert read(write(tmp_path / "a.jsonl", half)) == [[USER, ANSWER]]


def test_a_source_without_conversations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has no conversation; add lines"):
        read(write(tmp_path / "a.jsonl", ""))
    with pytest.raises(SourceError, match="matches no file"):
        read(tmp_path / "none" / "*.jsonl")
    write(tmp_path / "b" / "a.csv", "prompt,response")
    with pytest.raises(SourceError, match=r"a.csv' is not read as conversations; write them as .jsonl"):
        read(tmp_path / "b")


def test_a_survey_names_every_source_at_fault(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "a.jsonl", chat(USER, ANSWER)), write(tmp_path / "b.jsonl", "{")
    (survey,) = survey_conversations([source(good)], 0)
    assert survey[1:] == (1, 2, 7, None, True)
    (survey,) = survey_conversations([source(good)], 0, count=len)
    assert survey.tokens == 2
    with pytest.raises(SourceError) as error:
        survey_conversations([source(bad), source(good), source(tmp_path / "none")], 0)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == [
        f"conversations.{n}.uri" for n in (0, 2)
    ]


def test_generated_problems_are_seeded_and_correct() -> None:
    problems = ConversationSource(uri="problems", limit=40)
    first, again, other = ([row.messages for row in read_conversations(problems, seed)] for seed in (1, 1, 2))
    assert first == again != other
    assert len({json.dumps(messages) for messages in first}) == 40
    assert {len(messages) for messages in first} == {2, 4, 6}
    assert all(message["content"] for messages in first for message in messages)
    with pytest.raises(ValueError, match="limit: is missing"):
        ConversationSource(uri="problems")
