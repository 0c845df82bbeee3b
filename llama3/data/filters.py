"""Heuristic filters over document attributes: the first rule that a document breaks is its outcome.

All thresholds are compared in one SQL expression, so a new one costs a query and no pass over the text. Block lists are
joined as a table with the hosts of a shard and their parent domains: 5 million hosts take 5 s and 1 GB to read once in
a process, and 0.2 s per shard to join.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from herd.llama3.data.mapreduce import DocumentRule, sql_literal
from herd.llama3.data.text.language import primary_subtag
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.data_schema import Curate, Quality
from herd.storage.filesystem import filesystem_of, glob, is_local, local_path, source_state

BLOCKED = "blocked"
"""BOOLEAN column that `outcome_sql` reads if the recipe has block lists: whether the host is on one."""
OUTCOMES = {
    "blocked_host": "Its host, or a domain above it, is on a block list.",
    "wrong_language": "It is in the multilingual domain, but not in a language of the recipe.",
    "too_short": "It has fewer characters than min_chars.",
    "too_long": "It has more characters than max_chars.",
    "symbol_chars": "Too many of its characters are neither letters, digits nor blanks.",
    "too_few_words": "It has fewer words than min_words.",
    "too_many_words": "It has more words than max_words.",
    "mean_word": "Its words are too short or too long on average to be sentences of a language.",
    "symbols_per_word": "It has too many number signs or ellipses for its words.",
    "bullet_lines": "Too many of its lines begin with a list mark.",
    "ellipsis_lines": "Too many of its lines end with an ellipsis, as cut-off previews do.",
    "alphabetic_words": "Too few of its words have a letter.",
    "stop_words": "It has too few of the most common English words to be English prose.",
    "duplicate_lines": "Too many of its lines repeat an earlier one.",
    "duplicate_paragraphs": "Too many of its paragraphs repeat an earlier one.",
    "duplicate_line_chars": "Repeated lines make up too much of its text.",
    "duplicate_paragraph_chars": "Repeated paragraphs make up too much of its text.",
    "top_gram": "One short run of words makes up too much of its text.",
    "duplicate_grams": "Runs of five to ten words that it repeats make up too much of its text.",
    "punctuated_lines": "Too few of its lines end with punctuation.",
    "short_lines": "Too many of its lines are short.",
    "duplicate_line_chars_strict": "Repeated lines make up more of its text than FineWeb allows.",
    "newlines_per_word": "It has too many lines for its words, as lists do.",
    "sentences": "It has too few sentences in lines that end with punctuation.",
    "sentences_any_line": "It has too few sentences.",
    "braces": "It has curly braces, as code and templates do.",
    "placeholder_text": "It contains placeholder text (lorem ipsum).",
    "dirty_words": "Too many of its words are on a list of dirty words.",
    "divergence": "Its word distribution is too far from that of its domain.",
}
"""Outcome -> explanation, in the order in which the rules are tried."""
_SCORE = "score_"
_OWN_NAMES = {
    "min_chars": "too_short", "max_chars": "too_long", "min_words": "too_few_words", "max_words": "too_many_words",
    "max_top_ngram": "top_gram", "max_duplicate_ngrams": "duplicate_grams",
}  # fmt: skip
"""Fields of Quality whose outcome is not named after their statistic."""
_GRAMS = {"max_top_ngram": "top_gram", "max_duplicate_ngrams": "duplicate_gram"}
"""Fields of Quality that bound several n -> prefix of their columns."""
_HOST = r"'^(?:[a-z][a-z0-9+.-]*:)?//(?:[^/?#@]*@)?([^/?#:@]+)'"
"""The host of a lower-case URL. A URL without `//` has no host."""


class Broken(NamedTuple):
    """A bound of `curate.quality` that a document broke."""

    field: str
    value: float
    bound: float


class Filters(DocumentRule):
    """Drop the documents that break a rule of the recipe."""

    name, title = "filter", "rules"
    section = ("block", "languages", "quality", "quality_for", "dirty_words", "scores")
    reasons = OUTCOMES

    def files(self, curate: Curate) -> list[str]:
        return curate.block

    def explain(self, outcome: str) -> str | None:
        if outcome.startswith(_SCORE):
            return f"Its score {outcome.removeprefix(_SCORE)!r} is below the minimum of the recipe."
        return OUTCOMES.get(outcome)

    def decide(self, curate: Curate, documents: str) -> tuple[str, dict[str, pa.Table]]:
        tables = {}
        if curate.block:
            tables["blocked_hosts"] = read_blocked(curate)
            host = f"rtrim(regexp_extract(lower(url), {_HOST}, 1), '.')"
            hosts = f"SELECT DISTINCT url, {host} AS host FROM ({documents})"
            parents = f"""SELECT url, array_to_string(labels[depth:], '.') AS host FROM (
                SELECT url, labels, unnest(range(1, len(labels) + 1)) AS depth FROM (
                    SELECT url, string_split(host, '.') AS labels FROM ({hosts}) WHERE host <> ''))"""
            # A join, not IN: DuckDB would build IN's hash table from the list, which has far more hosts than a shard.
            blocked = f"SELECT url FROM ({parents}) JOIN blocked_hosts USING (host)"
            documents = f"SELECT *, url IN ({blocked}) AS {BLOCKED} FROM ({documents})"
        query = f'SELECT "row", {outcome_sql(curate)} AS outcome, NULL::VARCHAR AS kept FROM ({documents})'
        return f"FROM ({query}) WHERE outcome IS NOT NULL", tables


def broken_rules(statistics: pa.Table, quality: Quality) -> list[str]:
    """Return, for each row of `document_statistics`, the outcome of the first rule that it breaks; "" if none."""
    numbered = statistics.append_column("position", pa.array(range(statistics.num_rows), pa.int64()))
    with duckdb.connect() as connection:
        connection.register("numbered", numbered)
        query = f"SELECT coalesce({_rules_sql(quality)}, '') FROM numbered ORDER BY position"
        return [outcome for (outcome,) in connection.execute(query).fetchall()]


def outcome_sql(curate: Curate) -> str:
    """Return an SQL expression over attributes: the outcome of the first rule that a document breaks, or NULL.

    Reads the column `blocked` (BOOLEAN) as well if `curate` has block lists. Columns that no rule bounds are not read,
    so they may be missing.
    """
    first = []
    if curate.block:
        first.append(f"WHEN {BLOCKED} THEN 'blocked_host'")
    if curate.languages:
        kept = ", ".join(sql_literal(primary_subtag(language)) for language in curate.languages)
        first.append(f"WHEN domain = 'multilingual' AND language NOT IN ({kept}) THEN 'wrong_language'")
    scores = []
    for score in curate.scores:
        if score.min is not None:
            in_domain = f"domain IN ({', '.join(map(sql_literal, score.domains))})" if score.domains else "true"
            column = f"{_SCORE}{score.name}"
            scores.append(f"WHEN {in_domain} AND {column} < {score.min!r}::DOUBLE THEN '{column}'")
    return f"coalesce({_case(first)}, {_quality_sql(curate)}, {_case(scores)})"


def _quality_sql(curate: Curate) -> str:
    """Return the outcome by quality rules: per domain, first languages whose rules differ, then all other languages."""
    branches = []
    for domain in (*(key for key in sorted(curate.quality_for) if key in DOMAINS), None):
        usual = curate.quality_of(domain or "", "")
        for language in (*curate.by_language, None):
            quality = curate.quality_of(domain or "", language or "")
            if language is None or quality != usual:
                keys = [
                    f"{name} = {sql_literal(key)}" for name, key in (("domain", domain), ("language", language)) if key
                ]
                branches.append(f"WHEN {' AND '.join(keys) or 'true'} THEN {_rules_sql(quality)}")
    return _case(branches)


def _rules_sql(quality: Quality) -> str:
    """Return the outcome of the first rule of `quality`, in the order of its fields, that a document breaks."""
    branches = []
    for field in type(quality).model_fields:
        bound, (side, _, statistic) = getattr(quality, field), field.partition("_")
        if field == "rules" or bound is None:
            continue
        outcome = _outcome_of(field)
        if field in _GRAMS:
            for size in sorted(bound):
                column = f"{_GRAMS[field]}_{size}"
                branches.append(f"WHEN {column} > {float(bound[size])!r}::DOUBLE THEN '{outcome}'")
            continue
        value = "dirty_words / greatest(words, 1)" if field == "max_dirty_words" else statistic
        comparison = f"{value} {'<' if side == 'min' else '>'} {float(bound)!r}::DOUBLE"
        branches.append(f"WHEN {comparison} THEN '{outcome}'")
    return _case(branches)


def fields_of(outcome: str) -> list[str]:
    """Return the fields of `curate` that decide an outcome of the document rules."""
    own = {"blocked_host": "block", "wrong_language": "languages"}
    if outcome in own or outcome.startswith(_SCORE):
        return [own.get(outcome, "scores")]
    fields = (field for field in Quality.model_fields if field != "rules")
    return [f"quality.{field}" for field in fields if _outcome_of(field) == outcome]


def _outcome_of(field: str) -> str:
    return _OWN_NAMES.get(field, field.partition("_")[2])


def bounds_of(curate: Curate, domain: str, language: str, outcome: str) -> Iterator[tuple[str, str, str, float]]:
    """Yield the bounds of `curate.quality` that give documents of a domain and language this outcome, in their order.

    A bound is its field, the column that it bounds, "min" or "max", and its value; other rules have none.
    """
    quality = curate.quality_of(domain, language)
    for field in type(quality).model_fields:
        bound, (side, _, statistic) = getattr(quality, field), field.partition("_")
        if field == "rules" or bound is None or _outcome_of(field) != outcome:
            continue
        if field in _GRAMS:
            yield from (
                (f"{field}.{size}", f"{_GRAMS[field]}_{size}", side, float(bound[size])) for size in sorted(bound)
            )
        else:
            yield field, statistic, side, float(bound)


def broken_bounds(curate: Curate, documents: pa.Table) -> list[Broken | None]:
    """Return the bound for which each of `documents` has its `outcome`; None for the outcome of other rules.

    Columns: domain, language, outcome, and the attributes.
    """
    keys = list(zip(*(documents[name].to_pylist() for name in ("domain", "language", "outcome")), strict=True))
    bounds = {key: list(bounds_of(curate, *key)) for key in set(keys)}
    names = {column for each in bounds.values() for _, column, _, _ in each}
    columns = {name: documents[name].to_pylist() for name in names | {"words"}}
    found: list[Broken | None] = [None] * len(keys)
    for index, key in enumerate(keys):
        for field, column, side, bound in bounds[key]:
            value = float(columns[column][index])
            value = value / max(columns["words"][index], 1) if field == "max_dirty_words" else value
            if value < bound if side == "min" else value > bound:
                found[index] = Broken(field, value, bound)
                break
    return found


def _case(branches: list[str]) -> str:
    return f"CASE {' '.join(branches)} END" if branches else "NULL::VARCHAR"


def read_blocked(curate: Curate) -> pa.Table:
    """Return the hosts of `curate.block`: a table with the string column `host`, lower-case, each host once.

    A list has one host per line; `#` begins a comment. A leading `*.` or `www.` is removed, because the parents of a
    document's host are looked up too. Raises ValueError that names list and line.
    """
    return _blocked(tuple(curate.block), str([source_state(uri) for uri in curate.block]))


@lru_cache(maxsize=2)  # `stamp` changes with the content of the lists
def _blocked(uris: tuple[str, ...], stamp: str) -> pa.Table:
    columns = []
    for index, uri in enumerate(uris):
        field, files = f"curate.block.{index}", glob(uri)
        if not files:
            raise ValueError(f"{field}: {uri!r} matches no file; correct the path (it is relative to where herd runs)")
        for file in files:
            try:
                data = filesystem_of(file).cat_file(str(local_path(file)) if is_local(file) else file)
                text = data.decode("utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{field}: {file}: {error}; write a text file with one host a line") from error
            lines = pc.split_pattern(pa.array([text], pa.large_string()), "\n").flatten()
            hosts = pc.utf8_lower(pc.utf8_trim_whitespace(pc.replace_substring_regex(lines, "#.*", "")))
            hosts = pc.replace_substring_regex(hosts, r"^\*\.|\.$", "")
            # www.com keeps its www: com would block every .com host
            hosts = pc.replace_substring_regex(hosts, r"^www\.([^.]+\..+)$", r"\1")
            wrong = pc.filter(lines, pc.match_substring_regex(hosts, r"[\s/:*@]"))
            if len(wrong):
                line = wrong[0].as_py()
                raise ValueError(f"{field}: {file}: {line!r} is not a host; write one a line, such as example.com")
            columns.append(pc.filter(hosts, pc.not_equal(hosts, "")))
    return pa.table({"host": pc.unique(pa.chunked_array(columns, pa.large_string()))})
