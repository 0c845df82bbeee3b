"""Train, load, save and apply byte-level BPE tokenizers.

In the Llama 3 format a tokenizer is a ranked list of byte strings followed by 256 special tokens; ids, the tiktoken
file and the Hugging Face files are derived from it. Others (see `byte_level`) are their `tokenizer.json`. Encoders do
not know special tokens, so text cannot produce one; callers insert them by id. SentencePiece and WordPiece vocabularies
cannot be loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from herd.llama3.tokens.byte_level import (
    CONTROL,
    NAMED_TOKENS,
    NORMAL,
    ByteLevelBPE,
    GgufTable,
    byte_level_bpe,
    gguf_document,
    pre_tokenizer,
    token_name,
)
from herd.llama3.tokens.chat_template import TEMPLATE, ChatTemplate, turn_end
from herd.llama3.tokens.documents import first_documents, read_texts
from herd.llama3.tokens.encoder import (
    Encoder,
    Flat,
    Ids,
    ReferenceEncoder,
    TiktokenEncoder,
    Vocabulary,
    encoder_for,
    reference_encoder,
)
from herd.llama3.tokens.hf_tokenizer import (
    BYTE,
    CHARACTER,
    byte_level_json,
    hugging_face_config,
    hugging_face_json,
    set_special_tokens,
)
from herd.llama3.tokens.vocabulary import (
    PATTERN,
    PATTERNS,
    PLACES,
    check_vocabulary,
    parse_tiktoken,
    special_tokens,
    tiktoken_bytes,
)
from herd.storage.digests import digest_file
from herd.storage.filesystem import filesystem_of, is_local, local_path, write_atomic
from herd.storage.gguf import read_gguf

MODEL_FILE = "tokenizer.model"
JSON_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
"""File of the chat template in a model folder; in ours it marks a model that was trained on conversations."""
MOST_BYTES = 2**28
"""Largest file of a tokenizer; Gemma's has 34 MB."""
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
    ranks = _train(texts, vocab, "llama3").get_vocab()
    return [bytes(map(BYTE.__getitem__, token)) for token in sorted(ranks, key=ranks.__getitem__)]


def _train(texts: Iterable[str], vocab: int, pattern: str) -> Trainable:
    """Return `vocab` tokens learned from `texts`, which are split at a published `pattern`, and their merges.

    Raises ValueError if `vocab` is below 256 or the texts hold too few repeated pairs to fill it.
    """
    if vocab < 256:
        raise ValueError(f"tokenizer.train.vocab: {vocab} is below 256, the number of bytes; raise it")
    # `tokenizers` is reproducible: 145 MB of text to 32,000 tokens in 44 s on two cores, with all distinct words in
    # memory. gigatoken's trainer is about 12 times as fast but splits text by another pattern.
    trainable = Trainable(models.BPE())
    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in PATTERNS[pattern]]
    trainable.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, min_frequency=2, show_progress=False, initial_alphabet=list(CHARACTER.values())
    )
    trainable.train_from_iterator(texts, trainer)
    if (size := trainable.get_vocab_size()) < vocab:
        raise ValueError(
            f"tokenizer.train.vocab: {vocab} tokens requested, but the text repeats only enough for {size}; "
            f"add text, raise tokenizer.train.sample, or lower vocab to {size}"
        )
    return trainable


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


# Hugging Face `tokenizer.json`: of the Llama 3 format if it has its pattern, and its ids follow from ranks


