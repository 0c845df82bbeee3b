"""Byte-level BPE in the Llama 3 form: one list of byte strings, ranked; 256 special tokens after it.

The ranks are the tokenizer. Ids, the tiktoken file and the Hugging Face file are all derived from them, so a vocabulary
trained here and the published one are the same kind of thing. One text is encoded by tiktoken, many by whatever passes
the gate of parity.py; neither knows a special token, so that no text, however hostile, can produce one;
`<|begin_of_text|>` and its like are put in by id. What this gives up: a vocabulary that is not plain ranked BPE
(SentencePiece, WordPiece) cannot be loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import Tokenizer as Trainable

from llama3.data.text.words import WORD
from llama3.recipe.base import DOMAINS, Domain
from llama3.recipe.schema import Recipe
from llama3.tokens.adversarial_strings import random_strings
from llama3.tokens.documents import first_documents, read_texts
from llama3.tokens.encoder import Encoder, Flat, Ids, TiktokenEncoder, encoder_for
from llama3.tokens.hf_tokenizer import BYTE, CHARACTER, hugging_face_config, hugging_face_json
from llama3.tokens.vocabulary import PATTERN, PLACES, checked, parse_tiktoken, special_tokens, tiktoken_bytes
from storage.filesystem import filesystem_of, is_local, local_path, write_atomic

# Training of a vocabulary: the `tokenizers` library's BPE trainer behind the Llama 3 cutting pattern.
#
# It is the slow but reproducible choice: 145 MB of text to 32,000 tokens in 44 s on two cores, the same texts
# always to the same vocabulary. gigatoken's trainer is about 12 times as fast but cuts text by another pattern.
# What this gives up: all distinct words of the sample are in memory at once.


def train_bpe(texts: Iterable[str], vocab: int) -> list[bytes]:
    """Return `vocab` tokens learnt from `texts`, in the order of their ranks.

    Raises ValueError if `vocab` is below 256 or the texts hold too few repeated pairs to fill it.
    """
    if vocab < 256:
        raise ValueError(f"tokenizer.train.vocab: {vocab} is below 256, the number of bytes; raise it")
    trainable = Trainable(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    trainable.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, min_frequency=2, show_progress=False, initial_alphabet=list(CHARACTER.values())
    )
    trainable.train_from_iterator(texts, trainer)
    return _in_order_of_merging(trainable.get_vocab(), vocab)


def _in_order_of_merging(learnt: dict[str, int], vocab: int) -> list[bytes]:
    if len(learnt) < vocab:
        raise ValueError(
            f"tokenizer.train.vocab: {vocab} tokens asked, but the text repeats only enough for {len(learnt)}; "
            f"add text, raise tokenizer.train.sample, or lower vocab to {len(learnt)}"
        )
    return [bytes(BYTE[character] for character in token) for token in sorted(learnt, key=learnt.__getitem__)]


# How well a tokenizer compresses: bytes and characters per token, and tokens per word, on held-out documents.
#
# Llama 3 reports characters per token (3.17 to 3.94 in English against Llama 2, Llama 3 paper 3.2), which says what
# a token budget holds in text; tokens per word ("fertility") says how far a language is broken up. Languages are
# compared over all domains but code, whose tokens are no language's. What this gives up: a word is ours
# (llama3/data/text/words.py), so Chinese, Japanese and Thai count characters, and numbers compare with published
# ones only roughly.

DOCUMENTS = 256
"""Documents of each domain that are looked at."""
COUNTS = ("tokens", "bytes", "characters", "words")


def held_out(folder: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """Return the first held-out documents (domain, text, language) of every domain that has sources."""
    return [
        {"domain": domain, **document}
        for domain in DOMAINS
        if recipe.sources.get(domain)
        for document in first_documents(folder, domain, DOCUMENTS, ["text", "language"])
    ]


def ratios(documents: Sequence[dict[str, Any]], tokens: Sequence[int]) -> dict[str, Any]:
    """Return ratios for `documents` (domain, text, language), whose token counts are `tokens`, rounded to 4 digits.

    `bytes_per_token` and `characters_per_token` by domain; `characters_per_token_by_language` and
    `tokens_per_word_by_language`. None where there is nothing to divide by.
    """
    domains: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    languages: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    for document, count in zip(documents, tokens, strict=True):
        _add(domains[document["domain"]], document["text"], count)
        if document["domain"] != "code":
            _add(languages[document["language"]], document["text"], count)
    return {
        "bytes_per_token": _each(domains, "bytes", "tokens"),
        "characters_per_token": _each(domains, "characters", "tokens"),
        "characters_per_token_by_language": _each(languages, "characters", "tokens"),
        "tokens_per_word_by_language": _each(languages, "tokens", "words"),
    }


def _add(counts: dict[str, int], text: str, tokens: int) -> None:
    new = (tokens, len(text.encode()), len(text), sum(1 for _ in WORD.finditer(text)))
    for name, number in zip(COUNTS, new, strict=True):
        counts[name] += number


def _each(groups: dict[str, dict[str, int]], upper: str, lower: str) -> dict[str, float | None]:
    return {
        name: round(counts[upper] / counts[lower], 4) if counts[lower] else None
        for name, counts in sorted(groups.items())
    }


# A vocabulary out of a Hugging Face `tokenizer.json`, if it is the kind of tokenizer that Llama 3 has.
#
# The file can describe nearly anything; we take byte-level BPE with the Llama 3 cutting pattern, whose ids then
# follow from the ranks alone. Whether its merges agree with the ranks is found by encoding probes with the
# `tokenizers` library (every token's text, tokens side by side, hostile strings): about 4 s for 128,000 tokens.
# What this gives up: names and ids of special tokens are ours (Llama 3.1); a file that puts one of those with a
# meaning elsewhere is refused.

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


MODEL_FILE = "tokenizer.model"


class Tokenizer:
    """Text to ids and back. `base` is the vocabulary: token of every rank, as bytes."""

    def __init__(self, base: Sequence[bytes]) -> None:
        self.base = tuple(base)
        self.specials = special_tokens()
        self._reference = TiktokenEncoder(self.base)
        self._encoder: Encoder | None = None

    @property
    def rows(self) -> int:
        """Ids there are: base and special; the height of the embedding."""
        return len(self.base) + len(self.specials)

    @property
    def begin(self) -> int:
        """Id of `<|begin_of_text|>`."""
        return len(self.base) + PLACES["<|begin_of_text|>"]

    @property
    def end(self) -> int:
        """Id of `<|end_of_text|>`."""
        return len(self.base) + PLACES["<|end_of_text|>"]

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that decides an id: cutting pattern, ranks, special tokens."""
        parts = (PATTERN.encode(), tiktoken_bytes(self.base), "\n".join(self.specials).encode())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`: base ids only, whatever it spells."""
        return self._reference.encode(text)

    def encode_batch(self, texts: pa.Array | Sequence[str], *, threads: int = 1) -> list[Ids]:
        """Return the ids of each text, as `encode` gives them, as uint32 arrays."""
        return self._encoder_for(texts).encode_batch(texts, threads=threads)

    def encode_flat(self, texts: pa.Array | Sequence[str], *, threads: int = 1) -> Flat:
        """Return the ids of all texts in one array, and len(texts) + 1 offsets; a text is ids[offsets[i]:offsets[i+1]].

        `texts` is an Arrow array of strings (best: large_string, taken without a copy) or a sequence of str. Raises
        ValueError if one is null.
        """
        return self._encoder_for(texts).encode_flat(texts, threads=threads)

    def _encoder_for(self, texts: pa.Array | Sequence[str]) -> Encoder:
        """Return the encoder for many texts, chosen at the first call; `texts` are then the gate's sample."""
        if self._encoder is None:
            self._encoder = encoder_for(self, texts)
        return self._encoder

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of `ids`; special tokens are left out, or with `special` written by name.

        Bytes that are not UTF-8 (a character cut in two) become U+FFFD. Raises ValueError for an id out of range.
        """
        return b"".join(self._bytes(token, special) for token in ids).decode("utf-8", errors="replace")

    def _bytes(self, token: int, special: bool) -> bytes:
        if 0 <= token < len(self.base):
            return self.base[token]
        if not len(self.base) <= token < self.rows:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.rows} rows; is this its tokenizer?")
        return self.specials[token - len(self.base)].encode() if special else b""

    def save(self, folder: Path) -> None:
        """Write `tokenizer.model` (tiktoken), `tokenizer.json` and `tokenizer_config.json` (Hugging Face)."""
        write_atomic(folder / MODEL_FILE, tiktoken_bytes(self.base))
        write_atomic(folder / "tokenizer.json", hugging_face_json(self.base, self.specials, PATTERN))
        write_atomic(folder / "tokenizer_config.json", hugging_face_config(self.specials))

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Return the tokenizer that `save` wrote into `folder`. Raises ValueError if it is missing or broken."""
        return use_tokenizer(folder / MODEL_FILE)


def use_tokenizer(path: Path | str) -> Tokenizer:
    """Return the tokenizer in `path` (a path or a URI): a tiktoken file or a Hugging Face `tokenizer.json`.

    Raises ValueError if it cannot be read, is another format or kind, or does not rank every single byte.
    """
    uri = str(path)
    try:
        data: bytes = filesystem_of(uri).cat_file(str(local_path(uri)) if is_local(uri) else uri)
    except OSError as error:
        raise ValueError(f"tokenizer.use: {path} cannot be read ({error}); give a tiktoken tokenizer.model") from error
    parse = parse_hugging_face if data.lstrip().startswith(b"{") else parse_tiktoken
    return Tokenizer(parse(data, uri))


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Return a tokenizer of `vocab` base tokens learnt from `texts`; the same texts give the same tokenizer.

    Raises ValueError if `vocab` is below 256 or the texts hold too few repeated pairs to fill it.
    """
    return Tokenizer(train_bpe(texts, vocab))


def make_tokenizer(recipe: Recipe, documents: Path, folder: Path) -> dict[str, Any]:
    """Train or load the tokenizer that `recipe` asks for and save it into `folder`.

    Text to learn from is the first training documents of each domain, in the order of their ids, in the shares of
    `tokenizer.train.mix`; sources that stand apart give none, so that a tokenizer does not depend on candidates.
    Returns facts: vocab, rows, digest, sample_bytes by domain, and on held-out documents what `fertility.ratios` gives.
    Raises ValueError as `train_tokenizer` and `use_tokenizer` do.
    """
    sample = dict.fromkeys(recipe.sources, 0)
    if recipe.tokenizer.train is None:
        tokenizer = use_tokenizer(str(recipe.tokenizer.use))
    else:
        tokenizer = train_tokenizer(_sample(recipe, documents, sample), recipe.tokenizer.train.vocab)
    tokenizer.save(folder)
    rows = held_out(documents, recipe)
    _, offsets = tokenizer.encode_flat([row["text"] for row in rows])
    return {
        "vocab": len(tokenizer.base),
        "rows": tokenizer.rows,
        "digest": tokenizer.digest,
        "sample_bytes": sample,
        **ratios(rows, (offsets[1:] - offsets[:-1]).tolist()),
    }


def _sample(recipe: Recipe, documents: Path, counts: dict[Domain, int]) -> Iterator[str]:
    """Yield the texts to learn from and add their bytes to `counts`."""
    assert recipe.tokenizer.train is not None
    for domain, share in recipe.tokenizer_mix.items():
        asked, apart = int(share * recipe.tokenizer.train.sample), recipe.places_apart(domain)
        for text in read_texts(documents, domain, "train", asked, apart):
            counts[domain] += len(text.encode())
            yield text
