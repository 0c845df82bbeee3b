"""Sources of raw documents: opening, checking, surveying and identifying what a recipe names.

`installed` is read by `installed.py`, everything else by `records.py`. A limit counts bytes of raw text: a document
that no longer fits is passed over and reading goes on until less than 1 % of the limit is free or 100 did not fit, so
that one large document does not end a source early.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llama3.data.demo.installed import installed_documents, installed_fingerprint, installed_state
from llama3.data.readers.document import Document, DocumentBatch, Gatherer
from llama3.data.readers.files import OVER_LIMIT, READ, File, ReadErrors, SourceError, source_files
from llama3.data.readers.records import BATCH, UNREAD, read_files
from llama3.recipe.base import Domain
from llama3.recipe.data_schema import Source
from llama3.recipe.schema import Recipe
from storage.filesystem import cache_folder, is_local, local_path, write_atomic

INSTALLED = "installed"
PASSED_OVER = 100
"""Documents that do not fit under a limit after which its source ends."""
_REMEDY = "convert them, name them under ignore: or set curate.on_error: skip"
SURVEYED = 64_000_000
"""Bytes of text per source that a survey reads at most."""


@dataclass(frozen=True)
class DomainSurvey:
    """How much raw text a domain has now, or a source of it that stands apart."""

    domain: Domain
    documents: int
    bytes: int
    generated: int
    """Bytes of these that the problem generator made, so that nobody takes them for found text."""
    complete: bool
    """False when there is more than was counted: a large source, or a remote one."""
    name: str = ""
    """Of the source that stands apart; empty: all others of the domain."""
    left_out: str = ""
    """Files that are there and cannot be read, in words."""

    @property
    def title(self) -> str:
        """How people call it: `math`, `math (gsm)`."""
        return f"{self.domain} ({self.name})" if self.name else self.domain


def source_names(sources: list[Source]) -> list[str]:
    """Return a short name for each of a domain's sources, in order: what the column `source` of a document holds.

    The last two parts of the URI without globs and endings; a second source of the same name gets `-2`.
    """
    names: list[str] = []
    for source in sources:
        short, number = _short(source.uri), 2
        name = short
        while name in names:
            name, number = f"{short}-{number}", number + 1
        names.append(name)
    return names


def open_source(
    source: Source, domain: Domain, seed: int, name: str | None = None, fail: bool = True
) -> Iterator[Document]:
    """Yield the documents of `source` within its limit.

    Raises SourceError where a file cannot be read, unless `fail` is off: then what cannot be read is left out.
    """
    name = name or source_names([source])[0]
    for batch in read_source(source, domain, seed, ReadErrors(fail)):
        yield from batch.documents(name)


def read_source(
    source: Source, domain: Domain, seed: int, skips: ReadErrors, files: Sequence[File] | None = None, most: int = BATCH
) -> Iterator[DocumentBatch]:
    """Yield the documents of `source` within its limit; what is left out goes to `skips`.

    `files` are those of its files to read, all by default; `most` is about the characters of a batch.
    """
    if source.uri == INSTALLED:
        batches = _gathered(installed_documents(domain, "", seed, source.system), most)
    else:
        batches = read_files(source_files(source) if files is None else files, source, skips, most)
    yield from batches if source.limit is None else _within(batches, source.limit, skips)


def _gathered(documents: Iterable[Document], most: int) -> Iterator[DocumentBatch]:
    rows = Gatherer(most)
    for text, url, language, licence, _, form, date in documents:
        if rows.add((text, url, url, language, licence, form, date)):
            yield from rows.take()
    yield from rows.take()


def _within(batches: Iterable[DocumentBatch], limit: int, skips: ReadErrors) -> Iterator[DocumentBatch]:
    """Yield what fits under `limit` bytes, in order, and count what was read and does not."""
    free, over = limit, 0
    for batch in batches:
        fits = np.zeros(len(batch), np.bool_)
        for place, size in enumerate(batch.sizes.tolist()):
            fits[place] = size <= free
            if fits[place]:
                free -= size
            else:
                over += 1
                skips.count("", "", OVER_LIMIT, size)
            if free * 100 < limit or over >= PASSED_OVER:
                yield batch.keep(fits)
                return
        yield batch.keep(fits)


def check_sources(recipe: Recipe) -> list[str]:
    """Return one line per fault, with its remedy, without reading more than the first document of each file.

    Under `curate.on_error: skip` a source is at fault only if none of its files can be read.
    """
    faults = _extractor_faults(recipe)
    fail = recipe.curate.on_error == "fail"
    for domain, sources in recipe.sources.items():
        listed: list[File] = []
        found = [_faults(source, f"sources.{domain}.{index}", fail, listed) for index, source in enumerate(sources)]
        faults += [line for lines in found for line in lines]
        unread = [file for file in listed if file.kind in UNREAD]
        size, whole = sum(file.size for file in unread), sum(file.size for file in listed)
        most = recipe.curate.max_lost
        if not fail and (len(unread) > most * len(listed) or size > most * whole):
            faults.append(
                f"sources.{domain}: {len(unread):,} of {len(listed):,} files, {size:,} of {whole:,} bytes, "
                f"cannot be read: {left_out(unread)}; name them under ignore:, or raise curate.max_lost ({most})"
            )
        elif sources and not any(found) and not any(_first(source, domain, recipe) for source in sources):
            faults.append(f"sources.{domain}: yields no document; add a source with text, or raise its limit")
    return faults


def survey(recipe: Recipe, remote: bool = False) -> list[DomainSurvey]:
    """Return how much text each domain has now, and then each source that stands apart.

    Remote sources count nothing unless `remote` asks to read them.
    """
    names = [(domain, "") for domain in recipe.sources] + [(domain, name) for name, domain in recipe.apart.items()]
    return [_survey(domain, name, recipe, remote) for domain, name in names]


def fingerprint(recipe: Recipe) -> str:
    """Return a digest (hex SHA-256) of what the sources are now: file names, sizes and times; installed packages."""
    state = {
        domain: [
            installed_fingerprint(domain, source.system)
            if source.uri == INSTALLED
            else [[file.uri, file.size, file.changed] for file in source_files(source)]
            for source in sources
        ]
        for domain, sources in recipe.sources.items()
    }
    return hashlib.sha256(json.dumps(state, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _short(uri: str) -> str:
    parts = [part for part in uri.split("://")[-1].split("/") if part and not any(mark in part for mark in "*?[")]
    parts = [part for part in parts if part not in (".", "..", "~")][-2:] or ["files"]
    return "/".join([*parts[:-1], parts[-1].split(".")[0] or parts[-1]])


def _first(source: Source, domain: Domain, recipe: Recipe) -> bool:
    """Return whether `source` holds a document that is not blank."""
    skips = ReadErrors(recipe.curate.on_error == "fail")
    batches = read_source(source, domain, recipe.documents_seed, skips, most=1)
    return any(text.strip() for batch in batches for text in batch.text.to_pylist())


def _extractor_faults(recipe: Recipe) -> list[str]:
    name = recipe.curate.extractor
    if importlib.util.find_spec(name):
        return []
    return [f"curate.extractor: {name} is not installed; in the checkout: make install-dev, or write resiliparse"]


def _faults(source: Source, field: str, fail: bool, listed: list[File]) -> list[str]:
    """Return what is wrong with one source, and add its files to `listed` if it has some that can be read."""
    if source.uri == INSTALLED:
        return []
    try:
        files = source_files(source)
        if all(file.kind in UNREAD for file in files):
            return [f"{field}.uri: {source.uri!r} {_why_nothing(source, files)}"]
        listed += files
        if fail and (unread := left_out(files)):
            return [f"{field}.uri: {source.uri!r} also holds what cannot be read: {unread}; {_REMEDY}"]
        if fail or not any(_starts(file, source, ReadErrors(fail=False)) for file in files):
            for file in files:
                _starts(file, source, ReadErrors())
    except SourceError as error:
        return [f"{field}.{'text' if 'text column' in str(error) else 'uri'}: {error}"]
    except Exception as error:  # every file system raises its own errors for a missing bucket or key
        return [f"{field}.uri: {source.uri!r} cannot be listed ({error}); check the address and your access to it"]
    return []


def _starts(file: File, source: Source, skips: ReadErrors) -> bool:
    """Return whether `file` holds a document, reading no further than the first."""
    return any(len(batch) for batch in read_files([file], source, skips, most=1))


def left_out(files: Sequence[File]) -> str:
    """Return which of `files` cannot be read, in words: how many of each ending, and the first; "" if all can."""
    unread = [file for file in files if file.kind in UNREAD]
    counts = Counter(_ending(file.uri) for file in unread)
    named = ", ".join(f"{ending} {count:,}" for ending, count in counts.most_common(5))
    return f"{named} (the first is {unread[0].uri!r})" if unread else ""


def _ending(uri: str) -> str:
    name = uri.rsplit("/", 1)[-1]
    return name[name.find(".") :] if "." in name else "without ending"


def _why_nothing(source: Source, files: Sequence[File]) -> str:
    if files:
        return f"has no file with a known ending ({READ}; .gz, .zst, .bz2, .xz), but {left_out(files)}; write format:"
    if is_local(source.uri) and local_path(source.uri).is_dir():
        return "is an empty folder; put files there or correct the path"
    return "matches no file; correct the path (it is relative to where herd runs)"


def _survey(domain: Domain, name: str, recipe: Recipe, remote: bool) -> DomainSurvey:
    documents, size, generated, complete = 0, 0, 0, True
    files: list[File] = []
    for source in (source for source in recipe.sources[domain] if (source.name or "") == name):
        if source.uri != INSTALLED and not is_local(source.uri) and not remote:
            complete = False
            continue
        files += source_files(source) if source.uri != INSTALLED else []
        count = _count_installed if source.uri == INSTALLED else _count
        found = count(source, domain, recipe.documents_seed, recipe.curate.on_error == "fail")
        documents, size, generated = documents + found.documents, size + found.size, generated + found.generated
        complete &= found.complete
    return DomainSurvey(domain, documents, size, generated, complete, name, left_out(files))


class _Counted(NamedTuple):
    documents: int
    size: int
    generated: int
    complete: bool


def _count(source: Source, domain: Domain, seed: int, fail: bool) -> _Counted:
    documents, size, generated = 0, 0, 0
    for document in open_source(source, domain, seed, fail=fail):
        if size >= SURVEYED:
            return _Counted(documents, size, generated, False)
        documents, size = documents + 1, size + document.size
        generated += document.size * document.generated
    return _Counted(documents, size, generated, True)


def _count_installed(source: Source, domain: Domain, seed: int, fail: bool) -> _Counted:
    """Return the same from the user's cache, where nothing installed, and none of the code that reads it, changed."""
    code = b"\0".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    subject = [installed_state(), sys.version, domain, seed, SURVEYED, source.model_dump(mode="json")]
    key = hashlib.sha256(json.dumps(subject, sort_keys=True).encode() + code).hexdigest()
    kept = cache_folder() / "surveys" / f"{key[:32]}.json"
    with suppress(OSError, ValueError, TypeError):
        return _Counted(**json.loads(kept.read_text()))
    found = _count(source, domain, seed, fail)
    with suppress(OSError):
        write_atomic(kept, json.dumps(found._asdict()))
    return found
