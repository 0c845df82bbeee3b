"""Heuristic filters in SQL: the first rule that a document breaks is the reason that the ledger gives.

The rules follow Gopher (arXiv 2112.11446, appendix A.1.1) and C4 (arXiv 1910.10683), with our definition of a word
(`words.py`), which is part of the rule: lengths in characters, the share of symbols, repeated lines, the share of text
that the most frequent word pair covers. Left out on purpose: stop-word counts and the share of alphabetic words, which
drop most technical documents; the other n-gram sizes of Gopher.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from llama3.data.language import primary
from llama3.data.words import PATTERN
from llama3.recipe.data import Curate

FILTERS = ("too_short", "too_long", "symbols", "repeated_lines", "top_gram", "wrong_language")
"""Outcomes of this module, in the order in which the rules are tried."""
_SHORT_LINE = 3
"""Characters up to which a line is not counted: closing brackets repeat in good code."""

_MEASURE = rf"""
CREATE OR REPLACE TABLE measured AS
SELECT * EXCLUDE (text, lines, words),
    length(text) AS chars,
    length(regexp_replace(text, '[\p{{L}}\p{{N}}\p{{M}}\p{{Z}}\s]+', '', 'g')) AS symbols,
    len(lines) AS all_lines,
    len(list_distinct(lines)) AS distinct_lines,
    coalesce(list_max([{{'times': pair.value, 'size': length(pair.key)}}
        for pair in map_entries(list_histogram(list_transform(list_zip(words, words[2:], true),
            lambda two: two[1] || ' ' || two[2])))
        if pair.value > 1]), {{'times': 0, 'size': 0}}) AS top
FROM (
    SELECT *,
        [trim(line, E' \t') for line in string_split(text, chr(10)) if length(trim(line, E' \t')) > {_SHORT_LINE}]
            AS lines,
        regexp_extract_all(lower(text), $pattern) AS words
    FROM read_parquet($files))
"""
_JUDGE = """
CREATE OR REPLACE TABLE judged AS
SELECT "row", id, domain, source, source_index, language, url, licence, bytes, draw,
    CASE
        WHEN chars < $min_chars THEN 'too_short'
        WHEN chars > $max_chars THEN 'too_long'
        WHEN symbols > chars * $symbols * (CASE domain WHEN 'code' THEN 2 ELSE 1 END) THEN 'symbols'
        WHEN all_lines - distinct_lines > all_lines * $repeated THEN 'repeated_lines'
        WHEN top.times * top.size > chars * $top THEN 'top_gram'
        WHEN domain = 'multilingual' AND len($languages) > 0 AND NOT list_contains($languages, language)
            THEN 'wrong_language'
    END AS outcome
FROM measured
"""


def judge(connection: duckdb.DuckDBPyConnection, files: list[Path], rules: Curate) -> None:
    """Make table `judged`: one row per row of the collected `files`, with its outcome (NULL: passes) and no text."""
    connection.execute(_MEASURE, {"pattern": PATTERN, "files": [str(file) for file in files]})
    quality = rules.quality
    parameters = {
        "min_chars": quality.min_chars,
        "max_chars": quality.max_chars,
        "symbols": float(quality.max_symbol_share),
        "repeated": float(quality.max_repeated_lines),
        "top": float(quality.max_top_gram),
        "languages": [primary(language) for language in rules.languages],
    }
    connection.execute(_JUDGE, parameters)
    connection.execute("DROP TABLE measured")
