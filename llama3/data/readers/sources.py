"""Sources of raw documents: open, check, survey and fingerprint what a recipe names.

`installed` is read by `demo/installed.py`, everything else by `records.py`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
import pyarrow.parquet as pq

from herd.llama3.data.demo.installed import installed_documents, installed_state
from herd.llama3.data.readers.code import LEFT_OUT
from herd.llama3.data.readers.document import BatchBuilder, Document, DocumentBatch
from herd.llama3.data.readers.fields import text_of, value_of
from herd.llama3.data.readers.files import (
    DAMAGE,
    OVER_LIMIT,
    READ,
    SKIP,
    File,
    ReadErrors,
    SourceError,
    SourceListing,
    decompress,
    file_ending,
    list_source,
    open_raw,
    source_files,
)
from herd.llama3.data.readers.records import BATCH, CONTENT_PER_ID, UNREAD, read_files
from herd.llama3.data.text.language import detector_fault
from herd.llama3.recipe.base import Domain
from herd.llama3.recipe.data_schema import ConversationSource, Source
from herd.llama3.recipe.schema import Recipe
from herd.storage.digests import content_digests
from herd.storage.filesystem import cache_folder, fetched_listing, is_local, local_path, write_atomic

BUILT_IN = ("installed", "duckdb-functions")
"""Sources without files: text of this machine, and the reference of DuckDB's functions."""
PASSED_OVER = 100
"""Documents that do not fit under a limit after which its source ends."""
MOST_ENDINGS = 30
"""Endings of unreadable files that a message names."""
SURVEYED = 64_000_000
"""Maximum bytes of text per source that a survey reads."""


@dataclass(frozen=True)
class DomainSurvey:
    """Amount of raw text of a domain, or of one named source of it."""

    domain: Domain
    documents: int
    bytes: int
    generated: int
    """Bytes of these that the problem generator wrote."""
    complete: bool
    """False if there is more than was counted: a large source, or a remote one."""
    name: str = ""
    """Name of the source; empty: all sources of the domain without a name."""
    left_out: str = ""
    """Description of what cannot be read: files by ending, and what `curate.on_error: skip` skips, by reason."""

    @property
    def title(self) -> str:
        """`math`, or `math (gsm)` for a named source."""
        return f"{self.domain} ({self.name})" if self.name else self.domain


def source_names(sources: Sequence[Source | ConversationSource]) -> list[str]:
    """Return a short name for each of a domain's sources, in order: the column `source` of its documents.

    The last two parts of the URI without globs and endings; a second source of the same name gets `-2`.
    """
    names: list[str] = []
    for source in sources:
        parts = [part for part in source.uri.split("://")[-1].split("/") if part and not set(part) & set("*?[{")]
        parts = [part for part in parts if part not in (".", "..", "~")][-2:] or ["files"]
        short, number = "/".join([*parts[:-1], parts[-1].split(".")[0] or parts[-1]]), 2
        name = short
        while name in names:
            name, number = f"{short}-{number}", number + 1
        names.append(name)
    return names


def open_source(
    source: Source, domain: Domain, seed: int, name: str | None = None, fail: bool = True
) -> Iterator[Document]:
    """Yield the documents of `source` within its limit.

    Raises SourceError if a file cannot be read, unless `fail` is False: then unreadable input is skipped.
    """
    name = name or source_names([source])[0]
    for batch in read_source(source, domain, seed, ReadErrors(fail)):
        yield from batch.documents(name)


def read_source(
    source: Source, domain: Domain, seed: int, skips: ReadErrors, files: Iterable[File] | None = None, most: int = BATCH
) -> Iterator[DocumentBatch]:
    """Yield the documents of `source` within its limit in batches of about `most` characters; count others in `skips`.

    `files`: those of its files to read, by default all.
    """
    if source.uri == "installed":
        batches = _batches(installed_documents(domain, "", seed, source.system), most)
    elif source.uri in BUILT_IN:
        from herd.llama3.data.demo.sql_functions import sql_function_documents  # which few recipes need

        batches = _batches(sql_function_documents(""), most)
    else:
        batches = read_files(source_files(source) if files is None else files, source, skips, most)
    yield from batches if source.limit is None else _within(batches, source.limit, skips)


def _batches(documents: Iterable[Document], most: int) -> Iterator[DocumentBatch]:
    builder = BatchBuilder(most)
    for text, url, language, license, _, form, date in documents:
        if builder.add((text, url, url, language, license, form, date)):
            yield from builder.take()
    yield from builder.take()


