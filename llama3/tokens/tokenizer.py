"""Train, load, save and apply a byte-level BPE tokenizer in the Llama 3 format.

A tokenizer is a ranked list of byte strings followed by 256 special tokens; ids, the tiktoken file and the Hugging Face
files are derived from it. Encoders do not know special tokens, so text cannot produce one; callers insert them by id.
SentencePiece and WordPiece vocabularies cannot be loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import Tokenizer as Trainable

from herd.llama3.data.text.words import WORD
from herd.llama3.recipe.base import DOMAINS, Domain
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.adversarial_strings import random_strings
from herd.llama3.tokens.documents import first_documents, read_texts
from herd.llama3.tokens.encoder import Encoder, Flat, Ids, TiktokenEncoder, encoder_for
from herd.llama3.tokens.hf_tokenizer import BYTE, CHARACTER, hugging_face_config, hugging_face_json
from herd.llama3.tokens.vocabulary import (
    PATTERN,
    PLACES,
    check_vocabulary,
    parse_tiktoken,
    special_tokens,
    tiktoken_bytes,
)
from herd.storage.filesystem import filesystem_of, is_local, local_path, write_atomic

MODEL_FILE = "tokenizer.model"
DOCUMENTS = 256
"""Documents of each domain on which compression is measured."""
COUNTS = ("tokens", "bytes", "characters", "words")
PROBES = 5_000
"""Adversarial strings that are encoded to compare merges with ranks."""
APART = 7_919
"""Distance in ranks between two tokens that are joined to a probe."""


# Training


def train_bpe(texts: Iterable[str], vocab: int) -> list[bytes]:
    """Return `vocab` tokens learned from `texts`, in the order of their ranks.

    Raises ValueError if `vocab` is below 256 or the texts hold too few repeated pairs to fill it.
    """
    if vocab < 256:
        raise ValueError(f"tokenizer.train.vocab: {vocab} is below 256, the number of bytes; raise it")
    # `tokenizers` is reproducible: 145 MB of text to 32,000 tokens in 44 s on two cores, with all distinct words in
    # memory. gigatoken's trainer is about 12 times as fast but splits text by another pattern.
    trainable = Trainable(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    trainable.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, min_frequency=2, show_progress=False, initial_alphabet=list(CHARACTER.values())
    )
    trainable.train_from_iterator(texts, trainer)
    ranks = trainable.get_vocab()
    if len(ranks) < vocab:
        raise ValueError(
            f"tokenizer.train.vocab: {vocab} tokens requested, but the text repeats only enough for {len(ranks)}; "
            f"add text, raise tokenizer.train.sample, or lower vocab to {len(ranks)}"
        )
    return [bytes(BYTE[character] for character in token) for token in sorted(ranks, key=ranks.__getitem__)]


# Compression on held-out documents: characters per token (Llama 3 paper, section 3.2) and tokens per word ("fertility")


def read_validation_texts(folder: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """Return the first held-out documents (domain, text, language) of every domain that has sources."""
    return [
        {"domain": domain, **document}
        for domain in DOMAINS
        if recipe.sources.get(domain)
        for document in first_documents(folder, domain, DOCUMENTS, ["text", "language"])
    ]


def token_ratios(documents: Sequence[dict[str, Any]], tokens: Sequence[int]) -> dict[str, Any]:
    """Return ratios for `documents` (domain, text, language), whose token counts are `tokens`, rounded to 4 digits.

    `bytes_per_token` and `characters_per_token` by domain; `characters_per_token_by_language` and
    `tokens_per_word_by_language` over all domains but code. None where the divisor is 0. Words follow `data.text.words`
    (Chinese, Japanese and Thai count characters), so compare with published fertilities only roughly.
    """
    domains: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    languages: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    for document, token_count in zip(documents, tokens, strict=True):
        text = document["text"]
        counts = (token_count, len(text.encode()), len(text), sum(1 for _ in WORD.finditer(text)))
        totals = [domains[document["domain"]]]
        if document["domain"] != "code":
            totals.append(languages[document["language"]])
        for group in totals:
            for name, count in zip(COUNTS, counts, strict=True):
                group[name] += count

    def ratio(groups: dict[str, dict[str, int]], upper: str, lower: str) -> dict[str, float | None]:
        return {
            name: round(counts[upper] / counts[lower], 4) if counts[lower] else None
            for name, counts in sorted(groups.items())
        }

    return {
        "bytes_per_token": ratio(domains, "bytes", "tokens"),
        "characters_per_token": ratio(domains, "characters", "tokens"),
        "characters_per_token_by_language": ratio(languages, "characters", "tokens"),
        "tokens_per_word_by_language": ratio(languages, "tokens", "words"),
    }


# Hugging Face `tokenizer.json`: accepted if it is byte-level BPE with the Llama 3 pattern, whose ids follow from ranks


def parse_hugging_face(data: bytes, name: str) -> list[bytes]:
    """Return the token of every rank in the `tokenizer.json` `data`.

    Raises ValueError, with `name` and the difference, unless it gives the ids that tiktoken gives with these ranks, and
    has the special tokens of Llama 3.1 at their ids.
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
    base = check_vocabulary(_base_tokens(document, name), name)
    for token in document.get("added_tokens") or []:
        offset = PLACES.get(token["content"])
        if offset is not None and token["id"] != len(base) + offset:
            raise ValueError(
                f"tokenizer.use: {name}: {token['content']} has id {token['id']}, not {len(base) + offset}"
            )
    _check_merges(document, base, name)
    return base


