from __future__ import annotations

from collections import Counter

import pytest

from herd.llama3.data.demo.word_problems import questions
from herd.llama3.evaluate.held_out import ValidationDocument, truncate_utf8
from herd.llama3.evaluate.requests import (
    CONTEXT_CHARS,
    CONTINUATION_CHARS,
    continuation_questions,
    document_requests,
    question_requests,
)
from herd.llama3.evaluate.task import requests_digest


def documents(domain: str, count: int) -> list[ValidationDocument]:
    """Return documents of different words, long enough for a continuation."""
    return [
        ValidationDocument(f"{domain}{place}", domain, " ".join(f"{domain}{place}word{word}" for word in range(40)))
        for place in range(count)
    ]


def test_generated_questions_become_four_requests_each() -> None:
    asked = questions(0, 5)
    requests = question_requests("eval/arithmetic", asked)
    assert len(requests) == 20
    for place, question in enumerate(asked):
        group = requests[4 * place : 4 * place + 4]
        assert len({request.document for request in group}) == 1
        assert [request.choice for request in group] == [0, 1, 2, 3]
        assert [request.continuation for request in group] == [f" {choice}" for choice in question.choices]
        assert {(request.context, request.gold) for request in group} == {(question.query, question.gold)}
        assert group[0].context.count("Answer:") == 1
        assert group[0].bytes == len(question.choices[0]) + 1


def test_continuations_hold_the_truth_once_among_texts_of_the_same_domain() -> None:
    chosen = documents("code", 12) + documents("math", 9)
    text = {document.id: document.text for document in chosen}
    requests = continuation_questions("eval/continuation", chosen, 100)
    assert len(requests) == 4 * 21
    golds: Counter[int] = Counter()
    for place in range(0, len(requests), 4):
        group = requests[place : place + 4]
        name, context = group[0].document, group[0].context
        assert len({request.continuation for request in group}) == 4
        assert {request.context for request in group} == {context}
        assert len(context) <= CONTEXT_CHARS
        for request in group:
            assert len(request.continuation) == CONTINUATION_CHARS
            assert request.continuation.startswith(" ")
            assert text[name].startswith(context + request.continuation) == (request.choice == request.gold)
            assert name[:4] in request.continuation
        golds[group[0].gold] += 1
    assert len(golds) == 4


def test_continuations_take_turns_between_domains_and_stop_at_the_count() -> None:
    requests = continuation_questions("t", documents("code", 10) + documents("math", 10), 6)
    names = [request.document[:4] for request in requests[::4]]
    assert names == ["code", "math"] * 3


def test_domains_with_too_few_continuations_ask_nothing() -> None:
    assert continuation_questions("t", documents("code", 3), 10) == []
    assert len(continuation_questions("t", documents("code", 4), 10)) == 16
    same = [ValidationDocument(str(n), "code", "a b " * 100) for n in range(9)]
    short = [ValidationDocument(f"s{n}", "code", f"short {n}") for n in range(9)]
    assert continuation_questions("t", same + short, 10) == []


def test_text_without_spaces_is_cut_by_length() -> None:
    chosen = [ValidationDocument(str(n), "multilingual", chr(0x4E00 + n) * 400) for n in range(4)]
    assert {len(request.context) for request in continuation_questions("t", chosen, 10)} == {CONTEXT_CHARS}


def test_digest_follows_every_field_and_the_order() -> None:
    first = document_requests("t", documents("code", 2))
    assert requests_digest(first) == requests_digest(list(first))
    assert (
        len(
            {
                requests_digest(first),
                requests_digest(first[::-1]),
                requests_digest(first[:1]),
                requests_digest(document_requests("u", documents("code", 2))),
            }
        )
        == 4
    )


@pytest.mark.parametrize(
    ("size", "expected"), [(0, ""), (1, "a"), (2, "a"), (3, "aé"), (5, "aé"), (6, "aé日"), (9, "aé日")]
)
def test_cut_keeps_characters_whole(size: int, expected: str) -> None:
    assert truncate_utf8("aé日", size) == expected
