"""A vocabulary out of a Hugging Face `tokenizer.json`, if it is the kind of tokenizer that Llama 3 has.

The file can describe nearly anything; we take byte-level BPE with the Llama 3 cutting pattern, whose ids then follow
from the ranks alone. Whether its merges agree with the ranks is found by encoding probes with the `tokenizers` library
(every token's text, tokens side by side, hostile strings): about 4 s for 128,000 tokens. What this gives up: names and
ids of special tokens are ours (Llama 3.1); a file that puts one of those with a meaning elsewhere is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer as HuggingFaceTokenizer

from llama3.tokens.encoder import TiktokenEncoder
from llama3.tokens.hostile import random_strings
from llama3.tokens.huggingface import BYTE
from llama3.tokens.vocabulary import PATTERN, PLACES, checked

PROBES = 5_000
"""Hostile strings that are encoded to compare merges with ranks."""
APART = 7_919
"""Distance, in ranks, of two tokens that are probed side by side."""


def parse_hugging_face(data: bytes, name: str) -> list[bytes]:
    """Return the token of every rank in the `tokenizer.json` `data`.

    Raises ValueError, with `name` and what differs, unless it gives the ids that tiktoken gives with these ranks.
    """
    try:
        document = json.loads(data)
    except ValueError as error:
        raise ValueError(
            f"tokenizer.use: {name} is not JSON ({error}); give a tokenizer.json or a model file"
        ) from error
    faults = list(_faults(document))
    if faults:
        raise ValueError(
            f"tokenizer.use: {name} is not byte-level BPE as in Llama 3: {'; '.join(faults)}; "
            "give another tokenizer, or train: {vocab: ...}"
        )
    base = checked(_ranked(document, name), name)
    _check_specials(document, len(base), name)
    _check_merges(document, base, name)
    return base


def _faults(document: Any) -> Iterator[str]:
    """Yield each setting that is not Llama 3's."""
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        yield "there is no model"
        return
    model = document["model"]
    for key, due in (("type", "BPE"), ("byte_fallback", False), ("dropout", None), ("fuse_unk", False)):
        if (model.get(key) or None) != (due or None):
            yield f"model.{key} is {model[key]!r}, not {due!r}"
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            yield f"model.{key} is {model[key]!r}, not empty"
    if not isinstance(model.get("vocab"), dict):
        yield "model.vocab is no table of tokens"
    if document.get("normalizer"):
        yield f"normalizer is {document['normalizer'].get('type')}, not empty"
    yield from _cutting_faults(document.get("pre_tokenizer") or {})


def _cutting_faults(pre_tokenizer: dict[str, Any]) -> Iterator[str]:
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") for step in steps]
    if kinds != ["Split", "ByteLevel"]:
        yield f"pre_tokenizer is {kinds}, not ['Split', 'ByteLevel']"
        return
    split, byte_level = steps
    pattern = split.get("pattern", {}).get("Regex")
    if pattern != PATTERN:
        yield f"pre_tokenizer cuts at {pattern!r}, not at {PATTERN!r}"
    if str(split.get("behavior")).lower() != "isolated" or split.get("invert"):
        yield f"pre_tokenizer.behavior is {split.get('behavior')} (invert {split.get('invert')}), not Isolated"
    for key in ("add_prefix_space", "use_regex"):
        if byte_level.get(key, True):
            yield f"pre_tokenizer.{key} is true, not false"


def _ranked(document: dict[str, Any], name: str) -> list[bytes]:
    """Return the base tokens in the order of their ids, added tokens left out."""
    added = {token["content"] for token in document.get("added_tokens") or []}
    ids = {text: rank for text, rank in document["model"]["vocab"].items() if text not in added}
    texts = sorted(ids, key=ids.__getitem__)
    gap = next((place for place, text in enumerate(texts) if ids[text] != place), None)
    if gap is not None:
        raise ValueError(
            f"tokenizer.use: {name}: id {ids[texts[gap]]} ({texts[gap]!r}) where {gap} is due; ids of model.vocab "
            "without added tokens must run from 0 without a gap"
        )
    try:
        return [bytes(BYTE[character] for character in text) for text in texts]
    except KeyError as error:
        raise ValueError(f"tokenizer.use: {name}: {error} in model.vocab stands for no byte") from error


def _check_specials(document: dict[str, Any], base: int, name: str) -> None:
    for token in document.get("added_tokens") or []:
        due = PLACES.get(token["content"])
        if due is not None and token["id"] != base + due:
            raise ValueError(f"tokenizer.use: {name}: {token['content']} has id {token['id']}, not {base + due}")


def _check_merges(document: dict[str, Any], base: Sequence[bytes], name: str) -> None:
    """Compare the file as the `tokenizers` library reads it, without added tokens, with the ranks on probes."""
    bare = {**document, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    library, ours = HuggingFaceTokenizer.from_str(json.dumps(bare)), TiktokenEncoder(base)
    probes = list(_probes(base))
    for text, ids in zip(probes, ours.encode_batch(probes), strict=True):
        theirs = library.encode(text, add_special_tokens=False).ids
        if theirs != ids.tolist():
            raise ValueError(
                f"tokenizer.use: {name}: its merges do not follow its ranks: {text[:40]!r} becomes {theirs[:8]}, "
                f"by rank {ids[:8].tolist()}; give the tiktoken tokenizer.model it was made from"
            )


def _probes(base: Sequence[bytes]) -> Iterator[str]:
    tokens = [token.decode() for token in base if _is_text(token)]
    yield from tokens
    yield from (token + tokens[(place * APART) % len(tokens)] for place, token in enumerate(tokens))
    yield from random_strings(PROBES)


def _is_text(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True