def _faults(document: Any) -> Iterator[str]:
    """Yield each setting that differs from Llama 3's."""
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
        yield "model.vocab is not a mapping of tokens to ids"
    if document.get("normalizer"):
        yield f"normalizer is {document['normalizer'].get('type')}, not empty"
    pre_tokenizer = document.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") for step in steps]
    if kinds != ["Split", "ByteLevel"]:
        yield f"pre_tokenizer is {kinds}, not ['Split', 'ByteLevel']"
        return
    split, byte_level = steps
    pattern = split.get("pattern", {}).get("Regex")
    if pattern != PATTERN:
        yield f"pre_tokenizer splits at {pattern!r}, not at {PATTERN!r}"
    if str(split.get("behavior")).lower() != "isolated" or split.get("invert"):
        yield f"pre_tokenizer.behavior is {split.get('behavior')} (invert {split.get('invert')}), not Isolated"
    for key in ("add_prefix_space", "use_regex"):
        if byte_level.get(key, True):
            yield f"pre_tokenizer.{key} is true, not false"


def _base_tokens(document: dict[str, Any], name: str) -> list[bytes]:
    """Return the base tokens in the order of their ids, without added tokens."""
    added = {token["content"] for token in document.get("added_tokens") or []}
    ids = {text: rank for text, rank in document["model"]["vocab"].items() if text not in added}
    texts = sorted(ids, key=ids.__getitem__)
    gap = next((rank for rank, text in enumerate(texts) if ids[text] != rank), None)
    if gap is not None:
        raise ValueError(
            f"tokenizer.use: {name}: id {ids[texts[gap]]} ({texts[gap]!r}) where {gap} is expected; ids of model.vocab "
            "without added tokens must run from 0 without a gap"
        )
    try:
        return [bytes(BYTE[character] for character in text) for text in texts]
    except KeyError as error:
        raise ValueError(f"tokenizer.use: {name}: {error} in model.vocab is not a byte-level character") from error


