"""Read byte-level BPE tokenizers that are not in the Llama 3 format: other split patterns, merges and special tokens.

A tokenizer is a `tokenizer.json` of Hugging Face with the settings of the files beside it, or the metadata of a GGUF
file, which is turned into one. Vocabulary, merges and ids are checked before the `tokenizers` library reads them.
Tokenizers that are not byte-level, and settings that drop or change text (other than NFC), are errors that name them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer as HuggingFaceTokenizer

from herd.llama3.tokens.hf_tokenizer import BYTE
from herd.llama3.tokens.vocabulary import GPT2_PATTERN, PATTERNS

OWN = "herd"
"""Key of our settings in `tokenizer_config.json`: begin and end of a document, vocab_size."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
"""Published names of the token that ends a document. A model for chats often has another `eos_token`: of a turn."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Keys of `tokenizer_config.json` by which chat templates may write a token."""
MOST_IDS = 2**24
REQUIRED = {*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)}
"""Bytes that a vocabulary must have. Published ones lack control characters and bytes of unassigned planes; the
`tokenizers` library drops what it has no token for."""
GGUF_SPLITS = {
    **{"llama-bpe": "llama3", "gpt-2": "gpt2", "smollm": "smollm", "qwen2": "qwen2", "tekken": "tekken"},
}
"""`tokenizer.ggml.pre` -> name of the splits."""
WHOLE_WORDS = ("llama-bpe", "tekken")
"""Those for which llama.cpp looks up whole words before it merges (`ignore_merges`)."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Token types of GGUF."""


class GgufTable(NamedTuple):
    """The tokenizer of a GGUF file."""

    pre: str
    """`tokenizer.ggml.pre`, the name of the split pattern."""
    tokens: list[str]
    types: list[int]
    merges: list[str]


