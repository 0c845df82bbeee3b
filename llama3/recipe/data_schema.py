"""The data fields of a recipe: sources, curation, tokenizer, token shards."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, field_validator, model_validator

from herd.llama3.recipe.base import DOMAINS, Domain, Name, Section, decides, left_out, merge_mappings
from herd.llama3.recipe.units import Bytes, Share, Tokens

# Published rule sets (`rules: [gopher, fineweb]`); a bound in the recipe wins over them, and null switches one off.
# Gopher: arXiv 2112.11446, appendix A.1.1 and table A1; C4: arXiv 1910.10683, section 2.2; FineWeb: arXiv 2406.17557,
# section 3.4; FineWeb-2: arXiv 2506.20920 and the language configurations of huggingface/fineweb-2 (commits 05e6729 and
# d331bee). `llama3/data/kernels/statistics.py` measures the statistics.
RuleSet = Literal["gopher", "repetition", "c4_strict", "c4_fineweb", "fineweb", "fineweb2"]
PUBLISHED: dict[str, dict[str, Any]] = {
    "gopher": {
        "min_words": 50, "max_words": 100_000, "min_mean_word": 3, "max_mean_word": 10, "max_symbols_per_word": 0.1,
        "max_bullet_lines": 0.9, "max_ellipsis_lines": 0.3, "min_alphabetic_words": 0.8, "min_stop_words": 2,
    },
    "repetition": {
        "max_duplicate_lines": 0.3, "max_duplicate_paragraphs": 0.3, "max_duplicate_line_chars": 0.2,
        "max_duplicate_paragraph_chars": 0.2, "max_top_ngram": {2: 0.20, 3: 0.18, 4: 0.16},
        "max_duplicate_ngrams": {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10},
    },
    "c4_strict": {"min_sentences": 5, "max_braces": 0, "max_placeholder_text": 0},
    "c4_fineweb": {"min_sentences_any_line": 5, "max_braces": 0, "max_placeholder_text": 0},
    "fineweb": {
        "min_punctuated_lines": 0.12, "max_short_lines": 0.67, "max_duplicate_line_chars_strict": 0.01,
        "max_newlines_per_word": 0.3,
    },
    "fineweb2": {
        "min_words": 50, "max_words": 100_000, "min_mean_word": 3, "max_mean_word": 10, "max_symbols_per_word": 0.1,
        "max_bullet_lines": 0.9, "max_ellipsis_lines": 0.3, "min_alphabetic_words": 0.8, "max_duplicate_lines": 0.3,
        "max_top_ngram": {2: 0.20, 3: 0.18, 4: 0.16},
        "max_duplicate_ngrams": {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10},
        "min_punctuated_lines": 0.12, "max_duplicate_line_chars_strict": 0.1, "max_newlines_per_word": 0.3,
    },
}  # fmt: skip
_BY_LANGUAGE = (
    "max_duplicate_lines", "max_top_ngram", "max_duplicate_ngrams", "min_punctuated_lines", "min_mean_word",
    "max_mean_word", "min_alphabetic_words", "max_newlines_per_word",
)  # fmt: skip
_FINEWEB2: dict[str, tuple[Any, ...]] = {
    "ar": (0.304, (197, 172, 146), (165, 153, 142, 131, 120, 109), 0.143, 2, 9, 0.787, 0.189),
    "bg": (0.317, (173, 157, 139), (170, 158, 144, 131, 120, 108), 0.154, 3, 10, 0.756, 0.142),
    "ca": (0.294, (216, 189, 168), (159, 149, 137, 126, 116, 105), 0.154, 2, 11, 0.832, 0.118),
    "cs": (0.311, (206, 183, 165), (168, 157, 145, 133, 121, 109), 0.06, 3, 11, 0.781, 0.182),
    "da": (0.305, (367, 297, 232), (169, 158, 147, 134, 123, 112), 0.1, 3, 11, 0.798, 0.182),
    "de": (0.263, (169, 153, 137), (141, 134, 126, 117, 108, 98), 0, 0, 15, 0.774, 0.152),
    "el": (0.31, (194, 175, 156), (174, 163, 153, 142, 130, 119), 0.167, 3, 11, 0.809, 0.116),
    "es": (0.252, (156, 140, 125), (145, 136, 127, 117, 108, 99), 0.182, 3, 14, 0.825, 0.138),
    "fa": (0.246, (189, 164, 143), (157, 147, 137, 127, 117, 107), 0.2, 2, 9, 0.812, 0.15),
    "fi": (0.293, (253, 202, 179), (153, 143, 133, 122, 112, 101), 0.114, 3, 14, 0.755, 0.161),
    "fr": (0.264, (161, 149, 134), (150, 141, 131, 121, 111, 100), 0.1, 2, 11, 0.812, 0.185),
    "he": (0.34, (239, 202, 173), (160, 151, 140, 129, 118, 108), 0.2, 2, 9, 0.799, 0.126),
    "hi": (0.206, (208, 198, 161), (135, 125, 116, 108, 99, 90), 0.091, 2, 21, 0.837, 0.316),
    "hu": (0.322, (226, 198, 172), (169, 159, 148, 136, 124, 112), 0.067, 3, 15, 0.766, 0.231),
    "id": (0.241, (194, 166, 145), (166, 155, 144, 133, 122, 111), 0.111, 3, 12, 0.805, 0.157),
    "it": (0.246, (198, 156, 133), (144, 136, 127, 118, 109, 100), 0.025, 3, 21, 0.807, 0.2),
    "ja": (0.328, (239, 196, 172), (243, 225, 207, 190, 175, 159), 0.096, 1, 6, 0.759, 0.13),
    "ko": (0.374, (282, 228, 185), (201, 184, 168, 154, 140, 127), 0.062, 1, 6, 0.791, 0.196),
    "nl": (0.296, (213, 182, 158), (156, 146, 136, 126, 115, 104), 0.102, 3, 17, 0.828, 0.154),
    "no": (0.283, (204, 175, 150), (146, 139, 128, 119, 110, 99), 0.107, 3, 12, 0.783, 0.167),
    "pl": (0.32, (222, 198, 176), (172, 160, 148, 136, 123, 111), 0.087, 3, 12, 0.726, 0.158),
    "pt": (0.287, (371, 191, 163), (163, 153, 141, 130, 119, 108), 0.077, 3, 13, 0.814, 0.186),
    "ro": (0.289, (161, 146, 131), (160, 149, 138, 127, 117, 106), 0.081, 1, 14, 0.779, 0.207),
    "ru": (0.322, (184, 164, 146), (168, 156, 145, 133, 121, 109), 0.231, 3, 11, 0.713, 0.139),
    "sk": (0.319, (316, 218, 171), (176, 165, 152, 140, 127, 115), 0, 2, 11, 0.752, 0.214),
    "sv": (0.292, (242, 195, 174), (156, 147, 136, 125, 116, 105), 0.2, 3, 12, 0.841, 0.135),
    "th": (0.349, (221, 197, 162), (185, 168, 152, 137, 124, 111), 0, 2, 10, 0.9, 0.153),
    "uk": (0.3, (189, 172, 153), (160, 148, 136, 124, 113, 102), 0.167, 3, 11, 0.694, 0.175),
    "vi": (0.293, (223, 197, 171), (178, 163, 150, 136, 124, 111), 0.333, 3, 11, 0.803, 0.103),
    "zh": (0.287, (256, 201, 171), (198, 182, 167, 154, 140, 127), 0.106, 1, 5, 0.735, 0.178),
}
"""Two-letter language -> bounds in the order of _BY_LANGUAGE; n-grams of 2 to 4 and 5 to 10 words, in thousandths."""
TUNED = tuple(_FINEWEB2)
"""Languages with bounds in `fineweb2`."""

Count = Annotated[Annotated[int, Field(ge=0)] | None, decides("curated")]
Portion = Annotated[Annotated[float, Field(ge=0, le=1)] | None, decides("curated")]
"""A share as a number, as in the published rule sets: 0.3, not 30%."""
Amount = Annotated[Annotated[float, Field(ge=0)] | None, decides("curated")]


def rule_set_bounds(rules: Any) -> dict[str, Any]:
    """Return the bounds of the rule sets `rules`; a later set wins."""
    bounds: dict[str, Any] = {}
    for name in map(str, rules) if isinstance(rules, list) else ():
        bounds |= PUBLISHED.get(name, {})
    return bounds


class Quality(Section):
    """Bounds on the statistics of a document. The first violated bound is the reason to drop it; null: no bound."""

    rules: Annotated[list[RuleSet], decides("curated")] = Field(default_factory=list)
    """Published rule sets; all drop documents, none removes lines. `c4_strict`, as in C4's paper, counts sentences only
    in lines that end with punctuation, `c4_fineweb` in all, as FineWeb does. `fineweb2` has bounds for 30 languages; in
    other languages and in English it uses the bounds of Gopher and FineWeb."""
    min_chars: Count = 100
    """Minimum characters; short documents teach little, and each costs a begin and an end token."""
    max_chars: Count = 2_000_000
    """Maximum characters; longer documents are often dumps and concatenations."""
    max_symbol_chars: Portion = 0.4
    """Maximum share of characters that are not letters, digits or blanks."""
    min_words: Count = None
    """Minimum words."""
    max_words: Count = None
    """Maximum words. A word is about two characters in scripts without spaces, four in Thai and Lao."""
    min_mean_word: Amount = None
    """Minimum mean length of a word in characters."""
    max_mean_word: Amount = None
    """Maximum mean length of a word in characters; lists of addresses have long words."""
    max_symbols_per_word: Amount = None
    """Maximum number signs per word, and maximum ellipses per word."""
    max_bullet_lines: Portion = None
    """Maximum share of lines that start with a list mark; `*` counts only before a blank."""
    max_ellipsis_lines: Portion = None
    """Maximum share of lines that end with an ellipsis."""
    min_alphabetic_words: Portion = None
    """Minimum share of words, here split at blanks, with at least one letter."""
    min_stop_words: Count = None
    """Minimum number of different words among the, be, to, of, and, that, have, with; for English."""
    max_duplicate_lines: Portion = 0.3
    """Maximum share of lines that repeat an earlier line; lines without a letter or digit do not count as repeats."""
    max_duplicate_paragraphs: Portion = None
    """Maximum share of paragraphs that repeat an earlier paragraph."""
    max_duplicate_line_chars: Portion = None
    """Maximum share of characters in lines that repeat an earlier line."""
    max_duplicate_paragraph_chars: Portion = None
    """Maximum share of characters in paragraphs that repeat an earlier paragraph."""
    max_top_ngram: Annotated[dict[int, Annotated[float, Field(ge=0)]], decides("curated")] = Field(
        default_factory=lambda: {2: 0.2}
    )
    """n -> maximum share of characters in the most frequent word n-gram (n from 2 to 4)."""
    max_duplicate_ngrams: Annotated[dict[int, Annotated[float, Field(ge=0)]], decides("curated")] = Field(
        default_factory=dict
    )
    """n -> maximum share of characters in word n-grams that repeat an earlier one (n from 5 to 10)."""
    min_punctuated_lines: Portion = None
    """Minimum share of lines that end with punctuation."""
    max_short_lines: Portion = None
    """Maximum share of lines of at most 30 characters."""
    max_duplicate_line_chars_strict: Portion = None
    """FineWeb's maximum share of characters in repeated lines, of all characters except line ends."""
    max_newlines_per_word: Amount = None
    """Maximum line ends between non-blank lines per word; lists have many."""
    min_sentences: Count = None
    """Minimum sentences, in lines of three words or more that end with punctuation."""
    min_sentences_any_line: Annotated[Count, left_out(None)] = None
    """Minimum sentences, in lines of three words or more."""
    max_braces: Count = None
    """Maximum curly braces; code and templates have many."""
    max_placeholder_text: Count = None
    """Maximum occurrences of `lorem ipsum` text."""
    max_dirty_words: Amount = None
    """Maximum words from `curate.dirty_words` per word."""
    max_divergence: Annotated[float | None, Field(ge=0), decides("annotated", "curated")] = None
    """Maximum KL divergence from the words of the document's domain, in nats per word (arXiv 2407.21783, 3.1.1)."""

    @field_validator("rules", mode="before")
    @classmethod
    def _c4_has_two_forms(cls, rules: Any) -> Any:
        if isinstance(rules, list) and "c4" in rules:
            raise ValueError("c4 has two forms; write c4_fineweb, as in FineWeb, or c4_strict, which drops more")
        return rules

    @model_validator(mode="before")
    @classmethod
    def _published(cls, given: Any) -> Any:
        return merge_mappings(rule_set_bounds(given.get("rules")), given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for field, lengths in (("max_top_ngram", range(2, 5)), ("max_duplicate_ngrams", range(5, 11))):
            wrong = [size for size in getattr(self, field) if size not in lengths]
            if wrong:
                raise ValueError(f"{field}: {wrong[0]} words; write {lengths[0]} to {lengths[-1]}")
        for name in ("chars", "words", "mean_word"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None and least > most:
                raise ValueError(f"min_{name} {least} is above max_{name} {most}: no document could pass; swap them")
        return self

    def for_language(self, language: str, but: Collection[str] = ()) -> Quality:
        """Return these rules with the `fineweb2` bounds of `language`, if `fineweb2` is among the rules.

        Bounds set by the recipe itself and the fields of `but` do not change.
        """
        if "fineweb2" not in self.rules:
            return self
        bounds = dict(zip(_BY_LANGUAGE, _FINEWEB2.get(language, ()), strict=False))
        for field, least in (("max_top_ngram", 2), ("max_duplicate_ngrams", 5)):
            if field in bounds:
                bounds[field] = {size: share / 1000 for size, share in enumerate(bounds[field], least)}
        defaults = {
            field for field, bound in rule_set_bounds(self.rules).items() if getattr(self, field) == bound
        } - set(but)
        return self.model_copy(update={field: bound for field, bound in bounds.items() if field in defaults})

    def describe(self) -> str:
        """Return the rule sets, and the bounds that differ from theirs and from the defaults, in a line."""
        usual = Quality(rules=self.rules)
        own = {
            name: getattr(self, name) for name in Quality.model_fields if getattr(self, name) != getattr(usual, name)
        }
        bounds = [f"{name} {value}" if value not in (None, {}) else f"no {name}" for name, value in own.items()]
        return ", ".join([*self.rules, *bounds]) or "the defaults"

    def changed(self, fields: dict[str, Any]) -> Quality:
        """Return these rules with other values in `fields`, validated again.

        New `rules` replace the old ones: bounds that only the old rule sets set go back to their defaults. Mappings are
        merged by key, as in a recipe.
        """
        kept = self.model_dump()
        if "rules" in fields:
            kept = {name: value for name, value in kept.items() if rule_set_bounds(self.rules).get(name, ...) != value}
        return self.model_validate(merge_mappings({**kept, **rule_set_bounds(fields.get("rules", []))}, fields))


class Dedup(Section):
    """Removal of repeated documents within each domain and language: by URL, exact, and near (MinHash)."""

    url: Annotated[Literal["newest", "all"], decides("curated")] = "newest"
    """Of the documents of one URL, keep the newest (arXiv 2407.21783, section 3.1.1) and those without a date, or keep
    all."""
    jaccard: Annotated[float, decides("curated")] = Field(default=0.8, gt=0, le=1)
    """Minimum overlap of the word shingles of two near duplicates; 1: only exact copies."""
    shingle: Annotated[int, decides("annotated")] = Field(default=5, ge=1)
    """Words per shingle."""
    bands: Annotated[int, decides("annotated")] = Field(default=20, ge=1, le=64)
    """MinHash bands; more bands find more candidate pairs. 20 x 6 finds 99.8 % of pairs at Jaccard 0.8, the usual
    14 x 8 finds 92 %; a check of each pair removes false candidates."""
    rows: Annotated[int, decides("annotated")] = Field(default=6, ge=1, le=64)
    """Hashes per band; more rows find fewer candidate pairs."""


class Lines(Section):
    """Removal of lines that many documents share, and of lines that repeat themselves."""

    domains: Annotated[list[Domain], decides("annotated")] = Field(["general", "multilingual"])
    """Domains to clean; in code and math repeated lines are normal."""
    max_copies: Annotated[int | None, decides("annotated", "curated")] = Field(default=6, ge=1)
    """Remove all copies of a line with more copies than this in one bucket; null: keep all."""
    bucket_documents: Annotated[int, decides("curated")] = Field(default=30_000_000, ge=1)
    """Documents per bucket; each domain and language is split into buckets by document id."""
    min_chars: Annotated[int, decides("annotated")] = Field(default=8, ge=1)
    """Minimum characters of a line to count as a copy; fences of code never count."""
    max_repeated_ngrams: Annotated[Share | None, decides("curated")] = None
    """Remove a line if more than this share of its words is in repeated n-grams, as in logs; null: keep all."""
    ngram: Annotated[int, decides("curated")] = Field(default=5, ge=2)
    """Words per n-gram of `max_repeated_ngrams`."""


class QualityScore(Section):
    """A quality score of each document, and the minimum to keep a document."""

    name: Annotated[str, decides("annotated")] = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Column of the score; deduplication keeps the copy with the highest value of the first score."""
    domains: Annotated[list[Domain], decides("annotated")] = Field(default_factory=list)
    """Domains to score; empty: all."""
    good: Annotated[list[str], decides("annotated")] = Field(default_factory=list)
    """Files, folders or globs of good documents, to train a linear classifier."""
    bad: Annotated[list[str], decides("annotated")] = Field(default_factory=list)
    """Files of bad documents; empty: a sample of the documents to score."""
    model: Annotated[str | None, decides("annotated")] = None
    """Folder of a Hugging Face sequence classifier, instead of `good`; it runs in batches, on a GPU if there is one."""
    min: Annotated[float | None, decides("curated")] = Field(default=None, ge=0, le=1)
    """Drop documents with a lower score; null: drop none."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if bool(self.good) == bool(self.model):
            raise ValueError(f"score {self.name}: write either good: [files] or model: folder")
        return self


class Topics(Section):
    """Classification of documents by topic, to limit topics that are too frequent on the web."""

    seeds: Annotated[dict[str, list[str]], decides("annotated")] = Field(min_length=2)
    """Topic -> files of example documents, to train a linear classifier."""
    domains: Annotated[list[Domain], decides("annotated")] = Field(["general"])
    """Domains to classify."""
    caps: Annotated[dict[str, Share], decides("curated")] = Field(default_factory=dict)
    """Topic -> maximum share of its domain's text; the documents with the lowest score are dropped, then by hash."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        unknown = [topic for topic in self.caps if topic not in self.seeds]
        if unknown:
            raise ValueError(f"topics.caps names {', '.join(unknown)}; write one of {', '.join(self.seeds)}")
        if len(self.caps) == len(self.seeds) and sum(self.caps.values()) <= 1:
            raise ValueError("topics.caps: every topic is capped and the caps sum to 100% or less; leave one uncapped")
        return self


class Benchmark(Section):
    """An evaluation set; its examples must not be in the training data."""

    name: Annotated[str, decides("curated")] = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    uri: Annotated[str, decides("curated")]
    """jsonl or parquet files with one example per line."""
    fields: Annotated[list[str], decides("curated")] = Field(min_length=1)
    """Fields of an example, in order; the items of a list are joined with blanks. Documents are compared with all
    fields together and with each field of at least 8 words."""
    threshold: Annotated[Share, decides("curated")] = Share.parse("50%")
    """An example is contaminated if at least this share of its words is in n-grams of the training text."""
    action: Annotated[Literal["drop", "report"], decides("curated")] = "drop"
    """`drop` documents that alone contain an example to the threshold, or only `report` them."""


HELD_OUT_DOCUMENTS, HELD_OUT_BYTES = 10, 20_000
"""Held-out documents of a domain, and their bytes, below which its score says little about a model."""
HELD_OUT_CUT = 1024
"""Bytes of a document that count towards these when it is held out: a model of short sequences scores no more."""
HELD_OUT_MOST = 3, 10
"""At most one in this many documents, and bytes, is held out to have so many documents, and then so many bytes."""


def few_held_out(
    of: str, documents: int, size: float, remedy: str = "add text or raise curate.validation_fraction"
) -> str:
    """Return a line if `documents` of `size` bytes are too few to judge a model by; "" if they are enough."""
    if not documents:
        return f"{of}: no held-out document, so it is not scored; {remedy}"
    if documents >= HELD_OUT_DOCUMENTS and size >= HELD_OUT_BYTES:
        return ""
    amount = f"{documents:,} held-out document{'s' * (documents != 1)} with {size / 1000:,.1f} kB"
    least = f"{HELD_OUT_DOCUMENTS} with {HELD_OUT_BYTES / 1000:g} kB are the least"
    return f"{of}: {amount}, too little to judge a model by ({least}); {remedy}"


class Curate(Section):
    """How raw documents become training documents. A step runs with its defaults, or not if the default is empty."""

    on_error: Annotated[Literal["fail", "skip"], decides("collected")] = "fail"
    """On an unreadable file, line or document: `fail` before any output, or `skip` and count it. A store that does not
    answer and a file that changes during the run always fail."""
    max_lost: Annotated[Share, decides("collected")] = Share.parse("1%")
    """With `skip`: maximum share of unreadable files or bytes in a domain."""
    extractor: Annotated[Literal["resiliparse", "trafilatura"], decides("collected")] = "resiliparse"
    """HTML to text; trafilatura is about ten times slower and removes boilerplate more precisely."""
    repair: Annotated[bool, decides("collected")] = True
    """Repair wrongly decoded text (mojibake) in documents where a fast test finds it."""
    block: Annotated[list[str], decides("curated")] = Field(default_factory=list)
    """Files of hosts, one per line; documents of these hosts and their subdomains are dropped."""
    redact: Annotated[list[Literal["email", "ip"]], decides("curated")] = Field(default_factory=list)
    """Kinds of personal data to replace by a placeholder."""
    languages: Annotated[list[str], decides("curated")] = Field(default_factory=list)
    """Languages to keep in the multilingual domain; empty: all."""
    dedup: Dedup = Dedup()
    lines: Lines = Lines()
    quality: Quality = Quality()
    quality_for: Annotated[dict[str, dict[str, Any]], decides("annotated", "curated")] = Field(
        default_factory=lambda: {
            "code": {"rules": [], "max_symbol_chars": 0.8, "max_duplicate_lines": 0.75, "max_top_ngram": {}}
        }
    )
    """Domain or two-letter language -> its changes to `quality`; a language wins over its domain. `rules` here replace
    those of `quality`. Entries are merged with the default, in which code has no rules that were made for prose; `{}`
    removes it."""
    dirty_words: Annotated[list[str], decides("annotated")] = Field(default_factory=list)
    """Files of words, one per line, to count in each document; `quality.max_dirty_words` bounds the count."""
    scores: list[QualityScore] = Field(default_factory=list)
    topics: Topics | None = None
    decontaminate: Annotated[list[Benchmark | Literal["evaluated"]], decides("curated")] = Field(default_factory=list)
    """Evaluation sets to search the documents for; `evaluated`: the data files of the suites that `evaluate` names."""
    validation_fraction: Annotated[Share, decides("curated", "conversations")] = Share.parse("2%")
    """Share of documents to keep for evaluation and not train on, chosen by a hash of the text. Of a small
    domain more are kept: 10 documents, or a third of it, and 20 kB, or a tenth of it."""

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

    @property
    def benchmarks(self) -> list[Benchmark]:
        """The evaluation sets; `with_evaluation_sets` has put those of the suites in place of `evaluated`."""
        named = [benchmark for benchmark in self.decontaminate if benchmark != "evaluated"]
        assert len(named) == len(self.decontaminate)
        return named

    @property
    def needs_divergence(self) -> bool:
        """Whether any rule bounds word divergence, which needs an extra pass over the text."""
        rules = [self.quality, *(self.quality.changed(fields) for fields in self.quality_for.values())]
        return any(rule.max_divergence is not None for rule in rules)

    def quality_of(self, domain: str, language: str) -> Quality:
        """Return the rules for documents of `domain` in `language`."""
        merged = self.quality_for.get(domain, {})
        if own := self.quality_for.get(language):
            merged = merge_mappings(merged, own)
        return (self.quality.changed(merged) if merged else self.quality).for_language(language, merged)

    @property
    def by_language(self) -> list[str]:
        """Languages with rules that differ from those of their domain."""
        sets = [self.quality.rules, *(fields.get("rules", ()) for fields in self.quality_for.values())]
        named = [key for key in self.quality_for if key not in DOMAINS]
        return sorted({*named, *(TUNED if any("fineweb2" in rules for rules in sets) else ())})


# `herd study apply` writes the results of studies into a recipe. They do not change the key of any artifact.
Effect = Literal["helps", "hurts", "mixed", "no significant difference"]
Level = Literal["nothing", "judged", "not hurting", "helps"]
ENOUGH: dict[Level, tuple[Effect, ...]] = {
    "judged": ("helps", "hurts", "mixed", "no significant difference"),
    "not hurting": ("helps", "no significant difference"),
    "helps": ("helps",),
}
"""Required level -> verdicts that satisfy it."""
StudyDigest = Annotated[str, Field(pattern="^[0-9a-f]{12,64}$")]
"""First digits of a study's digest; quoted in YAML, which reads digits alone as a number."""


class AnnealingVerdict(Section):
    """The result of a study of a data source: the gain from annealing a model on it."""

    study: Annotated[Name, decides("nothing")]
    digest: Annotated[StudyDigest, decides("nothing")]
    """At least the first 12 digits of the digest of the study."""
    says: Annotated[Effect, decides("nothing")]
    """Effect over all scores; `mixed`: it helps some scores and hurts others."""
    score: Annotated[str, decides("nothing")]
    """Score with the clearest effect, such as `eval/bpb/math`."""
    gain: Annotated[FiniteFloat, decides("nothing")]
    """Improvement of that score with the source; negative: it is worse."""
    low: Annotated[FiniteFloat, decides("nothing")]
    """Lower end of the 95 % interval of the gain."""
    high: Annotated[FiniteFloat, decides("nothing")]
    """Upper end of the interval."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low <= self.gain <= self.high:
            raise ValueError(f"gain {self.gain:g} is not between low {self.low:g} and high {self.high:g}; order them")
        return self

    def __str__(self) -> str:
        return f"{self.says} {self.gain:+.4f} on {self.score}, 95 % {self.low:.4f}..{self.high:.4f}"


class Studied(Section):
    """A study whose verdict changed this recipe."""

    study: Annotated[Name, decides("nothing")]
    digest: Annotated[StudyDigest, decides("nothing")]
    changed: Annotated[list[str], decides("nothing")] = Field(min_length=1)
    """Changed fields, named as for `--set`."""

    def __str__(self) -> str:
        return f"{self.study} {self.digest}: {', '.join(self.changed)}"


class Source(Section):
    """Documents of one domain."""

    uri: Annotated[str, decides("collected")]
    """`installed` (text on this machine), `duckdb-functions` (a page on each SQL function of DuckDB), or a file, folder
    or glob: `data/*.{csv,tsv}`, `s3://...`, `hf://...`. A recipe with a `<placeholder>` can be planned but not run."""
    format: Annotated[
        Literal["auto", "txt", "md", "html", "tex", "code", "json", "jsonl", "csv", "tsv", "warc", "parquet", "arrow"],
        decides("collected"),
    ] = "auto"
    """File format; `auto`: from the file name, also of compressed files (.gz, .zst, .bz2, .xz). `code`: a repository;
    only programs by their endings, without vendored, generated and binary files."""
    ignore: Annotated[list[str], decides("collected"), left_out([])] = Field(default_factory=list)
    """Globs of file names, or of paths below the folder, to skip: `["*.png", "old/*"]`. Names with `.` or `_` first,
    checksums and, beside records, README are always skipped; any other file that is not text is an error."""
    text: Annotated[str, decides("collected")] = "text"
    """Column or JSON field of the text; `data.content`: in an object. Strings of a list become paragraphs."""
    contents: Annotated[str | None, decides("collected"), left_out(None)] = None
    """Where the texts are, if the column `text` has ids: a remote address with `{}` for the id, such as
    `https://softwareheritage.s3.amazonaws.com/content/{}`. Gzip is unpacked. A content is checked against an id that is
    its git hash."""
    language: Annotated[str | None, decides("collected")] = None
    """Two-letter language of all documents; null: detected per document."""
    license: Annotated[str, decides("collected")] = "unknown"
    """License to store with each document."""
    weight: Annotated[float | None, decides("tokens", "checkpoint")] = Field(default=None, gt=0)
    """Share of the domain's tokens relative to its other sources; null in all sources: their documents are pooled."""
    limit: Annotated[Bytes | None, decides("collected")] = None
    """Maximum text to read; null: all."""
    name: Annotated[Name | None, decides("curated", "tokens", "checkpoint")] = None
    """Name for `extra_sources` of stages. Mixes do not use a named source, and none of its documents is kept for
    validation, so that models with and without it are scored on the same text."""
    annealing_verdict: Annotated[AnnealingVerdict | None, left_out(None)] = None
    """Result of a study of kind `annealing`, written by `herd study apply`; it does not change any artifact."""
    system: Annotated[bool, decides("collected")] = True
    """`installed` only: also read manual pages, /usr/share/doc and system translations."""

    @field_validator("contents")
    @classmethod
    def _remote_with_id(cls, contents: str | None) -> str | None:
        if contents is not None and ("://" not in contents or contents.count("{}") != 1):
            raise ValueError("must be a remote address with one {} for the id, such as s3://bucket/content/{}")
        return contents


class ConversationSource(Section):
    """Conversations for stages of kind `sft`: JSON lines, one conversation per line.

    A line is `{"messages": [{"role": "user", "content": "..."}, ...]}` with an optional first `system` message, then
    `user` and `assistant` in turns, the last one `assistant`; ShareGPT's `conversations`; `prompt` and `response` (or
    `completion`); or Alpaca's `instruction`, `input`, `output`. The first line of a file decides its form. A broken
    line, and one with tools, is an error before any work starts.
    """

    uri: Annotated[str, decides("conversations", since="use")]
    """A file, folder or glob of `.jsonl` files, also packed: `chats/*.jsonl.gz`, `s3://...`, `hf://...`; or questions
    that herd generates: `problems` (worked math), `duckdb-functions` (SQL functions of DuckDB)."""
    ignore: Annotated[list[str], decides("conversations", since="use")] = Field(default_factory=list)
    """Globs of file names, or of paths below the folder, to skip."""
    license: Annotated[str, decides("conversations", since="use")] = "unknown"
    """License of the conversations; `unknown`: that of a line's own field `license`, if it has one."""
    limit: Annotated[int | None, decides("conversations", since="use")] = Field(default=None, ge=1)
    """Maximum conversations to read; null: all. `problems` needs a limit."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.uri == "problems" and self.limit is None:
            raise ValueError("limit: is missing; problems are generated without end: write how many, such as 2000")
        return self


class TrainTokenizer(Section):
    """Train a byte-level BPE on the curated documents."""

    vocab: Annotated[int, decides("tokenizer")] = Field(ge=256, le=128_000)
    """Base tokens; 256 special tokens are added."""
    sample: Annotated[Bytes, decides("tokenizer")] = Bytes.parse("8GB")
    """Maximum text to train on, sampled by domain in the shares of `mix`."""
    mix: Annotated[str | None, decides("tokenizer")] = None
    """Mix of the sample; null: the mix of the first stage."""
    pattern: Annotated[Literal["llama3", "gpt2", "qwen2", "tekken"], decides("tokenizer"), left_out("llama3")] = (
        "llama3"
    )
    """Published pattern at which text is split before merges: of Llama 3, GPT-2, Qwen 2, or Mistral-Nemo."""


class TokenizerConfig(Section):
    """A tokenizer to train or a tokenizer to use; write exactly one."""

    train: TrainTokenizer | None = None
    use: Annotated[str | None, decides("tokenizer")] = None
    """A tiktoken `tokenizer.model` in the Llama 3 format, a `tokenizer.json` of a byte-level BPE with the files beside
    it, or a GGUF file; or the tokenizer of a model of the root, by alias (`quickstart@champion`); or an address that
    `herd fetch` downloads."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.train is None) == (self.use is None):
            raise ValueError("write either train: {vocab: ...} or use: path/to/tokenizer.model")
        return self


class TokenShards(Section):
    """Storage and order of tokens."""

    dtype: Annotated[Literal["auto", "uint16", "uint32"], decides("tokens", "conversations", since="never")] = "auto"
    """Integer type on disk; `auto`: the smallest type for the vocabulary."""
    chunk_tokens: Annotated[Tokens | None, decides("checkpoint")] = None
    """Tokens to take from one domain in a row; null: the longest sequence, so that long documents stay whole."""
    shuffle: Annotated[Literal["documents", "chunks"], decides("checkpoint"), left_out("documents")] = "documents"
    """`chunks`: after a domain's documents also its chunks, so that a small batch has pieces of many documents, not the
    next pages of a few; up to twice as many documents are cut."""
    max_epochs: Annotated[float, decides("nothing")] = Field(default=4.0, gt=0)
    """Maximum repetitions of a domain (arXiv 2305.16264: up to 4 epochs cost almost nothing)."""
