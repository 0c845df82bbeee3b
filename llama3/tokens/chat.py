"""Conversations as token ids, and which of the tokens a model learns to write: in the Llama 3 format, or by a template.

Llama 3: `<|begin_of_text|>`, then per message `<|start_header_id|>` role `<|end_header_id|>`, two line ends, the
stripped content and `<|eot_id|>` (meta-llama/llama-models, models/llama3/chat_format.py). A tokenizer that comes with a
chat template has that instead. Contents are encoded as text, so one that spells a special token stays text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from herd.llama3.tokens.chat_template import chat_pieces
from herd.llama3.tokens.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
END_OF_TURN = "<|eot_id|>"
PADDING = "<|finetune_right_pad_id|>"


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> list[int]:
    """Return the ids of `messages` (role and content each); `add_generation_prompt` opens the assistant's next turn.

    Raises ValueError that names message and field: no message, an unknown role, a content that is not text, a tokenizer
    without the special tokens of the format, and as `chat_pieces`.
    """
    if tokenizer.chat is not None:
        return _encode_by_template(tokenizer, messages, add_generation_prompt, answers=False)[0]
    ids, _ = encode_conversation(tokenizer, messages)
    return [*ids, *_header(tokenizer, "assistant")] if add_generation_prompt else ids


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], list[bool]]:
    """Return the ids of `messages` and the loss mask: True at contents of the assistant and the ends of its turns.

    A token that begins before an answer is not in it. Raises ValueError as `encode_chat`.
    """
    if tokenizer.chat is not None:
        return _encode_by_template(tokenizer, messages, False, answers=True)
    _check(messages)
    ids, mask = [special_id(tokenizer, "<|begin_of_text|>")], [False]
    for message in messages:
        header = _header(tokenizer, message["role"])
        content = [*tokenizer.encode(message["content"].strip()), special_id(tokenizer, END_OF_TURN)]
        ids += [*header, *content]
        mask += [False] * len(header) + [message["role"] == "assistant"] * len(content)
    return ids, mask


def _encode_by_template(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool, *, answers: bool
) -> tuple[list[int], list[bool]]:
    assert tokenizer.chat is not None
    _check(messages)
    ids, mask = list[int](), list[bool]()
    pieces = chat_pieces(tokenizer.chat, messages, add_generation_prompt, answers)
    for special, group in groupby(pieces, key=lambda piece: piece.special):
        if special:
            for piece in group:
                ids.append(tokenizer.specials[piece.text])
                mask.append(piece.answer)
            continue
        run = list(group)
        tokens, starts = tokenizer.encode_with_starts("".join(piece.text for piece in run))
        in_answer = [piece.answer for piece in run for _ in piece.text]
        ids += tokens
        mask += [in_answer[start] for start in starts]
    return ids, mask


def _check(messages: Sequence[Mapping[str, str]]) -> None:
    """Raise ValueError for a message that cannot be encoded."""
    if not messages:
        raise ValueError("messages: is empty; give at least one message")
    for number, message in enumerate(messages):
        if fault := message_fault(message):
            raise ValueError(f"messages.{number}.{fault}")


def message_fault(message: Any) -> str:
    """Return the fault of a message, beginning with its field; "" without a fault."""
    if not isinstance(message, Mapping):
        return f"role: is missing: {str(message)[:40]!r} is not a message; write {{role: user, content: ...}}"
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return f"role: {role!r} is unknown; write {', '.join(ROLES[:-1])} or {ROLES[-1]}"
    return "" if isinstance(content, str) else f"content: is {type(content).__name__}, not text; write a string"


def special_id(tokenizer: Tokenizer, name: str) -> int:
    """Return the id of a special token. Raises ValueError if `tokenizer` does not have it."""
    if name not in tokenizer.specials:
        raise ValueError(
            f"tokenizer: has no {name}, which conversations need; use a tokenizer in the Llama 3 format or with a chat "
            "template (tokenizer.use), or train one"
        )
    return tokenizer.specials[name]


def _header(tokenizer: Tokenizer, role: str) -> list[int]:
    start, end = special_id(tokenizer, "<|start_header_id|>"), special_id(tokenizer, "<|end_header_id|>")
    return [start, *tokenizer.encode(role), end, *tokenizer.encode("\n\n")]
