"""Heuristic quality rules of a recipe: one bound per statistic, and the published rule sets by name.

A rule set (`rules: [gopher, fineweb]`) fills in the published bounds; a bound written beside it wins, and `null`
switches one off. Sources: Gopher, arXiv 2112.11446, appendix A.1.1 and table A1; C4, arXiv 1910.10683, section 2.2;
FineWeb, arXiv 2406.17557, section 3.4. How each statistic is measured: `llama3/data/statistics.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from llama3.recipe.section import Section

RuleSet = Literal["gopher", "repetition", "c4", "fineweb"]
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
}  # fmt: skip


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


class Quality(Section):
    """Bounds on the statistics of a document; the first that it breaks is the reason for which it is dropped."""

    rules: list[RuleSet] = Field(default_factory=list)
    """Published rule sets whose bounds hold here: gopher, repetition, c4, fineweb."""
    min_chars: Count | None = 100
    """Characters; short documents teach little and cost a begin and an end token each."""
    max_chars: Count | None = 2_000_000
    """Characters; longer documents are dumps and concatenations more often than texts."""
    max_symbol_chars: Portion | None = 0.4
    """Largest share of characters that are neither letters, digits nor blanks."""
    min_words: Count | None = None
    max_words: Count | None = None
    """Words; where every character is a word (Chinese, Japanese, Thai), set a higher bound by `quality_for`."""
    min_mean_word: Amount | None = None
    """Mean length of a word in characters."""
    max_mean_word: Amount | None = None
    """Mean length of a word in characters; a page of addresses has long ones."""
    max_symbols_per_word: Amount | None = None
    """Number signs and ellipses (the larger count of the two) for each word."""
    max_bullet_lines: Portion | None = None
    """Share of lines that begin with a list mark."""
    max_ellipsis_lines: Portion | None = None
    """Share of lines that end with an ellipsis."""
    min_alphabetic_words: Portion | None = None
    """Share of words with at least one letter."""
    min_stop_words: Count | None = None
    """How many different ones of the words the, be, to, of, and, that, have, with occur; for English."""
    max_duplicate_lines: Portion | None = 0.3
    """Share of lines that repeat an earlier line."""
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
    """Line ends for each word; a list has many."""
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

    def changed(self, fields: dict[str, Any]) -> Quality:
        """Return these rules with other values in `fields`, checked again.

        `rules` in it stand in the place of the old ones: bounds that only those gave go back to their defaults.
        """
        kept = self.model_dump()
        if "rules" in fields:
            kept = {name: value for name, value in kept.items() if published(self.rules).get(name, ...) != value}
        return Quality.model_validate({**kept, **published(fields.get("rules", [])), **fields})
