"""What can become of a document, in words: one sentence for each outcome; those of the rules stand beside the rules."""

from __future__ import annotations

from llama3.data.filters import explanation

EXPLAINED = {
    "kept": "Trained on.",
    "held_out": "Kept out of training for evaluation, chosen by a hash of the text.",
    "over_limit": "Would not fit under the source's limit.",
    "passed_over": "A file that is no data (hidden, README, LICENSE, checksum), or that `ignore` names.",
    "unknown_format": "A file whose ending says no format that is read.",
    "not_a_file": "A pipe, a device or a link to nothing.",
    "truncated_file": "In a file that is damaged; what came before the break was read.",
    "no_page": "A record of a web archive that is no page of text: an image, an error, a redirection.",
    "bad_csv": "A row with other columns than the first one, or with a quote that does not end.",
    "doubled_column": "In a file that names a column twice.",
    "too_deep": "Markup nested deeper, or with more attributes, than any page that people read.",
    "too_slow": "Markup that took longer to read than the time limit of a document.",
    "bad_json": "A line that is no JSON object.",
    "bad_utf8": "A line that is not UTF-8.",
    "no_text_field": "A record without the text field.",
    "null_text": "A record whose text is null.",
    "not_text": "A record whose text is no string.",
    "empty": "Nothing is left after extraction and normalisation.",
    "line_too_long": "A line longer than the reader takes.",
    "old_version": "Another version of the same URL is newer.",
    "exact_duplicate": "The same text stands elsewhere in its domain.",
    "near_duplicate": "Nearly the same text stands elsewhere in its domain and language.",
    "contaminated": "Contains an example of an evaluation set.",
    "topic_cap": "Its topic has more text than the recipe allows.",
    "emptied": "Too short once the lines that many documents share were removed.",
}


def explain(outcome: str) -> str:
    """Return what `outcome` of any step means."""
    return EXPLAINED.get(outcome) or explanation(outcome)
