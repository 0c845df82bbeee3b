from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from herd.llama3.parallel.memory import memory, memory_components
from herd.llama3.recipe.load import load_recipe
from herd.tasks.plan.cluster import plan_on_cluster
from herd.tasks.plan.page import MEMORY, cost_points, plan_figures, render_plan_page, write_page
from herd.tasks.plan.recipe import make_plan
from herd.tasks.plan.tables import format_digits
from tests.llama3.planner.plan_samples import recipe
from tests.tasks.plan_samples import planned

INSIDE = ("#", "data:")
"""Addresses of what is in the page itself."""


class Reader(HTMLParser):
    """What a browser would fetch or run, the text that it would show, and tags that were not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts = self.embedded = 0
        self.words: list[str] = []
        self.pictures = 0
        self.headings: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.scripts += tag == "script"
        self.embedded += tag in ("iframe", "object", "embed") or any(name.startswith("on") for name, _ in attrs)
        self.pictures += tag == "svg"
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data") and not (value or "").startswith(INSIDE):
                self.fetched.append(value or "")

    def handle_data(self, data: str) -> None:
        if self.inside in ("script", "style"):
            return
        self.words.append(data)
        if self.inside in ("h1", "h2"):
            self.headings.append(data.strip())


@pytest.fixture(scope="module")
def text() -> str:
    return render_plan_page(planned("64", "long=32"))


@pytest.fixture(scope="module")
def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def test_the_page_needs_nothing_from_outside(text: str, read: Reader) -> None:
    assert read.fetched == []
    assert (read.scripts, read.embedded) == (1, 0), "its own script, which is in the page"
    assert "@import" not in text
    assert text.count("url(") == text.count("url(#")


def test_each_picture_is_under_its_title(read: Reader) -> None:
    titles = ("The job on the cluster", "Traffic of a step", "Memory of a GPU", "How often to save")
    assert read.pictures == 5
    assert set(read.headings) >= {*titles, "Cost against days"}


def test_a_job_on_one_server_has_only_the_pictures_that_say_something() -> None:
    found = plan_on_cluster(make_plan(recipe(), []), "h100x8", ())
    assert (found.main.best.layout.pp, found.projection.fabric.servers) == (1, 1)
    titles = {title: svg for title, _, svg in plan_figures(found)}
    assert set(titles) == {"Traffic of a step", "Memory of a GPU", "How often to save", "Cost against days"}
    assert "0.4</text>" not in titles["Memory of a GPU"], "ranks are whole numbers"
    assert "USD</text>" in titles["Cost against days"]
    assert "at 2.5 per GPU-hour, with storage" in render_plan_page(found)


def test_a_tiny_job_on_one_gpu_has_no_zeros_for_times() -> None:
    found = plan_on_cluster(make_plan(load_recipe(Path("recipes/quickstart.yaml")), []), "one-4090")
    text = render_plan_page(found)
    assert re.findall(r"<td>0[.0]*</td>", text) == ["<td>0</td>"], "where the first stage starts"
    assert f"<td>{found.main.best.time.total:.5f}</td>" in text
    assert "<th>seconds</th>" in text
    assert "Traffic of a step" not in text


def test_a_pipeline_is_drawn_with_the_colors_of_its_legend(checkout: Path) -> None:
    found = plan_on_cluster(make_plan(load_recipe(checkout / "recipes" / "quickstart.yaml"), []), "h100x8", ())
    assert (found.main.best.layout.pp, found.main.best.layout.vpp) == (2, 1)
    (note,) = [note for title, note, _ in plan_figures(found) if title == "The pipeline"]
    assert note == "Which rank works when."


def test_the_page_has_the_figures_of_the_console(read: Reader) -> None:
    found, words = planned("64", "long=32"), " ".join(" ".join(read.words).split())
    best = found.main.best
    told = (
        f"{found.budget.days:.1f}",
        f"{best.tflops:.0f} TFLOP/s",
        f"{100 * found.main.mfu:.1f} %",
        f"{100 * found.uptimes[64].share:.1f} %",
        format_digits(best.time.gemm * 1e3),
        f"{best.memory.total / 1e9:.1f} GB of",
        f"{best.layout.tp}·{best.layout.cp}·{best.layout.pp}·{best.dp}",
        "64 H100" if "64 H100" in words else "64 h100",
    )
    assert [each for each in told if each not in words] == []


@pytest.mark.slow
def test_a_name_is_text_and_no_markup() -> None:
    found = planned("64")
    recipe = found.plan.recipe.model_copy(update={"name": "<b>x</b>"})
    object.__setattr__(found.plan, "recipe", recipe)
    try:
        assert "<b>x</b>" not in render_plan_page(found)
    finally:
        object.__setattr__(found.plan, "recipe", found.projection.recipe)


@pytest.mark.slow
def test_the_file_is_written_whole(tmp_path: Path, text: str) -> None:
    write_page(planned("64", "long=32"), tmp_path / "plan.html")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]
    assert len((tmp_path / "plan.html").read_text()) == pytest.approx(len(text), rel=0.05)


@pytest.mark.slow
def test_cost_against_days_goes_through_the_plan_itself() -> None:
    """All stages on as many GPUs, so that the point of that size is the budget's own."""
    found = planned("64")
    points = {gpus: (days, money) for gpus, days, money in cost_points(found)}
    assert set(points) == {64, 32, 16, 8, 4}
    days, money = points[64]
    budget = found.budget
    assert days == pytest.approx(budget.days)
    assert money == pytest.approx(budget.gpu_hours * (1 + budget.prices.spare_share) * budget.prices.gpu_hour)
    taken = [points[gpus][0] for gpus in sorted(points)]
    assert taken == sorted(taken, reverse=True)  # fewer GPUs, more days


def test_memory_in_the_picture_is_all_of_it() -> None:
    found = planned("64")
    best, config = found.main.best, found.projection.recipe.model
    for need in memory(config, found.projection.vocab_size, best.layout, best.world, best.load):
        parts = memory_components(need)
        assert sum(parts.values()) == need.total
        assert set(parts) == set(MEMORY)
