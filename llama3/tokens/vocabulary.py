"""Published split patterns, Llama 3's special tokens, and the tiktoken file format (lines of base64 token and rank)."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from herd.llama3.recipe.base import SPECIAL_TOKENS

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is split before merges (meta-llama/llama-models, models/llama3/tokenizer.py)."""
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "llama3": (PATTERN,),
    "gpt2": (GPT2_PATTERN,),
    "smollm": (r"\p{N}", GPT2_PATTERN),
    "qwen2": (PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "tekken": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
"""Name -> regular expressions at which text is split, one after another: of GPT-2, SmolLM2, Qwen 2 and 3, and
Mistral-Nemo."""
PLACES = {
    "<|begin_of_text|>": 0,
    "<|end_of_text|>": 1,
    "<|finetune_right_pad_id|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "<|eom_id|>": 8,
    "<|eot_id|>": 9,
    "<|python_tag|>": 10,
}
"""Special tokens with a meaning, counted from the end of the base vocabulary (Llama 3.1 tokenizer)."""


def special_tokens() -> list[str]:
    """Return the names of the 256 special tokens in the order of their ids."""
    named = {offset: name for name, offset in PLACES.items()}
    free = (f"<|reserved_special_token_{number}|>" for number in range(SPECIAL_TOKENS))
    return [named.get(offset) or next(free) for offset in range(SPECIAL_TOKENS)]


def tiktoken_bytes(base: Sequence[bytes]) -> bytes:
    """Return the tiktoken file of the vocabulary `base` (token of every rank)."""
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(base))


def parse_tiktoken(data: bytes, name: str) -> list[bytes]:
    """Return the token of every rank in the tiktoken file `data`. Raises ValueError with `name` for other formats."""
    base = []
    for number, line in enumerate(filter(None, data.splitlines())):
        try:
            token, rank = line.split()
            base.append(base64.b64decode(token, validate=True))
            in_order = int(rank) == number
        except ValueError as error:
            raise ValueError(
                f"tokenizer.use: {name}, line {number + 1}: {line[:40]!r} is not 'base64 rank'; "
                "give a tiktoken tokenizer.model or a Hugging Face tokenizer.json, or train: {vocab: ...}"
            ) from error
        if not in_order:
            raise ValueError(f"tokenizer.use: {name}, line {number + 1}: rank {int(rank)} where {number} is expected")
    return check_vocabulary(base, name)


def check_vocabulary(base: list[bytes], name: str) -> list[bytes]:
    """Return `base`. Raises ValueError unless it has every single byte and no token twice."""
    missing = 256 - len({token for token in base if len(token) == 1})
    if missing or len(set(base)) != len(base):
        raise ValueError(
            f"tokenizer.use: {name}: {missing} of 256 single bytes missing, {len(base) - len(set(base))} tokens twice; "
            "the file is damaged or not a byte-level BPE; give another one"
        )
    return base
