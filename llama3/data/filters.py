"""Heuristic filters: the first rule that a document breaks is its outcome, decided over attributes alone.

Thresholds are compared in one SQL expression, so that a new one costs a query and no pass over the text. Block lists
are joined as a table by the hosts of a shard and their parent domains: with 5 million hosts that is 0.2 s a shard, and
once in a process 5 s and 1 GB to read them. What this gives up: a document that breaks several rules is counted under
the first only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from llama3.data.mapreduce import CurationJob, quoted, write_drops
from llama3.data.text.language import primary
from llama3.recipe.base import DOMAINS
from llama3.recipe.data_schema import Curate, Quality
from storage.filesystem import filesystem_of, glob, is_local, local_path, state

BLOCKED = "blocked"
"""Column, BOOLEAN, that `outcome_sql` reads where there are block lists: whether the host is on one."""
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
    "sentences": "It has too few sentences.",
    "braces": "It has curly braces, as pages of code and templates do.",
    "placeholder_text": "It has the printer's filler text in place of real text.",
    "dirty_words": "Too many of its words are on a list of dirty words.",
    "divergence": "Its words are distributed too unlike those of its domain.",
}
"""Outcome -> what it says of a document, in the order in which the rules are tried; see also `explanation`."""
_SCORE = "score_"
_OWN_NAMES = {
    "min_chars": "too_short", "max_chars": "too_long", "min_words": "too_few_words", "max_words": "too_many_words",
}  # fmt: skip
"""Fields whose outcome is not their statistic."""
_GRAMS = {"max_top_gram": "top_gram", "max_duplicate_grams": "duplicate_gram"}
"""Fields that bound several n, and the beginning of their columns."""
_HOST = r"'^(?:[a-z][a-z0-9+.-]*:)?//(?:[^/?#@]*@)?([^/?#:@]+)'"
"""The host of a lower-case URL; without scheme and slashes there is none."""


def explanation(outcome: str) -> str:
    """Return one sentence that tells what `outcome`, of this module, says of a document."""
    if outcome.startswith(_SCORE):
        return f"Its score {outcome.removeprefix(_SCORE)!r} is below the least one to keep."
    return OUTCOMES[outcome]


def filter_shard(job: CurationJob, item: int) -> None:
    """Write the drops of step `filter` for shard `item`: a row for each document that breaks a rule."""
    curate, shard = job.recipe.curate, job.shards[item]
    attributes = f"read_parquet({quoted(str(shard.attributes))})"
    with job.session() as connection:
        if curate.block:
            connection.register("blocked_hosts", read_blocked(curate))
            attributes = _with_blocked(attributes)
        query = f'SELECT "row", {outcome_sql(curate)} AS outcome, NULL::VARCHAR AS kept FROM {attributes}'
        write_drops(connection, f"FROM ({query}) WHERE outcome IS NOT NULL", job, "filter", item)


def broken_rules(statistics: pa.Table, quality: Quality) -> list[str]:
    """Return, for each row of `document_statistics`, the outcome of the first rule that it breaks; "" if none."""
    numbered = statistics.append_column("place", pa.array(range(statistics.num_rows), pa.int64()))
    with duckdb.connect() as connection:
        connection.register("numbered", numbered)
        rows = connection.execute(f"SELECT coalesce({_rules_sql(quality)}, '') FROM numbered ORDER BY place").fetchall()
    return [outcome for (outcome,) in rows]


def outcome_sql(curate: Curate) -> str:
    """Return an SQL expression over attributes: the outcome of the first rule that a document breaks, or NULL.

    Reads the column `blocked` (BOOLEAN) beside the attributes if `curate` has block lists. Columns that no rule bounds
    are not read, so they may be missing.
    """
    cases = []
    if curate.block:
        cases.append((BLOCKED, "blocked_host"))
    if curate.languages:
        kept = ", ".join(quoted(primary(language)) for language in curate.languages)
        cases.append((f"domain = 'multilingual' AND language NOT IN ({kept})", "wrong_language"))
    first = [f"WHEN {condition} THEN {quoted(outcome)}" for condition, outcome in cases]
    scores = [
        f"WHEN {_domain_is(score.domains)} AND {_SCORE}{score.name} < {score.min!r}::DOUBLE THEN '{_SCORE}{score.name}'"
        for score in curate.scores
        if score.min is not None
    ]
    return f"coalesce({_case(first)}, {_quality_sql(curate)}, {_case(scores)})"


def _domain_is(domains: Sequence[str]) -> str:
    named = ", ".join(map(quoted, domains))
    return f"domain IN ({named})" if named else "true"


def _case(branches: list[str]) -> str:
    return f"CASE {' '.join(branches)} END" if branches else "NULL::VARCHAR"


def _quality_sql(curate: Curate) -> str:
    """Return the outcome by quality rules: for each domain those of languages that differ, then of the rest."""
    branches = []
    for domain in (*(key for key in sorted(curate.quality_for) if key in DOMAINS), None):
        usual = curate.quality_of(domain or "", "")
        for language in (*curate.by_language, None):
            quality = curate.quality_of(domain or "", language or "")
            if language is None or quality != usual:
                here = [f"{name} = {quoted(key)}" for name, key in (("domain", domain), ("language", language)) if key]
                branches.append(f"WHEN {' AND '.join(here) or 'true'} THEN {_rules_sql(quality)}")
    return _case(branches)


def _rules_sql(quality: Quality) -> str:
    return _case([f"WHEN {condition} THEN '{outcome}'" for condition, outcome in _broken(quality)])


def _broken(quality: Quality) -> Iterator[tuple[str, str]]:
    """Yield the condition under which each rule of `quality` is broken, and the outcome, in the order of its fields."""
    for field in type(quality).model_fields:
        bound, (side, _, statistic) = getattr(quality, field), field.partition("_")
        if field == "rules" or bound is None:
            continue
        outcome = _OWN_NAMES.get(field, statistic)
        if field in _GRAMS:
            for size in sorted(bound):
                yield f"{_GRAMS[field]}_{size} > {float(bound[size])!r}::DOUBLE", outcome
            continue
        measured = "dirty_words / greatest(words, 1)" if field == "max_dirty_words" else statistic
        yield f"{measured} {'<' if side == 'min' else '>'} {float(bound)!r}::DOUBLE", outcome


def _with_blocked(attributes: str) -> str:
    """Return SQL for `attributes` with the column `blocked`, by the table `blocked_hosts`."""
    hosts = f"SELECT DISTINCT url, rtrim(regexp_extract(lower(url), {_HOST}, 1), '.') AS host FROM {attributes}"
    parents = f"""SELECT url, array_to_string(labels[depth:], '.') AS host FROM (
        SELECT url, labels, unnest(range(1, len(labels) + 1)) AS depth FROM (
            SELECT url, string_split(host, '.') AS labels FROM ({hosts}) WHERE host <> ''))"""
    # A join, not IN: DuckDB would build IN's hash table from the list, which has far more hosts than a shard.
    blocked = f"SELECT url FROM ({parents}) JOIN blocked_hosts USING (host)"
    return f"(SELECT *, url IN ({blocked}) AS {BLOCKED} FROM {attributes})"


def read_blocked(curate: Curate) -> pa.Table:
    """Return the hosts of `curate.block`: a table with the string column `host`, lower-case, each host once.

    A list has one host a line; `#` begins a comment; a leading `*.` or `www.` is taken off, as the parents of a
    document's host are looked up too. Raises ValueError, naming list and line, if one cannot be read.
    """
    return _blocked(tuple(curate.block), str([state(uri) for uri in curate.block]))


@lru_cache(maxsize=2)
def _blocked(uris: tuple[str, ...], stamp: str) -> pa.Table:
    """Return the hosts of all lists; `stamp` changes with their content, so that each process reads them once."""
    columns = []
    for place, uri in enumerate(uris):
        field, files = f"curate.block.{place}", glob(uri)
        if not files:
            raise ValueError(f"{field}: {uri!r} matches no file; correct the path (it is relative to where herd runs)")
        columns += [_hosts(field, file) for file in files]
    return pa.table({"host": pc.unique(pa.chunked_array(columns, pa.large_string()))})


def _hosts(field: str, file: str) -> pa.Array:
    try:
        text = filesystem_of(file).cat_file(str(local_path(file)) if is_local(file) else file).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{field}: {file}: {error}; write a text file with one host a line") from error
    lines = pc.split_pattern(pa.array([text], pa.large_string()), "\n").flatten()
    hosts = pc.utf8_lower(pc.utf8_trim_whitespace(pc.replace_substring_regex(lines, "#.*", "")))
    hosts = pc.replace_substring_regex(hosts, r"^\*\.|\.$", "")
    hosts = pc.replace_substring_regex(hosts, r"^www\.([^.]+\..+)$", r"\1")  # www.com itself stays: not all of .com
    wrong = pc.filter(lines, pc.match_substring_regex(hosts, r"[\s/:*@]"))
    if len(wrong):
        raise ValueError(f"{field}: {file}: {wrong[0].as_py()!r} is not a host; write one a line, such as example.com")
    return pc.filter(hosts, pc.not_equal(hosts, ""))


# Statistics of documents, one column for every quantity that a quality rule bounds
# (`llama3/recipe/data_schema.py`).
#
# Lines end at ; blank ones are left out of every count. A paragraph is a run of lines between blank ones. Words are
# those of `words.joined_words`; a letter is what words are made of but ASCII digits and the underscore. Lengths are
# in characters (code points). A share of nothing is 0.
#
# Definitions follow Gopher (arXiv 2112.11446, appendix A.1.1), C4 (arXiv 1910.10683, section 2.2) and FineWeb
# (arXiv 2406.17557, section 3.4). datatrove, the toolkit that FineWeb was made with, takes words from a tokenizer
# that gives punctuation marks as words and keeps case. So here n-grams reach across punctuation, and an n-gram that
# occurs once does not count as the most frequent. `alphabetic_words` is the share of what stands between blanks
# (2.3.7 is one word), where each word of a script without spaces counts too. Lines without a letter or digit, such
# as code fences, repeat nothing. FineWeb's texts have no blank lines, so they do not count in `newlines_per_word`.
# `braces` and `placeholder_text` are counted in the whole text, as C4's paper says, and not in the lines it keeps
# only. Sentences are counted in lines that C4 would keep, by their punctuation: an abbreviation before a capital
# counts as an end.