def _check_merges(document: dict[str, Any], base: Sequence[bytes], name: str) -> None:
    """Compare the ids of the `tokenizers` library with tiktoken's on probes (about 4 s for 128,000 tokens).

    Probes are the text of every token, pairs of tokens, and adversarial strings.
    """
    bare = {**document, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    library, ours = HuggingFaceTokenizer.from_str(json.dumps(bare)), TiktokenEncoder(base)
    tokens: list[str] = []
    for token in base:
        with suppress(UnicodeDecodeError):
            tokens.append(token.decode())
    pairs = (token + tokens[(number * APART) % len(tokens)] for number, token in enumerate(tokens))
    probes = [*tokens, *pairs, *random_strings(PROBES)]
    for text, ids in zip(probes, ours.encode_batch(probes), strict=True):
        theirs = library.encode(text, add_special_tokens=False).ids
        if theirs != ids.tolist():
            raise ValueError(
                f"tokenizer.use: {name}: its merges do not follow its ranks: {text[:40]!r} becomes {theirs[:8]}, "
                f"by rank {ids[:8].tolist()}; give the tiktoken tokenizer.model it was made from"
            )


class Tokenizer:
    """Encodes text as ids and decodes ids. `base` is the vocabulary: the bytes of the token of every rank."""

    def __init__(self, base: Sequence[bytes]) -> None:
        self.base = tuple(base)
        self.specials = special_tokens()
        self._reference = TiktokenEncoder(self.base)
        self._encoder: Encoder | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids, base and special."""
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
        """SHA-256 (hex) of everything that determines an id: split pattern, ranks, special tokens."""
        inputs = (PATTERN.encode(), tiktoken_bytes(self.base), "\n".join(self.specials).encode())
        return hashlib.sha256(b"\0".join(inputs)).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`: only base ids, even for text such as `<|end_of_text|>`."""
        return self._reference.encode(text)

    def encode_batch(self, texts: pa.Array | Sequence[str], *, threads: int = 1) -> list[Ids]:
        """Return the ids of each text, as `encode` gives them, as uint32 arrays."""
        return self._encoder_for(texts).encode_batch(texts, threads=threads)

    def encode_flat(self, texts: pa.Array | Sequence[str], *, threads: int = 1) -> Flat:
        """Return the ids of all texts in one array, and len(texts) + 1 offsets; a text is ids[offsets[i]:offsets[i+1]].

        `texts` is an Arrow array of strings (large_string is not copied) or a sequence of str. Raises ValueError if one
        is null.
        """
        return self._encoder_for(texts).encode_flat(texts, threads=threads)

    def _encoder_for(self, texts: pa.Array | Sequence[str]) -> Encoder:
        """Return the encoder of batches; the first call chooses it, with `texts` as the sample of the parity check."""
        if self._encoder is None:
            self._encoder = encoder_for(self, texts)
        return self._encoder

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of `ids`; special tokens are left out, or with `special` written by name.

        Bytes that are not UTF-8 (a character cut in two) become U+FFFD. Raises ValueError for an id out of range.
        """

        def token_bytes(token: int) -> bytes:
            if 0 <= token < len(self.base):
                return self.base[token]
            if not len(self.base) <= token < self.vocab_size:
                raise ValueError(
                    f"token id {token} is not below vocab_size {self.vocab_size}; use the tokenizer of these ids"
                )
            return self.specials[token - len(self.base)].encode() if special else b""

        return b"".join(map(token_bytes, ids)).decode("utf-8", errors="replace")

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
    """Return a tokenizer of `vocab` base tokens learned from `texts`; deterministic. Raises as `train_bpe`."""
    return Tokenizer(train_bpe(texts, vocab))


def make_tokenizer(recipe: Recipe, documents: Path, folder: Path) -> dict[str, Any]:
    """Train or load the tokenizer of `recipe` and save it into `folder`.

    The training sample is the first training documents of each domain, in the order of their ids, in the shares of
    `tokenizer.train.mix`. Named sources are left out, so that the tokenizer does not depend on candidate sources.
    Returns vocab, vocab_size, digest, sample_bytes by domain, and `token_ratios` on held-out documents. Raises
    ValueError as `train_tokenizer` and `use_tokenizer` do.
    """
    sample_bytes: dict[Domain, int] = dict.fromkeys(recipe.sources, 0)

    def sample(size: int) -> Iterator[str]:
        for domain, share in recipe.tokenizer_mix.items():
            for text in read_texts(documents, domain, "train", int(share * size), recipe.places_apart(domain)):
                sample_bytes[domain] += len(text.encode())
                yield text

    if recipe.tokenizer.train is None:
        tokenizer = use_tokenizer(str(recipe.tokenizer.use))
    else:
        tokenizer = train_tokenizer(sample(recipe.tokenizer.train.sample), recipe.tokenizer.train.vocab)
    tokenizer.save(folder)
    examples = read_validation_texts(documents, recipe)
    _, offsets = tokenizer.encode_flat([example["text"] for example in examples])
    return {
        "vocab": len(tokenizer.base),
        "vocab_size": tokenizer.vocab_size,
        "digest": tokenizer.digest,
        "sample_bytes": sample_bytes,
        **token_ratios(examples, (offsets[1:] - offsets[:-1]).tolist()),
    }
