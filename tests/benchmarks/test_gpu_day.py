"""The page of a day with a GPU, and what a machine without one says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu_day import day_page, day_rows, measure_day
from benchmarks.rows import failed, measured


def test_the_page_has_every_row_and_names_those_that_differ() -> None:
    rows = [measured("gpu/values-fp32", 0.001, "loss 6.9"), failed("gpu/chain", "status 1: a|b")]
    page = day_page(rows, {"torch": "2.13.0", "host": "node1", "topology": "GPU0 X"}, "calibrated", 12)
    assert "| gpu/values-fp32 | 0.001 | % off the CPU | <= 0.01 | yes | loss 6.9 |" in page
    assert page.count("gpu/chain") == 2
    assert "failed: status 1: a/b" in page
    assert "- torch: 2.13.0" in page
    assert "GPU0 X" in page
    assert "node1" not in page


def test_rows_for_which_there_is_no_time_say_so() -> None:
    rows = list(day_rows(0, ("values-fp32",)))
    assert [row.name for row in rows] == ["gpu/values-fp32", "gpu/values-fp32-documents"]
    assert all(row.note == "not measured: no time left" for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_sentence_and_no_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="make install TORCH=cuda"):
        measure_day(1, (), tmp_path / "page.md")
    assert not list(tmp_path.iterdir())
