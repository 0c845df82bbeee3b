"""The held-out documents that an evaluation reads: the first few of each domain by id (a hash, so a random sample).

Documents are cut, so bits per byte measures their openings and no long-context ability.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, takewhile, zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from herd.llama3.data.readers.document import GENERATED
from herd.llama3.recipe.base import DOMAINS, Domain
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.documents import read_documents, read_texts

DOCUMENT_BYTES = 16384
"""Most UTF-8 bytes of a document that are scored, for any recipe."""
BYTES_PER_POSITION = 2
"""Most UTF-8 bytes per position of the longest sequence that a recipe trains on: 1 KiB for 512 positions."""
CANDIDATE_DOCUMENTS = 100
"""Held-out documents whose language is read, for each chosen document of the multilingual domain."""

NGRAM_BPB = "baseline/bpb"
"""Key of the baseline among the facts of an evaluation, and before its domains; no score, so no gate judges it."""
NGRAM = 5
"""Bytes of the longest strings that the baseline counts."""
NGRAM_BYTES = 5_000_000
"""Training text that it counts, in the shares of the mix: some 2 s of a processor and 0.3 GiB."""


@dataclass(frozen=True)
class ValidationDocument:
    id: str
    domain: str
    text: str
    language: str = ""
    """ISO 639-1 code; empty if unknown or irrelevant."""
    cluster: str = ""
    """What errs together: the web site, repository or file that it is from (`clusters_of`)."""


def document_bytes(recipe: Recipe) -> int:
    """Return the most UTF-8 bytes of a document that an evaluation under `recipe` scores.

    A document then mostly fits one window, so the evaluation of a small recipe takes seconds.
    """
    return min(DOCUMENT_BYTES, BYTES_PER_POSITION * recipe.longest_sequence)


def read_validation_documents(folder: Path, count: int, size: int) -> list[ValidationDocument]:
    """Return at most `count` held-out documents of each domain of the curated `folder`, by domain, then id.

    Each is cut to `size` UTF-8 bytes at a character boundary. In the multilingual domain the languages take turns, so
    that rare ones are measured too. Raises ValueError if there are no documents.
    """
    chosen: list[ValidationDocument] = []
    for domain in DOMAINS:
        if not any((folder / "documents").glob(f"{domain}-*.parquet")):
            continue
        documents = _read(folder, domain, size)
        if domain == "multilingual":
            ids = _ids_by_language(folder, domain, count)
            own = list(islice((document for document in documents if document.id in ids), len(ids)))
        else:
            own = list(islice(documents, count))
        clusters = clusters_of([document.cluster for document in own])
        chosen += [replace(document, cluster=name) for document, name in zip(own, clusters, strict=True)]
    if not chosen:
        raise ValueError(
            f"documents: {folder / 'documents'} has no document with split 'held_out'; raise curate.validation_fraction"
        )
    return chosen


# Documents of one web site, repository or file err together, and intervals are too narrow if they count as independent.

REPOSITORIES = ("github.com", "gitlab.com", "bitbucket.org", "codeberg.org", "huggingface.co", "sr.ht")
"""Web sites of which each `/owner/name` is a cluster."""
_RECORD = re.compile(r"(:\d+|#\d+)$")
"""End of the location of a record in a file, or of a part of an installed file."""


def clusters_of(urls: Sequence[str]) -> list[str]:
    """Return the cluster of each document of a domain, given their URLs; empty: the document is its own.

    That of a page is its host, or its repository; of a record, its file; of a generated problem, none. A file that is
    one document is of the folder in which the paths of these documents part, as repositories lie beside each other, or
    its own there; an installed one of its package.
    """
    clusters = [_cluster(url) for url in urls]
    paths = [url.split("/") for url in urls]
    files = [path for path, cluster in zip(paths, clusters, strict=True) if cluster is None]
    common = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, zip(*files, strict=False)))
    return [
        "/".join(path[: common + 1]) if cluster is None else cluster
        for path, cluster in zip(paths, clusters, strict=True)
    ]


def _cluster(url: str) -> str | None:
    """Return the cluster that a URL names; None for a file that is one document."""
    if re.match("https?://", url):
        host, _, path = url.split("://", 1)[1].partition("/")
        host = host.rpartition("@")[2].partition(":")[0].lower().removeprefix("www.")
        return "/".join([host, *path.split("/")[:2]]) if host in REPOSITORIES else host
    if not url or url.startswith(GENERATED):
        return ""
    if "://" not in url and not url.startswith("/"):
        return "/".join(url.split("/")[:2])
    return None if (file := _RECORD.sub("", url)) == url else file


def nothing_held_out(recipe: Recipe) -> str:
    """Return the fault of a run that evaluates and has no held-out text."""
    share = recipe.curate.validation_fraction
    remedy = "raise it or add text" if share else "write e.g. 2%"
    return (
        f"curate.validation_fraction: {share} holds out no document, and an evaluation scores held-out text; {remedy}"
    )


def _read(folder: Path, domain: Domain, size: int) -> Iterator[ValidationDocument]:
    for rows in read_documents(folder, domain, ["id", "text", "language", "url"], "held_out"):
        for row in rows:
            if row["text"]:
                text, language = truncate_utf8(row["text"], size), row["language"] or ""
                yield ValidationDocument(row["id"], domain, text, language, row["url"] or "")


def _ids_by_language(folder: Path, domain: Domain, count: int) -> set[str]:
    """Return the ids of `count` documents whose languages take turns, each language's first ones by id."""
    rows = chain.from_iterable(read_documents(folder, domain, ["id", "language"], "held_out"))
    by_language: dict[str, list[str]] = {}
    for row in islice(rows, candidate_documents(domain, count)):
        ids = by_language.setdefault(row["language"] or "", [])
        if len(ids) < count:
            ids.append(row["id"])
    turns = zip_longest(*(by_language[language] for language in sorted(by_language)))
    return set(islice((name for turn in turns for name in turn if name is not None), count))


