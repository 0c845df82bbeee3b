"""Heuristic quality rules of a recipe: one bound per statistic, and the published rule sets by name.

A rule set (`rules: [gopher, fineweb]`) fills in the published bounds; a bound written beside it wins, and `null`
switches one off. Sources: Gopher, arXiv 2112.11446, appendix A.1.1 and table A1; C4, arXiv 1910.10683, section 2.2;
FineWeb, arXiv 2406.17557, section 3.4; FineWeb-2, arXiv 2506.20920 and the configurations by language of its repository
huggingface/fineweb-2 (commits 05e6729 and d331bee). How each statistic is measured: `llama3/data/statistics.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from llama3.recipe.section import Section

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
