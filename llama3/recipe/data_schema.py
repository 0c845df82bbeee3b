"""The data half of a recipe but for `curate`: sources, tokenizer, token shards."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from llama3.recipe.base import DOMAINS, Domain, Name, Section
from llama3.recipe.units import Bytes, Share, Tokens

# Heuristic quality rules of a recipe: one bound per statistic, and the published rule sets by name.
#
# A rule set (`rules: [gopher, fineweb]`) fills in the published bounds; a bound written beside it wins, and `null`
# switches one off. Sources: Gopher, arXiv 2112.11446, appendix A.1.1 and table A1; C4, arXiv 1910.10683, section
# 2.2; FineWeb, arXiv 2406.17557, section 3.4; FineWeb-2, arXiv 2506.20920 and the configurations by language of its
# repository huggingface/fineweb-2 (commits 05e6729 and d331bee). How each statistic is measured:
# `llama3/data/kernels/statistics.py`.

RuleSet = Literal["gopher", "repetition", "c4", "fineweb", "fineweb2"]
PUBLISHED: dict[str, dict[str, Any]] = {
    "gopher": {
        "min_words": 50, "max_words": 100_000, "min_mean_word": 3, "max_mean_word": 10, "max_symbols_per_word": 0.1,
        "max_bullet_lines": 0.9, "max_ellipsis_lines": 0.3, "min_alphabetic_words": 0.8, "min_stop_words": 2,
    },
    "repetition": {
        "max_duplicate_lines": 0.3, "max_duplicate_paragraphs": 0.3, "max_duplicate_line_chars": 0.2,
        "max_duplicate_paragraph_chars": 0.2, "max_top_gram": {2: 0.20, 3: 0.18, 4: 0.16},
        "max_duplicate_grams": {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10},
    },
    "c4": {"min_sentences": 5, "max_braces": 0, "max_placeholder_text": 0},
    "fineweb": {
        "min_punctuated_lines": 0.12, "max_short_lines": 0.67, "max_duplicate_line_chars_strict": 0.01,
        "max_newlines_per_word": 0.3,
    },
    "fineweb2": {
        "min_words": 50, "max_words": 100_000, "min_mean_word": 3, "max_mean_word": 10, "max_symbols_per_word": 0.1,
        "max_bullet_lines": 0.9, "max_ellipsis_lines": 0.3, "min_alphabetic_words": 0.8, "max_duplicate_lines": 0.3,
        "max_top_gram": {2: 0.20, 3: 0.18, 4: 0.16},
        "max_duplicate_grams": {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10},
        "min_punctuated_lines": 0.12, "max_duplicate_line_chars_strict": 0.1, "max_newlines_per_word": 0.3,
    },
}  # fmt: skip
_BY_LANGUAGE = (
    "max_duplicate_lines", "max_top_gram", "max_duplicate_grams", "min_punctuated_lines", "min_mean_word",
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
"""Two-letter language -> bounds in the order of _BY_LANGUAGE; n-grams, from 2 and 5 words on, in thousandths."""
TUNED = tuple(_FINEWEB2)
"""Languages for which `fineweb2` has bounds."""


Count = Annotated[int, Field(ge=0)]
Portion = Annotated[float, Field(ge=0, le=1)]
"""A share as a number: published bounds are written 0.3, not 30%."""
Amount = Annotated[float, Field(ge=0)]


def published(rules: Any) -> dict[str, Any]:
    """Return the bounds of the rule sets named by `rules`; of two sets that bound the same, the later one wins."""
    bounds: dict[str, Any] = {}
    for name in map(str, rules) if isinstance(rules, list) else ():
        bounds |= PUBLISHED.get(name, {})
    return bounds


def tuned(language: str) -> dict[str, Any]:
    """Return the bounds of `fineweb2` for a two-letter language; none for one that it was not tuned for."""
    bounds = dict(zip(_BY_LANGUAGE, _FINEWEB2.get(language, ()), strict=False))
    for field, least in (("max_top_gram", 2), ("max_duplicate_grams", 5)):
        if field in bounds:
            bounds[field] = {size: share / 1000 for size, share in enumerate(bounds[field], least)}
    return bounds


class Quality(Section):
    """Bounds on the statistics of a document; the first that it breaks is the reason for which it is dropped."""

    rules: list[RuleSet] = Field(default_factory=list)
    """Published rule sets whose bounds hold here: gopher, repetition, c4, fineweb, fineweb2. The last is tuned for each
    of 30 languages; of others and of English its bounds are Gopher's and FineWeb's."""
    min_chars: Count | None = 100
    """Characters; short documents teach little and cost a begin and an end token each."""
    max_chars: Count | None = 2_000_000
    """Characters; longer documents are dumps and concatenations more often than texts."""
    max_symbol_chars: Portion | None = 0.4
    """Largest share of characters that are neither letters, digits nor blanks."""
    min_words: Count | None = None
    max_words: Count | None = None
    """Words; in scripts without spaces about two characters, in Thai and Lao four."""
    min_mean_word: Amount | None = None
    """Mean length of a word in characters."""
    max_mean_word: Amount | None = None
    """Mean length of a word in characters; a page of addresses has long ones."""
    max_symbols_per_word: Amount | None = None
    """Number signs and ellipses (the larger count of the two) for each word."""
    max_bullet_lines: Portion | None = None
    """Share of lines that begin with a list mark; `*` is one only before a blank."""
    max_ellipsis_lines: Portion | None = None
    """Share of lines that end with an ellipsis."""
    min_alphabetic_words: Portion | None = None
    """Share of words, here all that stands between blanks, with at least one letter."""
    min_stop_words: Count | None = None
    """How many different ones of the words the, be, to, of, and, that, have, with occur; for English."""
    max_duplicate_lines: Portion | None = 0.3
    """Share of lines that repeat an earlier line; those without a letter or digit (fences, brackets) never do."""
    max_duplicate_paragraphs: Portion | None = None
    """Share of paragraphs that repeat an earlier one."""
    max_duplicate_line_chars: Portion | None = None
    """Share of characters in lines that repeat an earlier line."""
    max_duplicate_paragraph_chars: Portion | None = None
    """Share of characters in paragraphs that repeat an earlier one."""
    max_top_gram: dict[int, Amount] = Field(default_factory=lambda: {2: 0.2})
    """n -> largest share of characters that the most frequent n-gram of words covers (n from 2 to 4)."""
    max_duplicate_grams: dict[int, Amount] = Field(default_factory=dict)
    """n -> largest share of characters in n-grams of words that repeat an earlier one (n from 5 to 10)."""
    min_punctuated_lines: Portion | None = None
    """Share of lines that end with punctuation."""
    max_short_lines: Portion | None = None
    """Share of lines of at most 30 characters."""
    max_duplicate_line_chars_strict: Portion | None = None
    """FineWeb's bound on characters in repeated lines, over all characters but line ends."""
    max_newlines_per_word: Amount | None = None
    """Lines but one for each word, without blank lines; a list has many."""
    min_sentences: Count | None = None
    """Sentences, in lines of three words or more that end with punctuation."""
    max_braces: Count | None = None
    """Curly braces: pages of code and templates, not prose."""
    max_placeholder_text: Count | None = None
    """How often the printer's filler text (the one that begins with lorem) occurs."""
    max_dirty_words: Amount | None = None
    """Words out of `curate.dirty_words` for each word."""
    max_divergence: Amount | None = None
    """KL divergence of a document's words from those of its domain, nats for each word (arXiv 2407.21783, 3.1.1)."""

    @model_validator(mode="before")
    @classmethod
    def _published(cls, given: Any) -> Any:
        """Put the bounds of the named rule sets under those that are written."""
        return {**published(given.get("rules")), **given} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for field, lengths in (("max_top_gram", range(2, 5)), ("max_duplicate_grams", range(5, 11))):
            wrong = [size for size in getattr(self, field) if size not in lengths]
            if wrong:
                raise ValueError(f"{field}: {wrong[0]} words; write {lengths[0]} to {lengths[-1]}")
        for name in ("chars", "words", "mean_word"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None and least > most:
                raise ValueError(f"min_{name} {least} is above max_{name} {most}: no document could pass; swap them")
        return self

    def spoken(self, language: str, but: Collection[str] = ()) -> Quality:
        """Return these rules with the bounds that `fineweb2` has for `language`, where they are among the rules.

        Bounds that the recipe sets itself stay, as do the fields of `but`.
        """
        if "fineweb2" not in self.rules:
            return self
        ours = published(self.rules)
        same = {field for field, bound in ours.items() if getattr(self, field) == bound} - set(but)
        return self.model_copy(update={field: bound for field, bound in tuned(language).items() if field in same})

    def changed(self, fields: dict[str, Any]) -> Quality:
        """Return these rules with other values in `fields`, checked again.

        `rules` in it stand in the place of the old ones: bounds that only those gave go back to their defaults.
        """
        kept = self.model_dump()
        if "rules" in fields:
            kept = {name: value for name, value in kept.items() if published(self.rules).get(name, ...) != value}
        return Quality.model_validate({**kept, **published(fields.get("rules", [])), **fields})


# The `curate` part of a recipe: every step of curation, its parameters and its defaults.
#
# A step that is left out of a recipe runs with the defaults below or, where the default is None or empty, not at
# all. Quality rules are in `quality.py`.

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


class QualityScore(Section):
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
    scores: list[QualityScore] = Field(default_factory=list)
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


# What studies found, as a recipe carries it: of a data source, and of what they changed in the recipe itself.
#
# It is written by `herd study apply` and decides nothing of what a run makes: no artifact's key knows it. So a
# recipe can ask for it (`require_judged`), a reader of a resolved recipe sees where a number comes from, and a
# judgement that is added later makes nothing anew. What this gives up: nobody checks that the study exists; its
# digest finds it.

Said = Literal["helps", "hurts", "mixed", "no significant difference"]
Level = Literal["nothing", "judged", "not hurting", "helps"]
ENOUGH: dict[Level, tuple[Said, ...]] = {
    "judged": ("helps", "hurts", "mixed", "no significant difference"),
    "not hurting": ("helps", "no significant difference"),
    "helps": ("helps",),
}
"""Level that a recipe can ask for -> judgements that meet it."""
StudyDigest = Annotated[str, Field(pattern="^[0-9a-f]{12,64}$")]
"""First digits of the digest of a study, quoted in YAML: digits alone would be read as a number."""


class AnnealingVerdict(Section):
    """What a study found out about a data source: the gain of a model that was annealed on it over one that was not."""

    study: Name
    digest: StudyDigest
    """Of the study's question, its first 12 digits or more."""
    says: Said
    """Over all scores; `mixed`: it helps some and hurts others."""
    score: str
    """Key of the score that shows it most clearly: `eval/bpb/math`."""
    gain: FiniteFloat
    """How much better that score is with the source; below 0 it is worse."""
    low: FiniteFloat
    """Lower end of the 95 % interval of the gain."""
    high: FiniteFloat

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low <= self.gain <= self.high:
            raise ValueError(f"gain {self.gain:g} is not between low {self.low:g} and high {self.high:g}; order them")
        return self

    def __str__(self) -> str:
        return f"{self.says} {self.gain:+.4f} on {self.score}, 95 % {self.low:.4f}..{self.high:.4f}"


class Studied(Section):
    """A study whose verdict changed this recipe."""

    study: Name
    digest: StudyDigest
    changed: list[str] = Field(min_length=1)
    """Fields that it changed, as `--set` names them."""

    def __str__(self) -> str:
        return f"{self.study} {self.digest}: {', '.join(self.changed)}"


class Source(Section):
    """Where documents of one domain come from."""

    uri: str
    """`installed` for text found on this machine, or a file, folder or glob: `data/*.jsonl.gz`, `s3://...`, `hf://...`.
    A recipe with a `<placeholder>` in any text can be planned and not run."""
    format: Literal["auto", "txt", "md", "html", "json", "jsonl", "csv", "tsv", "warc", "parquet", "arrow"] = "auto"
    """How to read the files; `auto` goes by the file's ending. Packed text (.gz, .zst, .bz2, .xz) is unpacked."""
    ignore: list[str] = Field(default_factory=list, exclude_if=lambda ignore: not ignore)
    """Globs of file names, or of paths below the folder, to pass over: `["*.png", "old/*"]`. Hidden files, checksums
    and, beside records, README and LICENSE are passed over anyway; any other file that is no text is an error."""
    text: str = "text"
    """The column or JSON field that holds the text."""
    language: str | None = None
    """Two-letter language of every document here; left out, it is detected."""
    licence: str = "unknown"
    """Recorded with every document."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the domain's tokens relative to its other sources; left out everywhere, all documents are pooled."""
    limit: Bytes | None = None
    """Read at most this much text."""
    name: Name | None = None
    """A source with a name stands apart: no mix draws from it, only stages that name it under `add`. None of its
    documents is held out, so that a model trained on it is scored on the same text as one that is not."""
    judged: AnnealingVerdict | None = Field(default=None, exclude_if=lambda judged: judged is None)
    """What a study of kind `annealing` found about it, written by `herd study apply`; changes nothing that is made."""
    system: bool = True
    """`installed` only: also read manual pages, /usr/share/doc and system translations where they exist."""


class TrainTokenizer(Section):
    """Train a byte-level BPE on the curated documents."""

    vocab: int = Field(ge=256, le=128_000)
    """Base tokens, at most 128,000; 256 special tokens come on top."""
    sample: Bytes = Bytes.parse("8GB")
    """Most text to learn from, drawn by domain in the shares of `mix`."""
    mix: str | None = None
    """Mix by whose shares the sample is drawn; left out, the first stage's."""


class TokenizerConfig(Section):
    """Exactly one of: a tokenizer to train, a tokenizer to use."""

    train: TrainTokenizer | None = None
    use: str | None = None
    """A tiktoken `tokenizer.model` in the Llama 3 format, or a Hugging Face `tokenizer.json` of that kind."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.train is None) == (self.use is None):
            raise ValueError("write either train: {vocab: ...} or use: path/to/tokenizer.model")
        return self


class TokenShards(Section):
    """How tokens are stored and ordered."""

    dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """Integer type on disk; `auto` takes the smallest that holds the vocabulary."""
    unit: Tokens | None = None
    """Tokens taken from one domain in a row; by default the longest sequence, so that long documents stay whole."""
    max_epochs: float = Field(default=4.0, gt=0)
    """How often a domain may be repeated (arXiv 2305.16264: up to 4 epochs cost almost nothing)."""