@dataclass(frozen=True)
class ByteLevelBPE:
    """A checked tokenizer."""

    document: Mapping[str, Any]
    """`tokenizer.json`."""
    tokens: tuple[bytes, ...]
    """Bytes of each id; empty for special tokens."""
    specials: Mapping[str, int]
    """All added tokens; encoders never make one from text."""
    splits: tuple[str, ...]
    """Regular expressions at which text is split, one after another."""
    begin: str | None
    """Special token that begins a text; None: the model was trained without one."""
    end: str
    """Special token after a document."""
    vocab_size: int
    """Rows of the embedding; more than the ids if it is padded."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`tokenizer_config.json`: `bos_token`, `eos_token` and `chat_template` are kept."""

    @cached_property
    def bare(self) -> str:
        """`tokenizer.json` without special tokens, which encodes text."""
        model = self.document["model"]
        vocabulary = {text: number for text, number in model["vocab"].items() if text not in self.specials}
        return json.dumps({**_library_document(self.document), "model": {**model, "vocab": vocabulary}})

    @property
    def template(self) -> str:
        """The chat template; empty: none."""
        return chat_template(self.settings)

    @property
    def kind(self) -> str:
        """Name of the published split pattern, or `other`."""
        return next((name for name, splits in PATTERNS.items() if splits == self.splits), "other")

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that determines an id."""
        model = self.document["model"]
        parts: dict[str, Any] = {
            "splits": self.splits,
            "normalizer": _kind(self.document.get("normalizer")),
            "whole_words": bool(model.get("ignore_merges")),
            "merges": [list(pair) for pair in merge_pairs(model["merges"])],
            "tokens": [token.decode("latin-1") for token in self.tokens],
            "specials": sorted(self.specials.items()),
            "document": [self.begin, self.end],
        }
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def gguf_table(self) -> GgufTable:
        """Return what a GGUF file holds. Raises ValueError if llama.cpp would give other ids."""
        model = self.document["model"]
        pre = next((pre for pre, name in GGUF_SPLITS.items() if name == self.kind), None)
        if pre is None:
            raise ValueError(
                f"format gguf: llama.cpp has no name for the split pattern {' then '.join(self.splits)[:80]!r}; the "
                f"patterns of {', '.join(GGUF_SPLITS)} are known: export as hf"
            )
        if bool(model.get("ignore_merges")) != (pre in WHOLE_WORDS) and (odd := self._unmerged()):
            raise ValueError(
                f"format gguf: llama.cpp {'merges before it looks' if pre not in WHOLE_WORDS else 'looks'} up whole "
                f"words for {pre}, which gives other ids for {odd!r}; export as hf"
            )
        texts = {number: text for text, number in {**model["vocab"], **self.specials}.items()}
        special = {token["id"]: token.get("special") for token in self.document.get("added_tokens") or []}
        tokens = [texts.get(number, f"[PAD{number}]") for number in range(self.vocab_size)]
        types = [NORMAL if number in texts else UNUSED for number in range(self.vocab_size)]
        for number, control in special.items():
            types[number] = CONTROL if control else USER_DEFINED
        return GgufTable(pre, tokens, types, [" ".join(pair) for pair in merge_pairs(model["merges"])])

    def _unmerged(self) -> str | None:
        """Return a token to which its merges do not lead, if there is one."""
        model = {**json.loads(self.bare)["model"], "ignore_merges": False}
        library = HuggingFaceTokenizer.from_str(
            json.dumps({**_library_document(self.document), "normalizer": None, "pre_tokenizer": None, "model": model})
        )
        texts = list(model["vocab"])
        found = zip(texts, library.encode_batch(texts, add_special_tokens=False), strict=True)
        return next((text for text, encoding in found if encoding.ids != [model["vocab"][text]]), None)

    def config(self, **settings: Any) -> str:
        """Return `tokenizer_config.json` with `settings` in place of those that were read."""
        kept = {key: self.settings[key] for key in (*NAMED_TOKENS, "chat_template") if self.settings.get(key)}
        own = {"begin": self.begin, "end": self.end, "vocab_size": self.vocab_size}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{"bos_token": self.begin, "eos_token": self.end, **kept, **settings},
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            OWN: own,
        }
        return json.dumps({key: value for key, value in config.items() if value is not None}, indent=2) + "\n"


def token_name(settings: Mapping[str, Any], key: str) -> str | None:
    """Return the token that `tokenizer_config.json` names as `key`, which it writes as text or as an object."""
    value = settings.get(key)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def chat_template(settings: Mapping[str, Any]) -> str:
    """Return the chat template of `tokenizer_config.json`, of several the one named `default`; empty: none."""
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = [each for each in value if isinstance(each, dict) and each.get("name") == "default"]
        value = named[0].get("template") if named else None
    return value if isinstance(value, str) else ""


def byte_level_bpe(document: Mapping[str, Any], settings: Mapping[str, Any], rows: Any, name: str) -> ByteLevelBPE:
    """Return the tokenizer of the `tokenizer.json` `document` and the `tokenizer_config.json` `settings`.

    `rows` is the `vocab_size` of a `config.json` beside them, if any. Raises ValueError, with `name` and the reason, if
    it is of another kind or damaged.
    """
    if faults := list(_faults(document)):
        raise ValueError(
            f"tokenizer.use: {name} is not a byte-level BPE that can be used: {'; '.join(faults)}; "
            "give another tokenizer, or train: {vocab: ...}"
        )

    def refuse(reason: str) -> ValueError:
        return ValueError(f"tokenizer.use: {name}: {reason}; the file is damaged, give another one")

    model = document["model"]
    specials = {token["content"]: token["id"] for token in document.get("added_tokens") or []}
    vocabulary = {**model["vocab"], **specials}
    if moved := [text for text in specials if model["vocab"].get(text, specials[text]) != specials[text]]:
        raise refuse(f"added token {moved[0]!r} has id {specials[moved[0]]}, in model.vocab {model['vocab'][moved[0]]}")
    for text, number in vocabulary.items():
        if type(number) is not int or not 0 <= number < MOST_IDS:
            raise refuse(f"{text[:40]!r} has id {str(number)[:40]}, which is not a whole number below {MOST_IDS:,}")
    texts = sorted(vocabulary, key=vocabulary.__getitem__)
    for number, text in enumerate(texts):
        if vocabulary[text] != number:
            twice = f" and {texts[number - 1]!r}" if vocabulary[text] < number else ""
            raise refuse(
                f"{text[:40]!r}{twice} has id {vocabulary[text]} where {number} is expected; ids must run from 0, none "
                "twice and without a gap"
            )
    try:
        tokens = tuple(b"" if text in specials else bytes(map(BYTE.__getitem__, text)) for text in texts)
    except KeyError as error:
        raise refuse(f"{error} in model.vocab is not a byte-level character") from error
    if missing := sorted(REQUIRED - {token[0] for token in tokens if len(token) == 1}):
        raise refuse(f"{len(missing)} of 256 single bytes missing, such as {missing[0]:#04x}")
    _check_merges(model, specials, refuse)
    begin, end = _document_ends(document, settings, specials, name)
    own = settings.get(OWN)
    rows = own.get("vocab_size") if isinstance(own, dict) else rows
    if rows is not None and (type(rows) is not int or not len(texts) <= rows < MOST_IDS):
        raise refuse(f"vocab_size is {str(rows)[:40]} for {len(texts)} tokens")
    result = ByteLevelBPE(
        {**document, "truncation": None, "padding": None},
        tokens,
        specials,
        tuple(_splits(document)),
        begin,
        end,
        rows or len(texts),
        settings,
    )
    try:
        HuggingFaceTokenizer.from_str(json.dumps(result.document))  # exports have it whole
        library = HuggingFaceTokenizer.from_str(result.bare)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        raise refuse(f"the tokenizers library cannot read it ({str(error)[:80]})") from error
    for encoding, text in zip(library.encode_batch([*specials], add_special_tokens=False), specials, strict=True):
        if any(not tokens[number] for number in encoding.ids):
            raise refuse(f"text can spell the special token {text!r}")
    return result


def _library_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `tokenizer.json` that encodes text alone."""
    without: dict[str, Any] = {"added_tokens": [], "post_processor": None, "decoder": None}
    return {"version": "1.0", **document, **without, "truncation": None, "padding": None}


