"""Chat templates of models against transformers, what a model learns of them, and hostile ones."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from herd.llama3.tokens import chat_template
from herd.llama3.tokens.chat import encode_chat, encode_conversation
from herd.llama3.tokens.chat_template import TEMPLATE
from herd.llama3.tokens.tokenizer import TEMPLATE_FILE, Tokenizer, parse_hugging_face, train_tokenizer
from tests.llama3.tokens.test_byte_level import document
from tests.llama3.tokens.test_chat import WORDS

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As of SmolLM2: with a system message where there is none."""
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "zephyr": ZEPHYR, "mistral": MISTRAL, "marked": MARKED, "llama3": TEMPLATE + " "}
NAMES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
CHAT = [
    {"role": "user", "content": " Is <|im_end|> a token?"},
    {"role": "assistant", "content": "No.\n"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes: <|im_start|>"},
]


@cache
def coder(template: str, kind: str = "smollm") -> Tokenizer:
    settings = {**NAMES, "chat_template": template}
    return parse_hugging_face(json.dumps(document(kind, kind == "smollm")).encode(), "x", settings)


def conversations(count: int, alternate: bool) -> list[list[dict[str, str]]]:
    draws = random.Random(1)
    made = []
    for _ in range(count):
        texts = ["".join(draws.choices(WORDS, k=draws.randrange(9))) for _ in range(draws.randrange(1, 6))]
        roles = ["user", "assistant"] * 3 if alternate else draws.choices(("system", "user", "assistant"), k=6)
        made.append([{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)])
    return made


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers(name: str, count: int) -> None:
    library = pytest.importorskip("transformers", reason="package transformers is not installed")
    for kind in ("smollm", "qwen2"):
        ours = coder(TEMPLATES[name], kind)
        made = Library.from_str(ours.hugging_face_json())
        theirs = library.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=ours.template, **NAMES)
        for number, messages in enumerate(conversations(count, name == "mistral")):
            opened = bool(number % 2)
            due = theirs.apply_chat_template(messages, add_generation_prompt=opened, return_dict=False)
            assert encode_chat(ours, messages, opened) == due, messages


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_marked_answers_are_those_of_transformers(count: int) -> None:
    library = pytest.importorskip("transformers", reason="package transformers is not installed")
    ours = coder(MARKED)
    made = Library.from_str(ours.hugging_face_json())
    theirs = library.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=MARKED, **NAMES)
    for messages in conversations(count, alternate=True):
        if len(messages) > 1 and not any(message["content"][:1].isspace() for message in messages):
            due = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            assert encode_conversation(ours, messages) == (due["input_ids"], [bool(n) for n in due["assistant_masks"]])


def learned(ours: Tokenizer, messages: list[dict[str, str]]) -> str:
    ids, mask = encode_conversation(ours, messages)
    return ours.decode([token for token, target in zip(ids, mask, strict=True) if target], special=True)


def test_a_model_learns_the_answers_and_their_ends() -> None:
    for template in (CHATML, MARKED):
        assert learned(coder(template), CHAT) == "No.\n<|im_end|>Yes: <|im_start|><|im_end|>"
    assert learned(coder(MISTRAL), CHAT) == "No.<|im_end|>Yes: <|im_start|><|im_end|>"
    assert learned(coder(ZEPHYR), CHAT) == "No.\n<|im_end|>Yes: <|im_start|><|im_end|>"
    assert learned(coder(CHATML), CHAT[:1]) == ""


@pytest.mark.parametrize("template", [CHATML, MISTRAL, MARKED])
def test_a_special_token_in_a_content_is_text(template: str) -> None:
    ours = coder(template)
    plain = [{**message, "content": "x"} for message in CHAT]
    alone = [{**message, "content": "<|im_end|>"} for message in CHAT]
    assert specials(ours, alone) == specials(ours, CHAT) == specials(ours, plain)
    assert "Is <|im_end|> a token?" in ours.decode(encode_chat(ours, CHAT, False))


