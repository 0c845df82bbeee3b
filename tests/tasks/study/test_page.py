"""The page of a study: it fetches nothing, says the verdict first, and holds every number that it was given."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.studies.forecast import backtest
from herd.llama3.studies.results import StudyVerdict
from herd.tasks.study.analysis import backtest_table
from herd.tasks.study.page import Analysis, FinishedRun, ResultTable, change_lines, study_page, verdict_markdown
from tests.llama3.studies.test_forecast_backtest import CHANCE, family, levelling
from tests.tasks.plan.test_page import Reader
from tests.tasks.study_samples import BEFORE, findings, finished_runs, study_record, verdict

MIXES = ResultTable("Mixes", "What each variant trained on.", ["variant", "math"], [["base", "25%"]])


def page(
    verdict: StudyVerdict, runs: list[FinishedRun], tables: tuple[ResultTable, ...] = (MIXES,), **changes: Any
) -> str:
    return study_page(study_record(**changes), Analysis(verdict, [*tables]), runs, BEFORE)


@cache
def sample(variants: int = 3, repeats: int = 3) -> str:
    return page(verdict(variants), finished_runs(variants, repeats))


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def words(text: str) -> str:
    return " ".join(" ".join(read(text).words).split())


@pytest.mark.parametrize("variants", [3, 40])
def test_the_page_needs_nothing_from_outside(variants: int) -> None:
    text, reader = sample(variants), read(sample(variants))
    assert reader.fetched == []
    assert (reader.scripts, reader.embedded) == (1, 0), "its own script, which is in the page"
    assert "@import" not in text
    assert text.count("url(") == text.count("url(#")
    assert reader.pictures == 1


def test_the_verdict_comes_first_with_flags_change_and_command() -> None:
    text = words(sample())
    text = text[text.index(verdict().headline[0]) :]  # after the list of contents
    places = [text.index(part) for part in (
        verdict().headline[0], verdict().flags[0], "- general: 50%", "herd study apply sample",
        "Gain over the control (right", "Gain over the control with", "What each variant trained on",
        "Scores of the final",
        "of 4 variants", study_record().command, study_record().digest,
    )]  # fmt: skip
    assert places == sorted(places)


def test_findings_are_there_as_given_and_colored_by_what_they_say() -> None:
    for finding in findings(3):
        assert f"{finding.gain:+.4f} ({finding.low:+.4f} to {finding.high:+.4f})" in sample()
    said = [finding.says for finding in findings(40)]
    assert len(re.findall(r'<td class="[^"]*\bgood">', sample(40))) == said.count("helps")
    assert len(re.findall(r'<td class="[^"]*\bbad">', sample(40))) == said.count("hurts")


def test_a_variant_is_a_row_with_means_over_its_runs_and_their_names() -> None:
    runs = finished_runs()
    values = [run.scores["eval/bpb/math"] for run in runs if run.variant == "variant-1"]
    mean = f"{sum(values) / 3:.4g} ± {np.std(values, ddof=1):.2g}"
    assert mean in sample()
    assert "sample-7, sample-8, sample-9" in sample()
    single = page(verdict(40, 1), finished_runs(40, 1))
    assert "±" not in single
    assert all(f">{run.run}</td>" in single for run in finished_runs(40, 1))


def test_bits_per_byte_come_first_and_likelihoods_of_gold_answers_have_no_column() -> None:
    assert re.search(r"<th[^>]*>bpb</th><th[^>]*>bpb code</th>.*<th[^>]*>arithmetic</th>", sample())
    assert "gold_nll" not in sample()


def test_no_finding_is_an_answer() -> None:
    empty = StudyVerdict(headline=["no significant difference: keep base"])
    text = page(empty, finished_runs())
    assert "None: the recipe stays as it is." in words(text)
    assert "herd study apply" not in text
    assert "What weakens this" not in text
    assert read(text).pictures == 0
    markdown = verdict_markdown("sample", "", empty)
    assert "the recipe stays as it is" in markdown
    assert "|" not in markdown


def test_a_study_that_has_not_begun_has_a_page() -> None:
    text = page(StudyVerdict(headline=[]), [], ended="", started="")
    assert "sample" in read(text).headings


def test_names_are_text_and_no_markup() -> None:
    evil = "<b>x</b>|y"
    table = ResultTable(evil, evil, ["variant", evil], [[evil, evil]])
    headline = StudyVerdict(headline=[evil], flags=[evil])
    assert "<b>x" not in page(headline, finished_runs(), (table,), name=evil, question=evil, command=evil)


def test_markdown_says_the_verdict_and_its_table_is_whole() -> None:
    """Every row of a table has as many cells as its head, also if a name has the sign that separates cells."""
    renamed = [finding.model_copy(update={"variant": f"{finding.variant}|y"}) for finding in findings(3)]
    text = verdict_markdown("sample", "Which?", verdict().model_copy(update={"findings": renamed}), BEFORE)
    assert f"- **{verdict().headline[0]}**" in text
    assert f"- {verdict().flags[0]}" in text
    assert "-     general: 50%\n+     general: 45%" in text
    (table,) = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    assert len(table.splitlines()) == 2 + 3
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    assert re.fullmatch(r"\|(-+\|)+", table.splitlines()[1])


def test_operations_of_a_shared_stage_are_counted_once() -> None:
    """Rows show the whole training of each run; the sum is of what was trained."""
    runs = [dataclasses.replace(run, trained=1e12 if index else 4e12) for index, run in enumerate(finished_runs(3, 1))]
    text = page(verdict(), runs)
    assert f"{3e12 + 1e12 * len(runs):.3g}" in text
    assert text.count(">4e+12</td>") == len(runs)


def test_numbers_are_set_to_the_right_and_words_to_the_left() -> None:
    table = ResultTable(
        "", "", ["variant", "gain", "interval", "says", "none"], [["a", "+0.1", "0.1 to 0.3", "helps", ""]]
    )
    assert table.text_columns() == [True, False, False, True, False]


def test_a_change_reads_like_yaml() -> None:
    change = ["mix.base.general=45%", "mix.base.math=30%", "mix.late.math=1%", "lr.peak=3e-3", "seed=4"]
    lines = change_lines(change, {"mix.base.math": "25%"})
    assert lines == [
        (" ", "mix:"), (" ", "  base:"), ("+", "    general: 45%"), ("-", "    math: 25%"), ("+", "    math: 30%"),
        (" ", "  late:"), ("+", "    math: 1%"), (" ", "lr:"), ("+", "  peak: 3e-3"), ("+", "seed: 4"),
    ]  # fmt: skip


NAMES = st.text("abc", min_size=1, max_size=2)


@given(st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=3), st.integers(0, 9)), max_size=6))
def test_added_lines_hold_every_change_under_its_parents(pairs: list[tuple[list[str], int]]) -> None:
    change = [f"{'.'.join(path)}={value}" for path, value in pairs]
    found, above = [], []
    for sign, text in change_lines(change, {}):
        depth = (len(text) - len(text.lstrip())) // 2
        name, _, value = text.strip().partition(":")
        above = [*above[:depth], name]
        if sign == "+":
            found.append(f"{'.'.join(above)}={value.strip()}")
    assert found == change


def test_a_back_test_is_a_table_of_what_was_said_and_what_came() -> None:
    test = backtest(family(np.random.default_rng(4), levelling), CHANCE)
    table = backtest_table("arithmetic", test)
    assert len(table.rows) == len(test.rows)
    assert all(len(row) == len(table.columns) for row in table.rows)
    first = test.rows[0]
    assert f"{first.forecast.beyond:.3g} x" in table.rows[0]
    assert f"{first.accuracy:.4f}" in table.rows[0]
    assert len(table.tones) == sum((not row.in_interval) + (not row.nll_in_interval) for row in test.rows) > 0
    assert all(table.rows[place][column] == "no" for place, column in table.tones)
