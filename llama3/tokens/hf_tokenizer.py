"""Write a tokenizer as the two files that Hugging Face libraries read, with the same ids for the same text.

`tokenizer.json` needs merges, tiktoken has only ranks. All pairs of tokens that form a token are listed in the order of
its rank, and whole words are looked up first (`ignore_merges`). This equals tiktoken's rule, and the published Llama 3
file is written the same way (280,147 merges, 9 MB).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HuggingFaceTokenizer

_VISIBLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
CHARACTER = {byte: chr(byte) if byte in _VISIBLE else chr(256 + _HIDDEN.index(byte)) for byte in range(256)}
"""Byte -> its character in a byte-level vocabulary, as in GPT-2: visible bytes map to themselves."""
BYTE = {character: byte for byte, character in CHARACTER.items()}


def hugging_face_json(base: Sequence[bytes], specials: Sequence[str], pattern: str) -> str:
    """Return `tokenizer.json` for the vocabulary `base` (token of each rank) followed by `specials`."""
    texts = _texts(base)
    vocabulary = {text: rank for rank, text in enumerate(texts)}
    tokenizer = HuggingFaceTokenizer(models.BPE(vocab=vocabulary, merges=_merges(texts), ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    set_special_tokens(tokenizer, specials)
    return str(tokenizer.to_str(pretty=False))


def set_special_tokens(tokenizer: HuggingFaceTokenizer, specials: Sequence[str]) -> str:
    """Add `specials` after the vocabulary of `tokenizer`; return the first of them, with which it begins texts."""
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    begin = specials[0]
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{begin} $A",
                pair=f"{begin} $A {begin}:1 $B:1",
                special_tokens=[(begin, tokenizer.token_to_id(begin))],
            ),
        ]
    )
    return begin


def hugging_face_config(specials: Sequence[str], template: str = "") -> str:
    """Return `tokenizer_config.json`, with the chat template of a model trained on conversations."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[0],
        "eos_token": specials[1],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if template:
        config |= {"eos_token": "<|eot_id|>", "chat_template": template}
    return json.dumps(config, indent=2) + "\n"


def byte_level_json(base: Sequence[bytes], pattern: str) -> str:
    """Return a `tokenizer.json` of `base` without special tokens (2 s for 128,000 tokens)."""
    texts = _texts(base)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE",
        "ignore_merges": True,
        "byte_fallback": False,
        "vocab": {text: rank for rank, text in enumerate(texts)},
        "merges": _merges(texts),
    }
    document: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    return json.dumps(document)


def _texts(base: Sequence[bytes]) -> list[str]:
    return [token.decode("latin-1").translate(CHARACTER) for token in base]


def _merges(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return all pairs of `texts` (in the order of rank) that form one of `texts`."""
    ranks = {text: rank for rank, text in enumerate(texts)}
    merges: list[tuple[str, str]] = []
    for text in texts:
        known = [(text[:cut], text[cut:]) for cut in range(1, len(text)) if text[:cut] in ranks and text[cut:] in ranks]
        if len(known) > 1:
            known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += known
    return merges
