"""Stages of kind sft in a recipe: what is refused, what is warned about, and that other recipes are as before."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from herd.llama3.recipe.gates import StageRate
from herd.llama3.recipe.lint import lint
from herd.llama3.recipe.load import RecipeError, parse_recipe, resolved
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe

MAIN = {"name": "main", "for": "1M", "seq_len": 512, "batch": "8Ki", "mix": "base"}
CHAT = {"name": "chat", "kind": "sft", "for": "100Ki", "seq_len": 512, "mix": "base", "replay": "10%"}


def recipe(*stages: dict[str, Any], **more: Any) -> Recipe:
    data: dict[str, Any] = {
        "name": "sample",
        "sources": {"general": [{"uri": "x"}], "math": [{"uri": "y"}]},
        "tokenizer": {"train": {"vocab": 300}},
        "mix": {"base": {"general": "75%", "math": "25%"}},
        "model": {"preset": "6m"},
        "lr": {"peak": 1e-3, "warmup": "10 steps", "cosine": {"to": 1e-4, "over": "1M"}},
        "conversations": [{"uri": "chats/*.jsonl"}],
        "stages": list(stages),
    }
    return parse_recipe({key: value for key, value in {**data, **more}.items() if value is not None}, "sample.yaml")


def test_a_recipe_without_conversations_has_no_new_field() -> None:
    """Its digest, and with it every key, stays."""
    plain = resolved(recipe(MAIN, conversations=None))
    assert "conversations" not in plain
    assert not {"kind", "replay", "epochs"} & plain["stages"][0].keys()
    tuned = recipe(MAIN, CHAT | {"epochs": 2})
    assert parse_recipe(resolved(tuned), "again") == tuned


@pytest.mark.parametrize(
    ("stages", "more", "fault"),
    [
        ([MAIN, CHAT], {"conversations": None}, "conversations: is missing; stage chat of kind sft needs sources"),
        ([MAIN], {}, "conversations: no stage trains on them; add a stage with kind: sft"),
        ([CHAT | {"batch": "8Ki"}, MAIN], {}, "stages.1 (main).kind: pretrain follows chat of kind sft"),
        ([MAIN | {"replay": "10%"}], {}, "replay is for stages of kind sft; write kind: sft"),
        ([MAIN | {"epochs": 2}], {}, "epochs is for stages of kind sft"),
        ([MAIN, CHAT | {"replay": "100%"}], {}, "replay 100% leaves nothing for conversations"),
        ([MAIN, CHAT | {"seq_len": [256, 512]}], {}, "seq_len as a list has no meaning in a stage of kind sft"),
        ([MAIN, CHAT | {"gates": ["needle"]}], {}, "gates has no meaning in a stage of kind sft"),
        ([MAIN, CHAT | {"data_offset": 1}], {}, "data_offset has no meaning"),
        ([MAIN, CHAT | {"kind": "dpo"}], {}, "stages.1.kind: 'dpo'"),
        ([MAIN, CHAT | {"epochs": 0}], {}, "stages.1.epochs: 0"),
        ([MAIN, CHAT | {"lr": "from 1e-5"}], {}, "write 'linear to 0', 'constant', or with a rate of the stage's own"),
        ([MAIN, CHAT], {"conversations": [{"uri": "problems"}]}, "limit: is missing; problems are generated without"),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused(stages: list[dict[str, Any]], more: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecipeError) as error:
        recipe(*stages, **more)
    assert fault in str(error.value)


def test_replay_counts_as_tokens_of_the_mix() -> None:
    main, chat = Schedule(recipe(MAIN, CHAT)).spans
    assert chat.shares == {"general": Fraction(75, 1000), "math": Fraction(25, 1000)}
    assert chat.start == main.end
    assert chat.mix_tokens == 19 * 512, "a tenth of 192 sequences"
    assert main.mix_tokens == main.tokens
    assert Schedule(recipe(MAIN, CHAT | {"replay": "0%"})).spans[1].shares == {}


def test_a_stage_may_have_a_rate_of_its_own() -> None:
    for text, start, end in (("linear from 1e-05 to 0", 1e-5, 0.0), ("constant at 1e-05", 1e-5, None)):
        rate = StageRate.parse(text)
        assert (rate.start, rate.end, str(rate)) == (start, end, text)
    schedule = Schedule(recipe(MAIN, CHAT | {"lr": "linear from 1e-5 to 0"}))
    chat = schedule.span("chat")
    assert schedule.lr_at(chat.start) == 1e-5
    assert schedule.lr_at(chat.start + chat.tokens // 2 // 8192 * 8192) == pytest.approx(5e-6, rel=0.1)
    constant = Schedule(recipe(MAIN, CHAT | {"lr": "constant at 2e-5"}))
    assert {constant.lr_at(position) for position in (constant.span("chat").start, constant.tokens - 8192)} == {2e-5}


def test_what_is_odd_is_warned_about() -> None:
    (warning,) = [line for line in lint(recipe(MAIN, CHAT)) if "stages.chat" in line]
    assert warning.startswith(
        "stages.chat.lr: starts at 0.0001, where pretraining ends; fine-tuning usually has a separate rate"
    )
    own = CHAT | {"lr": "linear from 1e-5 to 0", "seq_len": 256, "batch": "4Ki"}
    assert not [line for line in lint(recipe(MAIN, own)) if "stages.chat" in line], "a smaller batch is usual"
    assert any("epochs: 9 passes" in line for line in lint(recipe(MAIN, own | {"epochs": 9})))


def test_fine_tuning_does_not_move_the_documents_before_it() -> None:
    """The default chunk of a mix is the longest sequence of its own stages."""
    assert recipe(MAIN, CHAT | {"seq_len": 1024}).chunk_tokens == 512
    assert recipe(CHAT | {"seq_len": 1024, "batch": "8Ki"}).chunk_tokens == 1024