def parse_hugging_face(
    data: bytes, name: str, settings: Mapping[str, Any] | None = None, rows: Any = None
) -> Tokenizer:
    """Return the tokenizer in the `tokenizer.json` `data`; `settings` and `rows` are those of `byte_level_bpe`.

    Raises ValueError, with `name` and the reason, if it is damaged or of a kind that cannot be used.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"tokenizer.use: {name} is not JSON ({str(error)[:80]}); give a tokenizer.json or a model file"
        ) from error
    return _tokenizer(document, settings or {}, rows, name)


def _tokenizer(document: Mapping[str, Any], settings: Mapping[str, Any], rows: Any, name: str) -> Tokenizer:
    base = _llama3_tokens(document)
    return ByteLevelTokenizer(byte_level_bpe(document, settings, rows, name)) if base is None else Tokenizer(base)


def _llama3_tokens(document: Mapping[str, Any]) -> list[bytes] | None:
    """Return the token of every rank; None unless tiktoken with these ranks gives the ids of `document`.

    Added tokens are those of Llama 3.1 at their ids, or reserved ones in their place.
    """
    if any(_differences(document)):
        return None
    added = document.get("added_tokens") or []
    try:
        base = check_vocabulary(_base_tokens(document), "")
        named = dict(enumerate(special_tokens(), len(base)))
        for token in added:
            number, text = token["id"], token["content"]
            reserved = number in named and text.startswith("<|reserved_special_token_")
            if not (reserved or named.get(number) == text) or document["model"]["vocab"].get(text, number) != number:
                return None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return base if _ranks_decide(document, base) else None


def _differences(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield each part of a `tokenizer.json` that differs from Llama 3's."""
    model = document.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        yield "model"
        return
    for key, due in (("type", "BPE"), ("byte_fallback", False), ("dropout", None), ("fuse_unk", False)):
        if (model.get(key) or None) != (due or None):
            yield key
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix") or document.get("normalizer"):
        yield "normalizer"
    with_defaults = {"trim_offsets": True, "add_prefix_space": True, "use_regex": True}
    steps = (document.get("pre_tokenizer") or {}).get("pretokenizers") or [{}]
    split, byte_level = steps[0], {**with_defaults, **steps[-1]}
    found = [{**split, "behavior": str(split.get("behavior")).capitalize()}, {**byte_level, "trim_offsets": True}]
    if len(steps) != 2 or found != pre_tokenizer([PATTERN])["pretokenizers"]:
        yield "pre_tokenizer"


def _base_tokens(document: Mapping[str, Any]) -> list[bytes]:
    """Return the base tokens in the order of their ids, without added tokens. Raises ValueError for a gap."""
    added = {token["content"] for token in document.get("added_tokens") or []}
    ids = {text: rank for text, rank in document["model"]["vocab"].items() if text not in added}
    texts = sorted(ids, key=ids.__getitem__)
    if any(ids[text] != rank for rank, text in enumerate(texts)):
        raise ValueError("ids have a gap")
    return [bytes(BYTE[character] for character in text) for text in texts]