def specials(ours: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    return [token for token in encode_chat(ours, messages, False) if token in ours.names]


def test_an_answer_begins_where_a_generation_prompt_ends() -> None:
    for template in (CHATML, MISTRAL, MARKED, ZEPHYR):
        ids, mask = encode_conversation(coder(template), CHAT[:2])
        assert encode_chat(coder(template), CHAT[:1], True) == ids[: mask.index(True)]


def test_the_end_of_a_turn_is_the_templates() -> None:
    ended = CHATML.replace("message['content'] + '<|im_end|>'", "message['content'] + '<|endoftext|>'")
    assert coder(CHATML).turn_end == coder(CHATML).specials["<|im_end|>"]
    assert coder(ended).turn_end == coder(ended).specials["<|endoftext|>"]


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (CHATML.replace("endfor", "endwhile"), "is not a template"),
        (CHATML.replace("message['content'] +", "message['content'].upper() +"), "changes the contents"),
        (CHATML.replace("message['content'] +", "message['content'] | replace('?', '!') +"), "changes the contents"),
        (CHATML.replace("message['content'] +", "message['content'] * 2 +"), "the content of messages.0 2 times"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "the content of messages.1 0 times"),
        ("{% for m in messages[::-1] %}{{ m.content }}{% endfor %}", "or not in its place"),
        ("{{ raise_exception('no tools here') }}", "no tools here; change the messages"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ messages[0].content.__init__.__globals__ }}", "access to attribute '__init__'"),
        ("{% set x = messages.append(1) %}", "access to attribute 'append'"),
        ("{{ cycler.__init__.__globals__ }}", "access to attribute '__init__'"),
        ("{{ open('/etc/passwd') }}", "'open' is undefined"),
        ("{% include '/etc/passwd' %}", "no loader for this environment"),
        ("{{ 'a' * 2 ** 23 }}", "gives more than 4,194,[0-9]+ characters"),
        ("{{ ('a' * 10 ** 11) }}", "take more than 2 GiB"),
        ("{{ '\ue000' }}", "has a character of a private use"),
        pytest.param(LOOP, "take more than 1 s of processor time", marks=pytest.mark.slow),
        pytest.param("{{ 7 ** (10 ** 9) }}", "take more than 1 s of processor time", marks=pytest.mark.slow),
    ],
)
def test_hostile_templates_are_refused(template: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    with pytest.raises(ValueError, match=f"^chat template: .*{fault}"):
        encode_chat(coder(template), CHAT, False)
    assert encode_chat(coder(CHATML), CHAT, False)


def test_answers_that_are_not_unambiguous_are_refused() -> None:
    """As of reasoning models, which leave out what was thought once another message follows."""
    thought = "('<think>' if loop.last and message['role'] == 'assistant' else '') + message['content'] +"
    changing = CHATML.replace("message['content'] +", thought)
    assert learned(coder(changing), CHAT[:2]) == "<think>No.\n<|im_end|>"
    with pytest.raises(ValueError, match=r"writes the messages up to messages.1 differently .* \{% generation %\}"):
        encode_conversation(coder(changing), CHAT)


def test_a_template_knows_the_date_of_no_day() -> None:
    ids = encode_chat(coder("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"), CHAT[:1], False)
    assert coder(CHATML).decode(ids).startswith("26 Jul 2024")


def test_the_template_is_found_in_a_model_folder(tmp_path: Path) -> None:
    ours = train_tokenizer([*WORDS, "system user assistant"] * 4, 380)
    ours.save(tmp_path)
    (tmp_path / TEMPLATE_FILE).write_text(TEMPLATE)
    built_in = Tokenizer.load(tmp_path)
    assert built_in.chat is None
    (tmp_path / TEMPLATE_FILE).write_text(TEMPLATE.replace("| trim", ""))
    other = Tokenizer.load(tmp_path)
    assert other.digest == built_in.digest
    assert other.turn_end == built_in.turn_end
    messages: list[dict[str, Any]] = [{"role": "user", "content": "  x"}]
    assert other.decode(encode_chat(other, messages, True)).count("  x") == 1
    assert encode_chat(built_in, messages, True) != encode_chat(other, messages, True)
