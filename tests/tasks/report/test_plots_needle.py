"""The grid of needles as a figure."""

from __future__ import annotations

import re
import subprocess
import sys

import matplotlib

from herd.llama3.evaluate.scores import Score
from herd.llama3.statistics.estimates import proportion
from herd.tasks.report.plots import needle_heatmap


def test_every_cell_of_the_grid_is_drawn_and_a_missing_one_is_left_blank() -> None:
    found = {(512, 0): 1, (512, 50): 2, (4096, 0): 3}
    scores = {
        key: Score.from_estimate(key, proportion(count, 4), "accuracy", "higher", "r", 0.25)
        for (length, depth), count in found.items()
        for key in [f"eval/needle/length_{length:06}/depth_{depth:03}"]
    }
    svg = needle_heatmap(scores)
    assert svg is not None
    assert not matplotlib.rcParams["svg.hashsalt"], "the style of a report is not left behind"
    words = re.findall(r">([^<>\n]+)</text>", svg)
    assert [word for word in words if word.endswith("%") and " " not in word] == ["25%", "50%", "75%"]
    assert {"512", "4,096", "0 %", "50 %", "depth", "tokens"} <= set(words)
    assert needle_heatmap(scores) == svg


def test_scores_without_a_grid_have_no_figure() -> None:
    plain = Score.from_estimate("eval/needle", proportion(1, 4), "accuracy", "higher", "r", 0.25)
    assert needle_heatmap({"eval/needle": plain, "eval/needle/depth_050": plain}) is None


def test_reports_leave_the_figures_of_a_notebook_alone() -> None:
    modules = "herd.tasks.figures, herd.tasks.plan.page, herd.tasks.study.plots"
    check = f"import sys, {modules}; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