def _ranks_decide(document: Mapping[str, Any], base: Sequence[bytes]) -> bool:
    """Compare the ids of the `tokenizers` library with tiktoken's on probes (about 4 s for 128,000 tokens).

    Probes are the text of every token, pairs of tokens, and adversarial strings.
    """
    bare = {**document, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    try:
        library = HuggingFaceTokenizer.from_str(json.dumps(bare))
    except Exception:  # the only type that it raises, for a broken merge
        return False
    tokens: list[str] = []
    for token in base:
        with suppress(UnicodeDecodeError):
            tokens.append(token.decode())
    pairs = (token + tokens[(number * APART) % len(tokens)] for number, token in enumerate(tokens))
    probes = [*tokens, *pairs, *random_strings(PROBES)]
    due = TiktokenEncoder(base).encode_batch(probes)
    return all(
        library.encode(text, add_special_tokens=False).ids == ids.tolist()
        for text, ids in zip(probes, due, strict=True)
    )


class Tokenizer:
    """Encodes text as ids and decodes ids, in the Llama 3 format. `base` is the token of every rank."""

    tokens: Sequence[bytes]
    """Bytes of each id; empty for special tokens. Ids from `len(tokens)` on have no text."""
    specials: dict[str, int]
    """Name -> id of the special tokens."""
    vocab_size: int
    """Rows of the embedding: ids of text, special tokens, and padding if there is any."""
    begin: int | None
    """Special token that begins a prompt; None: the model was trained without one."""
    end: int
    """Special token that ends a document."""
    template = ""
    """Chat template of the model that the tokenizer comes from; empty: the built-in Llama 3 format."""
    template_tokens: Mapping[str, str]
    """`bos_token`, `eos_token` and others that the template may write by these names."""
    pattern = "llama3"
    """Name of the split pattern."""
    conversational = False
    """Whether the model was trained on conversations in the built-in format; then its texts may end as turns do."""

    def __init__(self, base: Sequence[bytes]) -> None:
        self.base = self.tokens = tuple(base)
        self.specials = {name: len(base) + offset for offset, name in enumerate(special_tokens())}
        self.vocab_size = len(base) + len(self.specials)
        self.begin, self.end = (len(base) + PLACES[name] for name in ("<|begin_of_text|>", "<|end_of_text|>"))
        self.template_tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
        self._encoder: Encoder | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """What encodes text."""
        return self.base

    @cached_property
    def _reference(self) -> ReferenceEncoder:
        return reference_encoder(self.vocabulary)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that determines an id: split pattern, ranks, special tokens."""
        inputs = (PATTERN.encode(), tiktoken_bytes(self.base), "\n".join(self.specials).encode())
        return hashlib.sha256(b"\0".join(inputs)).hexdigest()

    @property
    def start(self) -> int:
        """Id before the first token of a document: `begin`, or without one `end`, which the model saw there."""
        return self.end if self.begin is None else self.begin

    @cached_property
    def names(self) -> dict[int, str]:
        """Id -> name of the special tokens."""
        return {number: name for name, number in self.specials.items()}

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The chat template; None: the built-in Llama 3 format."""
        specials = tuple(sorted(self.specials, key=len, reverse=True))
        tokens = tuple(sorted(self.template_tokens.items()))
        return ChatTemplate(self.template, tokens, specials) if self.template else None

    @cached_property
    def turn_end(self) -> int:
        """Special token that ends a turn of the assistant. Raises ValueError for a template that fails."""
        name = turn_end(self.chat) if self.chat is not None else "<|eot_id|>"
        return self.specials.get(name or "", self.end)

    @property
    def ends(self) -> tuple[int, ...]:
        """Special tokens with which the model may end a text."""
        talks = self.conversational or self.chat is not None
        return (self.end, self.turn_end) if talks and self.turn_end != self.end else (self.end,)

    @cached_property
    def silent(self) -> tuple[int, ...]:
        """Ids below `len(tokens)` that have no text."""
        return tuple(number for number, token in enumerate(self.tokens) if not token)

    def text_of(self, token: int) -> bytes:
        """Return the bytes of an id; none for special tokens and padding."""
        return self.tokens[token] if token < len(self.tokens) else b""

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt: `begin`, if there is one, and the text; of an empty prompt at least `start`."""
        ids = self.encode(text)
        return [self.start, *ids] if self.begin is not None or not ids else ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`: only ids of text, even for text such as `<|end_of_text|>`."""
        return self._reference.encode(text)

    def summary(self) -> str:
        """Describe the tokenizer in a line."""
        names, texts = self.names, len(self.tokens) - len(self.silent)
        padding = self.vocab_size - texts - len(names)
        begin = "have no first token" if self.begin is None else f"begin with {names[self.begin]}"
        return (
            f"split pattern {self.pattern}, {texts:,} tokens of text, {len(names)} special"
            f"{f', {padding} of padding' if padding else ''}; prompts {begin}, documents end with {names[self.end]}"
        )

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of `text`, and the character of `text` in which each begins."""
        return self._reference.encode_with_starts(text)

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
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"token id {token} is not below vocab_size {self.vocab_size}; use the tokenizer of these ids"
                )
            return self.text_of(token) or (self.names.get(token, "").encode() if special else b"")

        return b"".join(map(token_bytes, ids)).decode("utf-8", errors="replace")

    def hugging_face_json(self) -> str:
        """Return `tokenizer.json`."""
        return hugging_face_json(self.base, list(self.specials), PATTERN)

    def hugging_face_config(self, template: str = "") -> str:
        """Return `tokenizer_config.json`, with the chat template of a model that was trained on conversations."""
        return hugging_face_config(list(self.specials), template)

    def gguf_table(self) -> GgufTable:
        """Return what a GGUF file holds: `llama-bpe` splits by our pattern and looks up whole words first."""
        table = json.loads(byte_level_json(self.base, PATTERN))["model"]
        merges = [" ".join(pair) for pair in table["merges"]]
        types = [NORMAL] * len(self.base) + [CONTROL] * len(self.specials)
        return GgufTable("llama-bpe", [*table["vocab"], *self.specials], types, merges)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.model` (tiktoken), `tokenizer.json` and `tokenizer_config.json` (Hugging Face)."""
        write_atomic(folder / MODEL_FILE, tiktoken_bytes(self.base))
        write_atomic(folder / JSON_FILE, self.hugging_face_json())
        write_atomic(folder / SETTINGS_FILE, self.hugging_face_config())

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Return the tokenizer that `save` wrote into `folder`, with the chat template there if it is not built in.

        Raises ValueError if it is missing or broken.
        """
        tokenizer = use_tokenizer(tokenizer_file(folder))
        with suppress(OSError, UnicodeDecodeError):
            template = _contents(str(folder / TEMPLATE_FILE)).decode()
            tokenizer.template = "" if template == TEMPLATE else template
            tokenizer.conversational = True
        return tokenizer


class ByteLevelTokenizer(Tokenizer):
    """A tokenizer that is not in the Llama 3 format."""

    def __init__(self, bpe: ByteLevelBPE) -> None:
        self.bpe, self.base = bpe, ()
        self.tokens = bpe.tokens[: max(number for number, token in enumerate(bpe.tokens, 1) if token)]
        self.specials, self.vocab_size = dict(bpe.specials), bpe.vocab_size
        self.begin, self.end = None if bpe.begin is None else self.specials[bpe.begin], self.specials[bpe.end]
        self.pattern = bpe.kind
        self.template = "" if bpe.template == TEMPLATE else bpe.template
        named = {key: token_name(bpe.settings, key) for key in NAMED_TOKENS}
        self.template_tokens = {key: name for key, name in named.items() if name is not None}
        self._encoder = None

    @property
    def vocabulary(self) -> Vocabulary:
        return self.bpe.bare

    @property
    def digest(self) -> str:
        return self.bpe.digest

    def hugging_face_json(self) -> str:
        return json.dumps(self.bpe.document, ensure_ascii=False)

    def hugging_face_config(self, template: str = "") -> str:
        end = self.turn_end if template else self.end
        return self.bpe.config(eos_token=self.names[end], chat_template=template or None)

    def gguf_table(self) -> GgufTable:
        return self.bpe.gguf_table()

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, with the chat template of the model it comes from."""
        write_atomic(folder / JSON_FILE, self.hugging_face_json())
        write_atomic(folder / SETTINGS_FILE, self.bpe.config())


def tokenizer_file(folder: Path) -> Path:
    """Return the file of the tokenizer in `folder`: `tokenizer.model`, or `tokenizer.json` if there is none."""
    return folder / (JSON_FILE if not (folder / MODEL_FILE).exists() and (folder / JSON_FILE).exists() else MODEL_FILE)


def use_tokenizer(path: Path | str) -> Tokenizer:
    """Return the tokenizer in `path` (a path or a URI): of tiktoken, a Hugging Face `tokenizer.json`, or a local GGUF.

    Beside a `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` and `config.json` are read if they exist.
    Raises ValueError if it cannot be read, is damaged, or is another format or kind.
    """
    uri = str(local_path(str(path))) if is_local(str(path)) else str(path)
    try:
        if uri.endswith(".gguf") and is_local(uri):
            document, settings, rows = gguf_document(read_gguf(Path(uri)).metadata, uri)
            return _tokenizer(document, settings, rows, uri)
        data = _contents(uri)
    except OSError as error:
        raise ValueError(f"tokenizer.use: {path} cannot be read ({error}); give a tiktoken tokenizer.model") from error
    if not data.lstrip().startswith(b"{"):
        return Tokenizer(parse_tiktoken(data, uri))
    settings = _json_beside(uri, SETTINGS_FILE)
    with suppress(OSError, UnicodeDecodeError):
        settings["chat_template"] = _contents(_beside(uri, TEMPLATE_FILE)).decode()
    return parse_hugging_face(data, uri, settings, _json_beside(uri, "config.json").get("vocab_size"))


def _contents(uri: str) -> bytes:
    """Return the bytes of a regular file of at most MOST_BYTES. Raises OSError if it is none."""
    files = filesystem_of(uri)
    info = files.info(uri)
    if info["type"] != "file" or (info.get("size") or 0) > MOST_BYTES:
        raise OSError(f"it is no file of at most {MOST_BYTES:,} bytes")
    data: bytes = files.cat_file(uri)
    return data


def _beside(uri: str, name: str) -> str:
    return str(Path(uri).with_name(name)) if is_local(uri) else f"{uri.rpartition('/')[0]}/{name}"


def _json_beside(uri: str, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name` beside `uri`; empty if there is none."""
    try:
        value = json.loads(_contents(_beside(uri, name)))
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"tokenizer.use: {_beside(uri, name)} is not JSON ({str(error)[:80]}); mend it or take it away"
        ) from error
    return value if isinstance(value, dict) else {}


def tokenizer_inputs(path: str) -> dict[str, str]:
    """Return digests of what the tokenizer in a local `path` is read from: its file, and for one that is not in the
    Llama 3 format also its settings, which other files may hold."""
    inputs = {"model": digest_file(local_path(path)).sha256}
    if not path.endswith(MODEL_FILE) and isinstance(tokenizer := use_tokenizer(path), ByteLevelTokenizer):
        inputs["settings"] = hashlib.sha256(f"{tokenizer.digest} {tokenizer.bpe.config()}".encode()).hexdigest()
    return inputs


def train_tokenizer(texts: Iterable[str], vocab: int, pattern: str = "llama3") -> Tokenizer:
    """Return a tokenizer of `vocab` tokens of text learned from `texts`, with the special tokens of Llama 3.

    Deterministic. Raises as `train_bpe`.
    """
    if pattern == "llama3":
        return Tokenizer(train_bpe(texts, vocab))
    trained = _train(texts, vocab, pattern)
    begin = set_special_tokens(trained, special_tokens())
    settings = {"bos_token": begin, "eos_token": "<|end_of_text|>"}
    document = {**json.loads(trained.to_str()), "pre_tokenizer": pre_tokenizer(PATTERNS[pattern])}
    return ByteLevelTokenizer(byte_level_bpe(document, settings, None, "the trained tokenizer"))


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
        train = recipe.tokenizer.train
        tokenizer = train_tokenizer(sample(train.sample), train.vocab, train.pattern)
    tokenizer.save(folder)
    examples = read_validation_texts(documents, recipe)
    _, offsets = tokenizer.encode_flat([example["text"] for example in examples])
    return {
        "vocab": len(tokenizer.tokens) - len(tokenizer.silent),
        "vocab_size": tokenizer.vocab_size,
        "digest": tokenizer.digest,
        "sample_bytes": sample_bytes,
        **token_ratios(examples, (offsets[1:] - offsets[:-1]).tolist()),
    }