def _within(batches: Iterable[DocumentBatch], limit: int, skips: ReadErrors) -> Iterator[DocumentBatch]:
    """Yield the documents that fit under `limit` bytes of raw text, in order, and count the others.

    One large document does not end a source early: reading ends when less than 1 % of the limit is free, or when 100
    documents did not fit.
    """
    free, over = limit, 0
    for batch in batches:
        fits = np.zeros(len(batch), np.bool_)
        for index, size in enumerate(batch.sizes.tolist()):
            fits[index] = size <= free
            if fits[index]:
                free -= size
            else:
                over += 1
                skips.count("", "", OVER_LIMIT, size)
            if free * 100 < limit or over >= PASSED_OVER:
                yield batch.keep(fits)
                return
        yield batch.keep(fits)


def check_sources(recipe: Recipe) -> list[str]:
    """Return one message per fault, after reading at most the first document of each file.

    Under `curate.on_error: skip` a source is at fault only if none of its files can be read.
    """
    curate = recipe.curate
    fail, faults = curate.on_error == "fail", []
    if not importlib.util.find_spec(curate.extractor):
        remedy = "pip install trafilatura lxml_html_clean, or write resiliparse"
        faults.append(f"curate.extractor: {curate.extractor} is not installed; {remedy}")
    detected = [f"sources.{name}" for name, given in recipe.sources.items() if name != "code" and _detects(given)]
    if detected and (fault := detector_fault()):
        faults.append(f"{detected[0]}: languages cannot be detected: {fault}")
    for domain, sources in recipe.sources.items():
        files: list[File] = []
        errors = [_faults(source, f"sources.{domain}.{index}", fail, files) for index, source in enumerate(sources)]
        faults += [line for lines in errors for line in lines]
        unread = [file for file in files if file.kind in UNREAD]
        size, total = sum(file.size for file in unread), sum(file.size for file in files)
        if not fail and (len(unread) > curate.max_lost * len(files) or size > curate.max_lost * total):
            faults.append(
                f"sources.{domain}: {len(unread):,} of {len(files):,} files, {size:,} of {total:,} bytes, cannot be "
                f"read: {describe_unreadable(unread)}; name them under ignore:, or raise curate.max_lost "
                f"({curate.max_lost})"
            )
        elif sources and not any(errors) and not any(_has_text(source, domain, recipe) for source in sources):
            faults.append(f"sources.{domain}: yields no document; add a source with text, or raise its limit")
    return _one_per_host(faults)


def _one_per_host(faults: list[str]) -> list[str]:
    """Return `faults` with one line for the sources of a host that fail alike: the first, and how many more."""
    groups: dict[tuple[str, str], list[str]] = {}
    for fault in faults:
        remote = re.match(r"\S+: '((\w+://[^/']+)[^']*)'(.*)", fault)
        key = (remote[2], remote[3].replace(remote[1], "")) if remote else ("", fault)
        groups.setdefault(key, []).append(fault)
    return [
        first + (f"; {len(others):,} more sources of {host} fail alike" if others else "")
        for (host, _), (first, *others) in groups.items()
    ]


def _detects(sources: Sequence[Source]) -> bool:
    return any(source.language is None for source in sources)


def _has_text(source: Source, domain: Domain, recipe: Recipe) -> bool:
    """Return whether any document of `source` is not blank."""
    skips = ReadErrors(recipe.curate.on_error == "fail")
    batches = read_source(source, domain, recipe.documents_seed, skips, most=1)
    return any(text.strip() for batch in batches for text in batch.text.to_pylist())


def _faults(source: Source, field: str, fail: bool, listed: list[File]) -> list[str]:
    """Return the faults of one source, and add its files to `listed` if any of them can be read."""
    if source.uri in BUILT_IN:
        return []

    def begins(file: File, errors: ReadErrors) -> bool:
        """Return whether `file` has a document; reads no further than the first."""
        return any(len(batch) for batch in read_files([file], source, errors, most=1))

    try:
        listing = list_source(source)
        if fault := listing_fault(source, listing, fail):
            return [f"{field}.uri: {fault}"]
        listed += (files := listing.files)
        if fail or not any(begins(file, ReadErrors(fail=False)) for file in files):
            for file in files:
                begins(file, ReadErrors())
    except SourceError as error:
        return [_named(field, error)]
    except Exception as error:  # every file system raises its own errors for a missing bucket or key
        return [f"{field}.uri: {source.uri!r} cannot be listed ({error}); check the address and your access to it"]
    return []


def listing_fault(source: Source, listing: SourceListing, fail: bool) -> str:
    """Return why no file of `source` can be read, or with `fail` which ones cannot; "" if nothing is wrong."""
    unread = describe_unreadable(listing.files)
    if all(file.kind in UNREAD or file.kind in LEFT_OUT for file in listing.files):
        if listing.files and not unread:
            counts = Counter(file.kind for file in listing.files)
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
            reason = f"has no code, but {kinds}; correct the path, or name the files in a glob"
        elif listing.files:
            reason = f"has no file with a known ending ({READ}; .gz, .zst, .bz2, .xz), but {unread}; write format:"
        elif listing.passed_over:
            names = "names with _ or . at the beginning, README, checksums, ignore:"
            reason = f"has nothing but {listing.passed_over:,} files that are passed over ({names}); name their folder"
        elif is_local(source.uri) and local_path(source.uri).is_dir():
            reason = "is an empty folder; put files there or correct the path"
        else:
            reason = "matches no file; correct the path (it is relative to where herd runs)"
    elif fail and unread:
        reason = f"also holds what cannot be read: {unread}; convert them, name them under ignore: or set {SKIP}"
    else:
        return ""
    return f"{source.uri!r} {reason}"


