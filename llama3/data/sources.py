"""Sources of raw documents: opening, checking, surveying and identifying what a recipe names.

`installed` is read by `installed.py`, everything else by `files.py`. A limit counts bytes of raw text: a document that
no longer fits is passed over and reading goes on until less than 1 % of the limit is free or 100 did not fit, so that
one large document does not end a source early.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from llama3.data.document import Document
from llama3.data.files import SourceError, read_file, source_files
from llama3.data.installed import installed_documents, installed_fingerprint
from llama3.recipe.data import Source
from llama3.recipe.schema import Recipe
from llama3.recipe.section import Domain
from llama3.recipe.units import Bytes
from storage.filesystem import filesystem_of, glob, is_local, local_path

INSTALLED = "installed"
PASSED_OVER = 100
"""Documents that do not fit under a limit after which its source ends."""
SURVEYED = 64_000_000
"""Bytes of text per source that a survey reads at most."""


@dataclass(frozen=True)
class DomainSurvey:
    """How much raw text a domain has now."""

    domain: Domain
    documents: int
    bytes: int
    generated: int
    """Bytes of these that the problem generator made, so that nobody takes them for found text."""
    complete: bool
    """False when there is more than was counted: a large source, or a remote one."""


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


def open_source(source: Source, domain: Domain, seed: int, name: str | None = None) -> Iterator[Document]:
    """Yield the documents of `source` within its limit. Raises SourceError where a file cannot be read."""
    return (document for document, fits in read_source(source, domain, seed, name) if fits)


def read_source(source: Source, domain: Domain, seed: int, name: str | None = None) -> Iterator[tuple[Document, bool]]:
    """Yield each document read and whether it fits under the source's limit."""
    name = name or source_names([source])[0]
    if source.uri == INSTALLED:
        found = installed_documents(domain, name, seed, source.system)
    else:
        found = (document for uri, kind in source_files(source) for document in read_file(uri, kind, source, name))
    free, over = source.limit, 0
    for document in found:
        if free is None:
            yield document, True
            continue
        fits = document.size <= free
        yield document, fits
        free, over = Bytes(free - document.size * fits), over + (not fits)
        if free * 100 < (source.limit or 0) or over >= PASSED_OVER:
            return


def check_sources(recipe: Recipe) -> list[str]:
    """Return one line per fault, with its remedy, without reading more than the first document of each file."""
    faults = []
    for domain, sources in recipe.sources.items():
        found = [_faults(source, f"sources.{domain}.{index}", domain) for index, source in enumerate(sources)]
        faults += [line for lines in found for line in lines]
        if sources and not any(found) and not any(_first(source, domain, recipe.seed) for source in sources):
            faults.append(f"sources.{domain}: yields no document; add a source with text, or raise its limit")
    return faults


def survey(recipe: Recipe, remote: bool = False) -> list[DomainSurvey]:
    """Return how much text each domain has now; remote sources count nothing unless `remote` asks to read them."""
    return [_survey(domain, sources, recipe.seed, remote) for domain, sources in recipe.sources.items()]


def fingerprint(recipe: Recipe) -> str:
    """Return a digest (hex SHA-256) of what the sources are now: file names, sizes and times; installed packages."""
    state = {
        domain: [
            installed_fingerprint(domain, source.system) if source.uri == INSTALLED else _files_state(source)
            for source in sources
        ]
        for domain, sources in recipe.sources.items()
    }
    return hashlib.sha256(json.dumps(state, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _short(uri: str) -> str:
    parts = [part for part in uri.split("://")[-1].split("/") if part and not any(mark in part for mark in "*?[")]
    parts = [part for part in parts if part not in (".", "..", "~")][-2:] or ["files"]
    return "/".join([*parts[:-1], parts[-1].split(".")[0] or parts[-1]])


def _first(source: Source, domain: Domain, seed: int) -> bool:
    return next(open_source(source, domain, seed), None) is not None


def _faults(source: Source, field: str, domain: Domain) -> list[str]:
    """Return what is wrong with one source: no file, unknown endings, an unreadable file, no such text column."""
    if source.uri == INSTALLED:
        return []
    try:
        files = source_files(source)
        if not files:
            return [f"{field}.uri: {source.uri!r} {_why_nothing(source)}"]
        for uri, kind in files:
            next(read_file(uri, kind, source, domain), None)
    except SourceError as error:
        return [f"{field}.{'text' if 'text column' in str(error) else 'uri'}: {error}"]
    except Exception as error:  # every file system raises its own errors for a missing bucket or key
        return [f"{field}.uri: {source.uri!r} cannot be listed ({error}); check the address and your access to it"]
    return []


def _why_nothing(source: Source) -> str:
    if glob(source.uri):
        return "has no file with a known ending (txt, md, html, jsonl, parquet; .gz, .zst); write format:"
    if is_local(source.uri) and local_path(source.uri).is_dir():
        return "is an empty folder; put files there or correct the path"
    return "matches no file; correct the path (it is relative to where herd runs)"


def _survey(domain: Domain, sources: list[Source], seed: int, remote: bool) -> DomainSurvey:
    documents, size, generated, complete = 0, 0, 0, True
    for source in sources:
        if source.uri != INSTALLED and not is_local(source.uri) and not remote:
            complete = False
            continue
        read = 0
        for document in open_source(source, domain, seed):
            if read >= SURVEYED:
                complete = False
                break
            documents, read = documents + 1, read + document.size
            generated += document.size * document.generated
        size += read
    return DomainSurvey(domain, documents, size, generated, complete)


def _files_state(source: Source) -> list[list[object]]:
    """Return uri, size and what changes with the content (time, or the object store's tag) of each file."""
    state = []
    for uri, _ in source_files(source):
        info = filesystem_of(uri).info(str(local_path(uri)) if is_local(uri) else uri)
        changed = info.get("mtime") or info.get("ETag") or info.get("LastModified") or ""
        state.append([uri, info["size"], str(changed)])
    return state