def candidate_documents(domain: Domain, count: int) -> int:
    """Return how many held-out documents of a domain, by id, `count` of them are chosen from."""
    return CANDIDATE_DOCUMENTS * count if domain == "multilingual" else count


def truncate_utf8(text: str, size: int) -> str:
    """Return the longest beginning of `text` of at most `size` UTF-8 bytes."""
    return text.encode()[:size].decode(errors="ignore")


# What a model must beat: a table of how often each byte follows the four bytes before it.


def ngram_bits_per_byte(
    folder: Path, shares: Mapping[Domain, float], documents: Sequence[ValidationDocument]
) -> dict[Domain, float]:
    """Return bits per byte of each domain of `documents` by a 5-gram that counted training text of `folder`.

    Lengths are interpolated by Witten and Bell's rule (IEEE Transactions on Information Theory 37(4), 1991): a context
    that was seen n times, with t different next bytes, gives t / (n + t) of the probability to the shorter context.
    """
    zero = b"\0"  # between documents
    texts = (read_texts(folder, domain, "train", int(share * NGRAM_BYTES)) for domain, share in shares.items() if share)
    counted = zero.join(text.encode() for text in chain.from_iterable(texts))
    pieces = [zero + document.text.encode() for document in documents]
    bits = _ngram_bits(np.frombuffer(counted, np.uint8), np.frombuffer(b"".join(pieces), np.uint8))
    ends = np.cumsum([len(piece) for piece in pieces])
    found: dict[Domain, float] = {}
    for domain in DOMAINS:
        parts = [
            bits[end - len(piece) + 1 : end]
            for document, piece, end in zip(documents, pieces, ends, strict=True)
            if document.domain == domain
        ]
        if parts:
            found[domain] = float(np.concatenate(parts).mean())
    return found


def _ngram_bits(counted: NDArray[np.uint8], scored: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the bits of each byte of `scored` after up to four bytes before it, by the counts of `counted`."""
    probability = np.full(len(scored), 1 / 256)
    for order in range(1, NGRAM + 1):
        grams, counts = np.unique(_grams(counted, order), return_counts=True)
        asked = _grams(scored, order)
        if not len(grams) or not len(asked):
            break
        # sorted by context, the high bytes; the low byte is the next one
        contexts, first, kinds = np.unique(grams >> 8, return_index=True, return_counts=True)
        seen = np.add.reduceat(counts, first)
        place = np.searchsorted(contexts, asked >> 8).clip(max=len(contexts) - 1)
        gram = np.searchsorted(grams, asked).clip(max=len(grams) - 1)
        count = np.where(grams[gram] == asked, counts[gram], 0)
        shorter = probability[order - 1 :]
        longer = (count + kinds[place] * shorter) / (seen[place] + kinds[place])
        probability[order - 1 :] = np.where(contexts[place] == asked >> 8, longer, shorter)
    bits: NDArray[np.float64] = -np.log2(probability)
    return bits


def _grams(data: NDArray[np.uint8], order: int) -> NDArray[np.int64]:
    """Return each string of `order` consecutive bytes as a number."""
    grams = np.zeros(max(0, len(data) - order + 1), np.int64)
    for at in range(order):
        grams = grams << 8 | data[at : at + len(grams)]
    return grams
