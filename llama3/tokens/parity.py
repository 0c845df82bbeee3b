"""The gate before a fast encoder: its ids must equal tiktoken's, or tiktoken encodes.

A tokenizer that is wrong on one document in a thousand gives no error, only a slightly worse model. So a fast encoder
is compared on text of the corpus and on more than 30,000 hostile strings, alone and joined to long texts, once per
tokenizer, library version and machine (code for another processor is other code). The verdict is kept in the user's
cache. It costs about a second, and what it gives up is proof: equality on these strings is strong evidence, no more.
"""

from __future__ import annotations

import hashlib
import json
import platform
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from llama3.tokens.encoder import Encoder, GigatokenEncoder, TiktokenEncoder, text_array
from llama3.tokens.hostile import hostile
from storage.filesystem import cache_folder, write_atomic

if TYPE_CHECKING:
    from llama3.tokens.tokenizer import Tokenizer

GATE_VERSION = 1
"""Raise it when the strings change: old verdicts are then not believed."""
SAMPLE_CHARACTERS = 2_000_000
"""Text of the corpus that is compared, at most."""
JOINED = 200
"""Hostile strings per long text."""
SHOWN = 120
"""Characters of a differing text that a warning shows."""


def encoder_for(
    tokenizer: Tokenizer, texts: pa.Array | Sequence[str] = (), fast: type[Encoder] = GigatokenEncoder
) -> Encoder:
    """Return an encoder of type `fast` if its ids are those of tiktoken, else tiktoken's.

    `texts` are of the corpus; about 2 MB of them, spread evenly, are compared if no verdict is stored. A library that
    is not installed is passed over in silence, one that differs with a warning that shows the first text.
    """
    reference = TiktokenEncoder(tokenizer.base)
    try:
        subject = _subject(tokenizer.digest, fast.version(), reference.version())
        verdict = _stored(subject)
        if verdict is None or verdict["differs"] is None:
            candidate = fast(tokenizer.base)
    except ImportError:
        return reference
    if verdict is None:
        verdict = {**subject, "differs": first_difference(candidate, reference, texts)}
        _store(subject, verdict)
    if verdict["differs"] is None:
        return candidate
    warnings.warn(
        f"{subject['library']} is not used, tiktoken encodes (slower, right): {verdict['differs']}", stacklevel=2
    )
    return reference


def first_difference(candidate: Encoder, reference: Encoder, texts: pa.Array | Sequence[str] = ()) -> str | None:
    """Return what `candidate` does wrong on the first text where its ids are not those of `reference`, or None."""
    strings = list(hostile())
    joined = ("".join(strings[start : start + JOINED]) for start in range(0, len(strings), JOINED))
    for kind, group in (("hostile string", strings), ("joined strings", joined), ("text", _sample(texts))):
        differs = _compare(candidate, reference, text_array(list(group)))
        if differs is not None:
            return f"{kind} {differs}"
    return None


def _compare(candidate: Encoder, reference: Encoder, texts: pa.Array) -> str | None:
    expected, bounds = reference.encode_flat(texts)
    try:
        ids, offsets = candidate.encode_flat(texts)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        return f"fails: {error!r}"[:SHOWN]
    if np.array_equal(offsets, bounds) and np.array_equal(ids, expected):
        return None
    for row, text in enumerate(texts.to_pylist()):
        right = expected[bounds[row] : bounds[row + 1]]
        if not np.array_equal(ids[offsets[row] : offsets[row + 1]], right):
            return f"differs on {repr(_halved(candidate, reference, text))[:SHOWN]}"
    return "returns wrong offsets"


def _halved(candidate: Encoder, reference: Encoder, text: str) -> str:
    """Return the part of `text` that is left when halves on which the encoders agree are thrown away."""
    while True:
        halves = [text[: len(text) // 2], text[len(text) // 2 :]]
        pairs = zip(halves, candidate.encode_batch(halves), reference.encode_batch(halves), strict=True)
        wrong = [half for half, ids, expected in pairs if half != text and not np.array_equal(ids, expected)]
        if not wrong:
            return text
        text = wrong[0]


def _sample(texts: pa.Array | Sequence[str]) -> Iterator[str]:
    """Yield texts at even distances, about SAMPLE_CHARACTERS in all."""
    array = text_array(texts)
    step = max(1, -(-array.nbytes // SAMPLE_CHARACTERS))
    left = SAMPLE_CHARACTERS
    for row in range(0, len(array), step):
        if left <= 0:
            return
        text = array[row].as_py()[:left]
        left -= len(text)
        yield text


def _subject(digest: str, library: str, reference: str) -> dict[str, Any]:
    """Return all that a verdict holds for."""
    return {
        "gate": GATE_VERSION,
        "tokenizer": digest,
        "library": library,
        "reference": reference,
        "machine": [platform.system(), platform.machine(), _processor(), platform.python_version()],
    }


@cache
def _processor() -> str:
    """Return the processor's name and a digest of its features, by which libraries choose their code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    about: Iterable[str] = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    named = [line.split(":", 1)[1].strip() for line in about if line.startswith("model name")]
    return f"{' '.join(named)} {hashlib.sha256(chr(10).join(about).encode()).hexdigest()[:8]}".strip()


def _path(subject: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "parity" / f"{key[:32]}.json"


def _stored(subject: dict[str, Any]) -> dict[str, Any] | None:
    try:
        verdict = json.loads(_path(subject).read_text())
    except (OSError, ValueError):
        return None
    return (
        verdict if isinstance(verdict, dict) and subject.items() <= verdict.items() and "differs" in verdict else None
    )


def _store(subject: dict[str, Any], verdict: dict[str, Any]) -> None:
    try:
        write_atomic(_path(subject), json.dumps(verdict, indent=2) + "\n")
    except OSError as error:
        warnings.warn(f"the verdict on {subject['library']} cannot be kept ({error}); set XDG_CACHE_HOME", stacklevel=3)
