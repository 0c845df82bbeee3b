"""The page of a study: it fetches nothing, says the verdict first, and holds every number that it was given."""

from __future__ import annotations

import dataclasses
import re
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.studies.forecast import backtest
from herd.llama3.studies.results import StudyVerdict
from herd.tasks.study.analysis import backtest_table
from herd.tasks.study.page import (
    RUNS,
    StudyView,
    ViewTable,
    change_lines,
    picture_name,
    study_figures,
    study_html,
    study_markdown,
)
from tests.llama3.studies.test_backtest import CHANCE, family, levelling
from tests.tasks.plan.test_plan_page import Reader
from tests.tasks.study_samples import findings, view


def read(shown: StudyView) -> Reader:
    reader = Reader()
    reader.feed(study_html(shown))
    return reader


@cache
def large() -> str:
    return study_html(view(40))


def words(shown: StudyView) -> str:
    return " ".join(" ".join(read(shown).words).split())


@pytest.mark.parametrize("variants", [3, 40])
def test_the_page_needs_nothing_from_outside(variants: int) -> None:
    text, reader = large() if variants == 40 else study_html(view(variants)), Reader()
    reader.feed(text)
    assert reader.fetched == []
    assert (reader.scripts, reader.embedded) == (1, 0), "its own script, which is in the page"
    assert "@import" not in text
    assert text.count("url(") == text.count("url(#")
    assert reader.pictures == 1


def test_the_verdict_comes_first_with_flags_change_and_command() -> None:
    shown = view()
    text = words(shown)
    text = text[text.index(shown.verdict.headline[0]) :]  # after the list of contents
    places = [text.index(part) for part in (
        shown.verdict.headline[0], shown.verdict.flags[0], "- general: 50%", "herd study apply sample",
        "Findings in numbers", "Variants Mean", "Shared 2 artifacts", "Cost", "12 runs as they were planned",
        shown.command, shown.digest,
    )]  # fmt: skip
    assert places == sorted(places)


def test_findings_are_there_as_given_and_coloured_by_what_they_say() -> None:
    shown = view(3)
    text = study_html(shown)
    for one in shown.verdict.findings:
        assert f"{one.gain:+.4f} ({one.low:+.4f} to {one.high:+.4f})" in text
    said = [one.says for one in findings(40)]
    many = large()
    assert len(re.findall(r'<td class="[^"]*\bgood">', many)) == said.count("helps")
    assert len(re.findall(r'<td class="[^"]*\bbad">', many)) == said.count("hurts")


def test_many_runs_fold_behind_the_means_of_their_arms() -> None:
    few, many = view(3, repeats=3), view(40, repeats=3)
    assert len(few.variants) == RUNS
    assert "<summary>12 runs</summary>" not in study_html(few)
    assert "<summary>123 runs</summary>" in large()
    assert "sample-123" in large()
    assert "sample-123" not in study_markdown(many)
    values = [row.scores["eval/bpb/math"] for row in few.variants if row.variant == "variant-1"]
    assert f"{sum(values) / 3:.4g} ± " in study_html(few)


def test_arms_of_one_run_have_one_table_and_are_never_folded_away() -> None:
    shown = view(40, repeats=1, scores=1)
    text = study_html(shown)
    assert '<h2 id="runs">Runs</h2>' in text
    assert 'id="variants"' not in text
    assert "<summary>41 runs</summary>" not in text
    assert "sample-41" in study_markdown(shown)


def test_bits_per_byte_come_first_and_likelihoods_of_gold_answers_have_no_column() -> None:
    text = study_html(view())
    assert re.search(r"<th[^>]*>bpb</th><th[^>]*>bpb code</th>.*<th[^>]*>arithmetic</th>", text)
    assert "gold_nll" not in text


def test_nothing_found_is_an_answer() -> None:
    empty = StudyVerdict(headline=["no significant difference: keep base"])
    shown = view(verdict=empty)
    text = words(shown)
    assert "None: the recipe stays as it is." in text
    assert "herd study apply" not in text
    assert "What weakens this" not in text
    assert study_figures(shown) == []
    assert "the recipe stays as it is" in study_markdown(shown)


def test_markdown_names_the_files_of_its_pictures() -> None:
    shown = view()
    names = [picture_name(title) for title, _, _ in study_figures(shown)]
    assert names[0] == "findings.svg"
    assert len(set(names)) == len(names)
    assert re.findall(r"!\[.*\]\(plots/(.*)\)", study_markdown(shown, "plots")) == names
    assert "![" not in study_markdown(shown)


def test_what_was_shared_is_counted() -> None:
    text = words(view(3, repeats=3))
    assert "2 artifacts are used by several runs, which saved 22 executions of steps." in text
    assert "12 artifacts are used by a single run." in text
    deleted = words(view(lineage=[("curate", "curated/web-1", "", 4)]))
    assert "deleted since" in deleted


def test_a_study_that_has_not_begun_has_a_page() -> None:
    shown = view(variants=[], lineage=[], plan=[], ended="", started="", verdict=StudyVerdict(headline=[]))
    assert "sample" in read(shown).headings
    assert study_markdown(shown)


def test_names_are_text_and_no_markup() -> None:
    evil = "<b>x</b>|y"
    table = ViewTable(evil, evil, ["variant", evil], [[evil, evil]])
    shown = view(
        name=evil, question=evil, command=evil, tables=[table], verdict=StudyVerdict(headline=[evil], flags=[evil])
    )
    assert "<b>x" not in study_html(shown)
    row = next(line for line in study_markdown(shown).splitlines() if line.startswith("| <b>"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 3


def test_markdown_tables_are_whole() -> None:
    """Every row of a table has as many cells as its head."""
    blocks = re.findall(r"(?:^\|.*\n)+", study_markdown(view()), re.MULTILINE)
    assert len(blocks) >= 6
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
        assert re.fullmatch(r"\|(-+:?\|)+", block.splitlines()[1])


def test_operations_of_a_shared_stage_are_counted_once() -> None:
    """Rows show the whole training of each run; the sum is of what was trained."""
    rows = [dataclasses.replace(row, trained=1e12 if place else 4e12) for place, row in enumerate(view().variants)]
    page = study_markdown(view(variants=rows))
    assert f"{3e12 + 1e12 * len(rows):.3g}" in study_html(view(variants=rows))
    assert page.count("| 4e+12 |") == len(rows)


def test_numbers_are_set_to_the_right_and_words_to_the_left() -> None:
    table = ViewTable(
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