def _named(field: str, error: SourceError) -> str:
    """Return the message of `error` with the field of the source `field` that it is about."""
    return f"{field}.{'text' if 'text column' in str(error) else 'uri'}: {error}"


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Name the source `field` in a SourceError."""
    try:
        yield
    except SourceError as error:
        raise SourceError(_named(field, error)) from error


def is_read(file: File) -> bool:
    """Return whether documents may come from `file`."""
    return file.kind not in UNREAD and file.kind not in LEFT_OUT


def left_out(listing: SourceListing) -> list[str]:
    """Return what of a source is not read: files with endings that are not, and those that are no data."""
    unread = describe_unreadable(listing.files)
    kinds = Counter(file.kind for file in listing.files if file.kind in LEFT_OUT)
    over = f"passed over: {listing.passed_over:,} (names with . or _ first, README, checksums, ignore:)"
    return [
        *([f"cannot read {unread}"] if unread else []),
        *([over] if listing.passed_over else []),
        *(f"{kind}: {count:,} ({LEFT_OUT[kind].rstrip('.')})" for kind, count in kinds.most_common()),
    ]


def describe_unreadable(files: Sequence[File]) -> str:
    """Return those of `files` that cannot be read, "" if none: the first, and how many more of each ending."""
    first, *others = [file.uri for file in files if file.kind in UNREAD] or [""]
    if not others:
        return repr(first) if first else ""
    counts = Counter(file_ending(uri) or "without ending" for uri in others).most_common()
    endings = [f"{count:,} {ending}" for ending, count in counts[:MOST_ENDINGS]]
    rest = [f"{len(counts) - MOST_ENDINGS:,} other endings"] if len(counts) > MOST_ENDINGS else []
    return f"{first!r} and {len(others):,} more: {', '.join(endings + rest)}"


def fingerprint(recipe: Recipe) -> str:
    """Return a digest (hex SHA-256) of the sources now: names and contents of files, versions of remote ones, packages.

    Raises SourceError if they cannot be listed or read.
    """
    state = {
        domain: [
            content_states(source_files(source), source.limit)
            if source.uri not in BUILT_IN
            else installed_state(source.system)
            if source.uri == "installed"
            else importlib.metadata.version("duckdb")
            for source in sources
        ]
        for domain, sources in recipe.sources.items()
    }
    return hashlib.sha256(json.dumps(state, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


WITHIN_LIMIT = 4
"""Of a source with a limit, the files in this many times its bytes are digested; a time stands for others. A limit
counts text, of which files with other columns or markup have less than bytes: only reading tells which it takes."""


def content_states(files: Sequence[File], limit: int | None = None) -> list[tuple[str, int, str]]:
    """Return URI, size and version of each of `files`: of those that are read here, the digest of the content.

    Raises SourceError if one cannot be read.
    """
    before, digested = 0, list[str]()
    for file in files:
        if is_read(file) and is_local(file.uri) and (limit is None or before < WITHIN_LIMIT * limit):
            digested.append(file.uri)
            before += file.size
    try:
        contents = content_digests(digested)
    except OSError as error:
        remedy = "run again when it can be read and no process writes there"
        raise SourceError(f"{str(error.filename)!r} cannot be read ({error.strerror}); {remedy}") from error
    return [
        (file.uri, file.size, contents.get(file.uri, file.changed if is_read(file) else file.kind)) for file in files
    ]


def survey(recipe: Recipe, remote: bool = False) -> list[DomainSurvey]:
    """Return the amount of text of each domain now, and then of each named source.

    Remote sources are counted only if they are fetched, or `remote` is set. Raises SourceError as `read_source`.
    """
    surveys, seed, fail = [], recipe.documents_seed, recipe.curate.on_error == "fail"
    for name, domain in [*(("", domain) for domain in recipe.sources), *recipe.named_sources.items()]:
        documents, size, generated, complete = 0, 0, 0, True
        files, skipped = list[File](), Counter[str]()
        for source in (source for source in recipe.sources[domain] if (source.name or "") == name):
            if source.uri in BUILT_IN:
                amount = _count_installed(source, domain, seed, fail)
            elif remote or (not source.contents and (is_local(source.uri) or fetched_listing(source.uri))):
                with naming(f"sources.{domain}.{recipe.sources[domain].index(source)}"):
                    files += source_files(source)
                    amount = _count(source, domain, seed, fail)
            else:
                amount = _Amount(0, 0, 0, False)
            skipped.update(amount.skipped)
            documents, size = documents + amount.documents, size + amount.size
            generated, complete = generated + amount.generated, complete and amount.complete
        skips = ", ".join(f"{reason} {count:,}" for reason, count in skipped.most_common())
        left_out = "; ".join(filter(None, (describe_unreadable(files), skips)))
        surveys.append(DomainSurvey(domain, documents, size, generated, complete, name, left_out))
    return surveys


FOOTERS = 4
"""Parquet files whose footers an estimate reads."""
PACKED, EXPANSION = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz"), 4
"""Endings of packed files, and how much more text than bytes they hold at most."""


def estimate_text(source: Source, files: Sequence[File] | None = None) -> int:
    """Return about how many bytes of text `source`, or `files` of it, hold at most: from the sizes of the files.

    The footers of a few Parquet files say how much text a byte of them holds.
    """
    files = [file for file in (source_files(source) if files is None else files) if is_read(file)]
    columns = [file for file in files if file.kind == "parquet"][:FOOTERS]
    text, stored = 0, 0
    for file in columns:
        with open_raw(file) as raw:
            metadata = pq.read_metadata(raw)
        for group in range(metadata.num_row_groups):
            chunks = (metadata.row_group(group).column(index) for index in range(metadata.num_columns))
            named = (chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{source.text}."))
            text += sum(chunk.total_uncompressed_size for chunk in named)
        stored += file.size
    parquet = text / stored if stored else EXPANSION
    total = 0.0
    for file in files:
        packed = EXPANSION if file.uri.lower().endswith(PACKED) else 1
        total += file.size * (parquet if file.kind == "parquet" else packed)
    total *= CONTENT_PER_ID if source.contents else 1
    return min(round(total), source.limit or round(total))


SAMPLED = 1 << 20
"""Bytes of a file that `text_per_byte` reads."""


def text_per_byte(source: Source, file: File) -> float:
    """Return about how many bytes of text a byte of `file` holds, from a Parquet footer or its first megabyte."""
    if file.kind == "parquet":
        return estimate_text(source.model_copy(update={"limit": None}), [file]) / max(1, file.size)
    data = b""
    with open_raw(file) as raw:
        packed = raw.read(min(file.size, SAMPLED))
    with suppress(*DAMAGE):  # the sample ends inside a block
        for piece in decompress(io.BytesIO(packed), file.uri):
            data += piece
    lines, text = data.split(b"\n")[: -1 if len(packed) < file.size else None], 0
    if file.kind == "jsonl" and any(lines):
        for line in filter(None, lines):
            with suppress(ValueError):
                text += len(str(text_of(value_of(orjson.loads(line), source.text))).encode())
        return text / sum(map(len, lines)) * len(data) / len(packed)
    return len(data) / max(1, len(packed))


def reaches_limit(source: Source, domain: Domain, seed: int, files: Sequence[File]) -> bool:
    """Return whether reading `files`, the first ones of `source`, ends at its limit before it asks for another file."""
    more = False

    def first() -> Iterator[File]:
        nonlocal more
        yield from files
        more = True

    for _ in read_source(source, domain, seed, ReadErrors(fail=False), first()):
        pass
    return not more


class _Amount(NamedTuple):
    documents: int
    size: int
    generated: int
    complete: bool
    skipped: dict[str, int] = {}  # noqa: RUF012  (never changed)


def _count(source: Source, domain: Domain, seed: int, fail: bool) -> _Amount:
    documents, size, generated, skips = 0, 0, 0, ReadErrors(fail)
    batches = read_source(source, domain, seed, skips)
    for document in (document for batch in batches for document in batch.documents("")):
        if size >= SURVEYED:
            return _Amount(documents, size, generated, False, skips.lost)
        documents, size = documents + 1, size + document.size
        generated += document.size * document.generated
    return _Amount(documents, size, generated, True, skips.lost)


def _count_installed(source: Source, domain: Domain, seed: int, fail: bool) -> _Amount:
    """Return `_count` from the user's cache if neither the installed files nor the code that reads them changed."""
    code = b"\0".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    subject = [installed_state(source.system), domain, seed, SURVEYED, source.model_dump(mode="json")]
    key = hashlib.sha256(json.dumps(subject, sort_keys=True).encode() + code).hexdigest()
    cached = cache_folder() / "surveys" / f"{key[:32]}.json"
    with suppress(OSError, ValueError, TypeError):
        return _Amount(**json.loads(cached.read_text()))
    amount = _count(source, domain, seed, fail)
    with suppress(OSError):
        write_atomic(cached, json.dumps(amount._asdict()))
    return amount
