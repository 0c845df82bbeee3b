"""The `curate` part of a recipe: every step of curation, its parameters and its defaults.

A step that is left out of a recipe runs with the defaults below or, where the default is None or empty, not at all.
Quality rules are in `quality.py`.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from llama3.recipe.quality import TUNED, Quality
from llama3.recipe.section import DOMAINS, Domain, Section
from llama3.recipe.units import Share

_WEB: list[Domain] = ["general", "multilingual"]
_GENERAL: list[Domain] = ["general"]


class Dedup(Section):
    """Removal of repeated documents: by URL, exact, and near (MinHash), each domain and language for itself."""

    url: Literal["newest", "all"] = "newest"
    """Drop the documents of a URL that have an earlier date than its newest one (arXiv 2407.21783, section 3.1.1), or
    keep all. Documents without a date stay."""
    jaccard: float = Field(default=0.8, gt=0, le=1)
    """Two documents whose word shingles overlap at least this much are one; 1 keeps all but exact copies."""
    shingle: int = Field(default=5, ge=1)
    """Words per shingle."""
    bands: int = Field(default=20, ge=1, le=64)
    """MinHash bands; more bands find more candidate pairs. 20 x 6 finds 99.8 % of pairs at Jaccard 0.8, where the usual
    14 x 8 finds 92 %; what it finds too much is verified away."""
    rows: int = Field(default=6, ge=1, le=64)
    """Hashes per band; more rows find fewer candidate pairs."""


class Lines(Section):
    """Removal of lines: those that many documents share, and those that repeat themselves."""

    domains: list[Domain] = Field(default_factory=lambda: list(_WEB))
    """Domains whose lines are removed; in code and worked problems the lines that repeat are the language itself."""
    max_copies: int | None = Field(default=6, ge=1)
    """Remove every copy of a line that stands more often than this in one bucket; None keeps all."""
    bucket: int = Field(default=30_000_000, ge=1)
    """Documents per bucket; the buckets are formed by id, each domain and language for itself."""
    min_chars: int = Field(default=8, ge=1)
    """Shorter lines (brackets, list marks) are never removed as copies, nor are fences of code."""
    max_repeated_grams: Share | None = None
    """Remove a line when more than this share of its words lies in n-grams that it repeats; logs and error dumps."""
    gram: int = Field(default=5, ge=2)
    """Words per n-gram of the rule above."""


class Score(Section):
    """A quality score of every document, and the least one to keep."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Column of the score; the first score of the list also decides which copy of a document is kept."""
    domains: list[Domain] = Field(default_factory=list)
    """Domains that are scored; empty: all."""
    good: list[str] = Field(default_factory=list)
    """Files, folders or globs of documents that deserve a high score: a linear classifier is trained on them."""
    bad: list[str] = Field(default_factory=list)
    """Files of documents that deserve a low score; empty: a sample of the documents to be scored."""
    model: str | None = None
    """Instead of `good`: folder of a Hugging Face sequence classifier, run in batches on a GPU where there is one."""
    min: float | None = Field(default=None, ge=0, le=1)
    """Drop documents that score below; None scores only."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if bool(self.good) == bool(self.model):
            raise ValueError(f"score {self.name}: write either good: [files] or model: folder")
        return self


class Topics(Section):
    """Classification of documents by topic, to hold down topics that the web has too much of."""

    seeds: dict[str, list[str]] = Field(min_length=2)
    """Topic -> files of example documents; a linear classifier is trained on them."""
    domains: list[Domain] = Field(default_factory=lambda: list(_GENERAL))
    """Domains that are classified."""
    caps: dict[str, Share] = Field(default_factory=dict)
    """Topic -> largest share of its domain's text; what is above is dropped, lowest score first, then by hash."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        unknown = [topic for topic in self.caps if topic not in self.seeds]
        if unknown:
            raise ValueError(f"topics.caps names {', '.join(unknown)}; write one of {', '.join(self.seeds)}")
        if len(self.caps) == len(self.seeds) and sum(self.caps.values()) <= 1:
            raise ValueError("topics.caps: every topic is capped and the caps sum to 100% or less; leave one uncapped")
        return self