def _kind(part: Any) -> Any:
    """Return the type of a part of `tokenizer.json`; that of its only member if it is a sequence; None if empty."""
    if isinstance(part, dict) and part.get("type") == "Sequence":
        lists = (part.get(key) for key in ("normalizers", "pretokenizers"))
        members: list[Any] = next((each for each in lists if isinstance(each, list)), [])
        return _kind(members[0]) if len(members) == 1 else [_kind(each) for each in members] or None
    return part.get("type") if isinstance(part, dict) else part


def _faults(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield each setting that we do not have."""
    model = document.get("model")
    if not isinstance(model, dict):
        yield "there is no model"
        return
    kind = model.get("type", "BPE")
    if kind != "BPE" or model.get("byte_fallback"):
        sentence = " (a SentencePiece kind)" if kind in ("Unigram", "BPE") else ""
        yield f"model.type is {kind}{' with byte_fallback' if model.get('byte_fallback') else ''}{sentence}, not BPE"
    for key in ("dropout", "fuse_unk", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            yield f"model.{key} is {model[key]!r}, not empty"
    if not isinstance(model.get("vocab"), dict):
        yield "model.vocab is not a mapping of tokens to ids"
    if not isinstance(model.get("merges"), list):
        yield "model.merges is not a list"
    if (normalizer := _kind(document.get("normalizer"))) not in (None, "NFC"):
        yield f"normalizer is {normalizer}, not empty or NFC"
    added = document.get("added_tokens") or []
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and token["content"] and "id" in token
        for token in added
    ):
        yield "added_tokens is not a list of tokens with content and id"
    elif plain := [each["content"] for each in added if not each.get("special") and not _is_marker(each["content"])]:
        yield f"added token {plain[0]!r} is ordinary text"
    try:
        list(_splits(document))
    except ValueError as error:
        yield str(error)


def _is_marker(text: str) -> bool:
    """Whether a person would only write `text` to mean the token, as `<think>`."""
    return len(text) > 2 and text[0] + text[-1] in ("<>", "[]") and not any(map(str.isspace, text))


def _splits(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the regular expressions of the pre-tokenizer. Raises ValueError if it does anything else."""
    part = document.get("pre_tokenizer") or {}
    steps = part.get("pretokenizers", [part]) if isinstance(part, dict) else []
    kinds = [step.get("type") if isinstance(step, dict) else None for step in steps]
    if not kinds or kinds[-1] != "ByteLevel" or not {*kinds[:-1]} <= {"Split", "Digits"}:
        raise ValueError(f"pre_tokenizer is {kinds}, not ByteLevel after Split or Digits")
    for step in steps[:-1]:
        if step["type"] == "Digits":
            yield r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
            continue
        pattern = step.get("pattern")
        if not isinstance(pattern, dict) or not isinstance(pattern.get("Regex"), str):
            raise ValueError(f"pre_tokenizer splits at {pattern!r}, not at a Regex")
        if str(step.get("behavior")).lower() != "isolated" or step.get("invert"):
            behavior = f"{step.get('behavior')} (invert {step.get('invert')})"
            raise ValueError(f"pre_tokenizer.behavior is {behavior}, not Isolated")
        yield pattern["Regex"]
    if steps[-1].get("add_prefix_space", True):
        raise ValueError("pre_tokenizer.add_prefix_space is true, not false")
    if steps[-1].get("use_regex", True):
        yield GPT2_PATTERN


def merge_pairs(merges: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield both parts of each merge, which files write as `a b` or as a list. Raises ValueError for another form."""
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ValueError(f"merge {str(merge)[:40]!r} is not two tokens")
        yield pair[0], pair[1]


def _check_merges(model: Mapping[str, Any], specials: Mapping[str, int], refuse: Any) -> None:
    """Raise an error if a merge has an unknown part or result, or no merge makes a token."""
    known = {text for text in model["vocab"] if text not in specials}
    merged = set()
    try:
        for left, right in merge_pairs(model["merges"]):
            for part in (left, right, left + right):
                if part not in known:
                    raise refuse(f"merge {f'{left} {right}'[:40]!r} needs {part[:40]!r}, which is no token")
            merged.add(left + right)
    except ValueError as error:
        raise (refuse(str(error)) if not str(error).startswith("tokenizer.use") else error) from None
    lost = [text for text in known if len(text) > 1 and text not in merged]
    if lost and not model.get("ignore_merges"):
        raise refuse(f"a merge is missing: none makes {lost[0][:40]!r}, nor {len(lost) - 1:,} more tokens")


def _document_ends(
    document: Mapping[str, Any], settings: Mapping[str, Any], specials: Mapping[str, int], name: str
) -> tuple[str | None, str]:
    """Return the special tokens that begin and end a document."""
    own = settings.get(OWN)
    if isinstance(own, dict) and own.get("begin") in (None, *specials) and own.get("end") in specials:
        return own["begin"], own["end"]
    begin = None
    processor = document.get("post_processor") or {}
    for step in processor.get("processors", [processor]) if isinstance(processor, dict) else []:
        if isinstance(step, dict) and step.get("type") == "TemplateProcessing":
            single = step.get("single")
            first = single[0].get("SpecialToken") if isinstance(single, list) and single else None
            begin = first.get("id") if isinstance(first, dict) else begin
    if settings.get("add_bos_token") is True:
        begin = token_name(settings, "bos_token") or begin
    if begin is not None and begin not in specials:
        raise ValueError(f"tokenizer.use: {name}: begins texts with {begin!r}, which is no added token; mend the file")
    eos = token_name(settings, "eos_token")
    end = next((text for text in (*ENDS, eos) if text in specials), None)
    if end is None:
        raise ValueError(
            f"tokenizer.use: {name}: has no token that ends a document ({', '.join(ENDS)}); name it as eos_token in "
            "tokenizer_config.json beside the file"
        )
    return begin, end


def gguf_document(metadata: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return `tokenizer.json`, `tokenizer_config.json` and vocab_size for the metadata of a GGUF file.

    Raises ValueError, with `name`, for a tokenizer of another kind or a split pattern that we do not know.
    """

    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.{key}", default)

    kind, pre = value("ggml.model"), value("ggml.pre")
    if kind != "gpt2":
        sentence = " (a SentencePiece kind)" if kind in ("llama", "t5", "gemma4") else ""
        raise ValueError(
            f"tokenizer.use: {name}: tokenizer.ggml.model is {kind!r}{sentence}, not 'gpt2'; give a byte-level BPE"
        )
    if pre not in GGUF_SPLITS:
        raise ValueError(
            f"tokenizer.use: {name}: tokenizer.ggml.pre is {pre!r}; the split patterns of {', '.join(GGUF_SPLITS)} are "
            "known: give the tokenizer.json of the model"
        )
    tokens, types, merges = (value(f"ggml.{key}") for key in ("tokens", "token_type", "merges"))
    types = types or [NORMAL] * len(tokens or [])
    if not isinstance(tokens, list) or not isinstance(merges, list) or len(tokens) != len(types):
        raise ValueError(f"tokenizer.use: {name}: has no tokens, types and merges of equal length; give another file")
    if odd := sorted({*types} - {NORMAL, CONTROL, USER_DEFINED, UNUSED}):
        raise ValueError(f"tokenizer.use: {name}: token type {odd[0]} is of a SentencePiece kind; give another file")
    rows = len(tokens)
    while tokens and types[len(tokens) - 1] == UNUSED:  # padding of the embedding
        tokens = tokens[:-1]
    added = [
        {
            **{"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False},
            **{"normalized": False, "special": types[number] == CONTROL},
        }
        for number, text in enumerate(tokens)
        if types[number] != NORMAL
    ]
    specials = {token["content"] for token in added}
    vocabulary = {text: number for number, text in enumerate(tokens) if text not in specials}
    if len(vocabulary) + len(specials) != len(tokens):
        raise ValueError(f"tokenizer.use: {name}: {len(tokens) - len(vocabulary) - len(specials)} tokens twice")
    settings: dict[str, Any] = {"chat_template": metadata.get("tokenizer.chat_template")}
    for key, named in zip(("bos", "eos", "unknown", "padding"), NAMED_TOKENS, strict=True):
        number = value(f"ggml.{key}_token_id")
        settings[named] = tokens[number] if type(number) is int and 0 <= number < len(tokens) else None
    settings["add_bos_token"] = value("ggml.add_bos_token", pre == "llama-bpe")
    model = {
        **{"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None},
        **{"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False},
        **{"ignore_merges": pre in WHOLE_WORDS, "vocab": vocabulary, "merges": merges},
    }
    begin = settings["bos_token"] if settings["add_bos_token"] else None
    document = {
        # the files do not say that Qwen composes characters
        **{"version": "1.0", "added_tokens": added, "normalizer": {"type": "NFC"} if pre == "qwen2" else None},
        "pre_tokenizer": pre_tokenizer(PATTERNS[GGUF_SPLITS[pre]]),
        "post_processor": begin
        and {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
            "special_tokens": {begin: {"id": begin, "ids": [tokens.index(begin)], "tokens": [begin]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": model,
    }
    return document, settings, rows


def pre_tokenizer(splits: Sequence[str]) -> dict[str, Any]:
    """Return the `pre_tokenizer` of `tokenizer.json` that splits text at `splits`, as published files write it."""
    built_in = splits[-1] == GPT2_PATTERN
    steps: list[dict[str, Any]] = [
        # Rust's tables of digits are newer than those of its regular expressions
        {"type": "Digits", "individual_digits": True}
        if pattern == r"\p{N}"
        else {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in (splits[:-1] if built_in else splits)
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": built_in})
    return {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]
