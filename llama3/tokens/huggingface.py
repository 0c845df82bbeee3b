"""The tokenizer as the two files that Hugging Face libraries read, with the same ids for the same text.

`tokenizer.json` lists merges where tiktoken has only ranks. Every way to build a token from two others is listed, in
the order of the token's rank, and whole words are looked up first (`ignore_merges`): that is tiktoken's rule written
as merges, and how the published Llama 3 file was made. What this gives up: more merges than tokens (280,147 for the
published vocabulary), so the file is about 9 MB there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HuggingFaceTokenizer


def _printable() -> dict[int, str]:
    """Return GPT-2's character for each byte: itself where that is visible, else the next one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)}


CHARACTER = _printable()
"""Byte -> character that stands for it in a byte-level vocabulary."""


def hugging_face_json(base: Sequence[bytes], specials: Sequence[str], pattern: str) -> str:
    """Return `tokenizer.json` for the vocabulary `base` (token of each rank) followed by `specials`."""
    vocabulary = {_text(token): rank for rank, token in enumerate(base)}
    tokenizer = HuggingFaceTokenizer(models.BPE(vocab=vocabulary, merges=_merges(base), ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
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
    return str(tokenizer.to_str(pretty=False))


def hugging_face_config(specials: Sequence[str]) -> str:
    """Return `tokenizer_config.json`."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[0],
        "eos_token": specials[1],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return json.dumps(config, indent=2) + "\n"


def _text(token: bytes) -> str:
    return "".join(CHARACTER[byte] for byte in token)


def _merges(base: Sequence[bytes]) -> list[tuple[str, str]]:
    ranks = {token: rank for rank, token in enumerate(base)}
    merges: list[tuple[str, str]] = []
    for token in base:
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(left, right) for left, right in halves if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(_text(left), _text(right)) for left, right in known]
    return merges