class Benchmark(Section):
    """An evaluation set whose examples must not be trained on."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    uri: str
    """jsonl or parquet files with one example a line."""
    fields: list[str] = Field(min_length=1)
    """Fields that make up an example, in order; a list field is joined with blanks. A document is compared with all of
    them together and with each that has at least 8 words."""
    threshold: Share = Share.parse("50%")
    """An example counts as contaminated when this share of its words lies in n-grams of the training text."""
    action: Literal["drop", "report"] = "drop"
    """Drop documents that alone cover an example to the threshold, or only report them."""


class Curate(Section):
    """How raw documents become training documents."""

    on_error: Literal["fail", "skip"] = "fail"
    """What an unreadable file, line or document does: end the run before anything is written, or be counted. A store
    that does not answer, and a file that changes meanwhile, end the run in any case."""
    max_lost: Share = Share.parse("1%")
    """Under `skip`: the largest share of a domain's files, or of its bytes, that may be left out as unreadable."""
    extractor: Literal["resiliparse", "trafilatura"] = "resiliparse"
    """HTML to text: fast, or some ten times slower and more precise about what is boilerplate."""
    repair: bool = True
    """Undo wrongly decoded text (mojibake) in documents where a cheap test sees it."""
    block: list[str] = Field(default_factory=list)
    """Files of hosts, one a line, whose documents (and those of their subdomains) are dropped."""
    redact: list[Literal["email", "ip"]] = Field(default_factory=list)
    """Personal data replaced by a placeholder."""
    languages: list[str] = Field(default_factory=list)
    """Languages to keep in the multilingual domain; empty keeps all."""
    dedup: Dedup = Dedup()
    lines: Lines = Lines()
    quality: Quality = Quality()
    quality_for: dict[str, dict[str, Any]] = Field(
        default_factory=lambda: {"code": {"max_symbol_chars": 0.8, "max_duplicate_lines": 0.75}}
    )
    """Domain or two-letter language -> fields of `quality` that differ there; a language wins over its domain. Naming
    `rules` there takes these sets instead of those of `quality`."""
    dirty_words: list[str] = Field(default_factory=list)
    """Files of words, one a line, counted in every document; `quality.max_dirty_words` bounds the count."""
    scores: list[Score] = Field(default_factory=list)
    topics: Topics | None = None
    decontaminate: list[Benchmark] = Field(default_factory=list)
    held_out: Share = Share.parse("2%")
    """Share of documents kept out of training for evaluation, chosen by a hash of the text."""

    @model_validator(mode="after")
    def _overrides(self) -> Self:
        for key, fields in self.quality_for.items():
            if key not in DOMAINS and not (len(key) == 2 and key.isalpha() and key.islower()):
                raise ValueError(f"quality_for.{key}: write a domain ({', '.join(DOMAINS)}) or a two-letter language")
            self.quality.changed(fields)
        names = [score.name for score in self.scores]
        if len(set(names)) < len(names):
            raise ValueError(f"scores: names {', '.join(names)} are not all different; rename one")
        return self

    def quality_of(self, domain: str, language: str) -> Quality:
        """Return the rules for documents of `domain` in `language`."""
        merged = {**self.quality_for.get(domain, {}), **self.quality_for.get(language, {})}
        return (self.quality.changed(merged) if merged else self.quality).spoken(language, merged)

    @property
    def by_language(self) -> list[str]:
        """Languages for which the rules of any domain differ."""
        sets = [self.quality.rules, *(fields.get("rules", ()) for fields in self.quality_for.values())]
        named = [key for key in self.quality_for if key not in DOMAINS]
        return sorted({*named, *(TUNED if any("fineweb2" in rules for rules in sets) else ())})
