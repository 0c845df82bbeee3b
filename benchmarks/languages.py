"""Row about language identification: how often it is right on documents that are installed here.

Translated message catalogs and manual pages say which language they are written in; installed docstrings are English.
No rule of ours was chosen on message catalogs. More languages and pages: `apt install manpages-de manpages-fr ...`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice, takewhile
from pathlib import Path

from benchmarks.measure import NotMeasured
from benchmarks.rows import Row, measured
from benchmarks.session import Session
from herd.llama3.data.demo.installed import installed_documents
from herd.llama3.data.text.language import primary_subtag
from herd.llama3.data.text.normalize import normalize
from herd.llama3.recipe.data_schema import TUNED

SHORTEST, LONGEST = 2_000, 5_000
"""Bytes of a document; longer texts are cut."""
LANGUAGES = {"en", *TUNED}
"""Those that the rules of FineWeb-2 know; small languages are hard to tell from their neighbors."""
EACH, LEAST = 100, 20
"""Most documents of a language, and the least for which it is measured."""
_SEED = 7
_ENGLISH = 2_000
"""Documents of which the English ones are taken."""
_WARM_UP = 5
_SHOWN = 8
"""Languages that a note names."""


def accuracy(run: Session, name: str) -> Row:
    """Of all documents, in how many we find the language that they are written in."""
    folder = run.settings.folder / "languages"
    source, warm_up = folder / "languages.jsonl", folder / "first.jsonl"
    write_documents(documents(), source, warm_up)
    cost = run.bench.cost("ours.languages", source, warm_up)
    known = [json.loads(line)["language"] for line in source.open()]
    right, every = shares(known, cost.facts["languages"])
    worst = sorted(right, key=lambda language: (right[language], language))[:_SHOWN]
    note = f"{len(known):,} documents in {len(right)} languages, {1e6 * cost.cpu_s / len(known):.0f} us each; least: "
    note += ", ".join(f"{language} {100 * right[language]:.0f}" for language in worst)
    return measured(name, 100 * every, note, languages=right, cpu_s=cost.cpu_s, documents=len(known))


def shares(known: list[str], found: list[str]) -> tuple[dict[str, float], float]:
    """Return the share of right answers by language and over all documents; a locale counts as its language."""
    right = [language == primary_subtag(other) for language, other in zip(known, found, strict=True)]
    hits, each = Counter(dict.fromkeys(known, 0)), Counter(known)
    for language, hit in zip(known, right, strict=True):
        hits[language] += hit
    return {language: hits[language] / count for language, count in each.items()}, sum(right) / len(right)


def documents() -> Iterator[tuple[str, str]]:
    """Yield (language, text) of what is installed here."""
    translated = installed_documents("multilingual", "installed", _SEED, True)
    english = islice(installed_documents("general", "installed", _SEED, True), _ENGLISH)
    for document in chain(takewhile(lambda document: not document.generated, translated), english):
        yield document.language or "en", document.text


def write_documents(found: Iterator[tuple[str, str]], source: Path, warm_up: Path) -> None:
    """Write the documents of each language that has enough, and the first ones once more.

    Raises NotMeasured if there are none.
    """
    texts: dict[str, list[str]] = {}
    for language, text in found:
        own = texts.setdefault(primary_subtag(language), [])
        if len(own) < EACH:
            data = normalize(text[:LONGEST]).encode("utf-8", "ignore")[:LONGEST]
            own += [data.decode("utf-8", "ignore")] * (len(data) >= SHORTEST)
    lines = [
        json.dumps({"language": language, "text": text})
        for language, own in sorted(texts.items())
        if language in LANGUAGES and len(own) >= LEAST
        for text in own
    ]
    if not lines:
        raise NotMeasured("no message catalogs or translated manual pages are installed")
    source.parent.mkdir(parents=True)
    source.write_text("".join(f"{line}\n" for line in lines))
    warm_up.write_text("".join(f"{line}\n" for line in lines[:_WARM_UP]))
