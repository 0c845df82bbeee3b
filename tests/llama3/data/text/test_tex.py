from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from herd.llama3.data.collect import collect, collected_shards
from herd.llama3.data.readers.sources import check_sources
from herd.llama3.data.text.tex import plain_tex
from herd.llama3.recipe.schema import Recipe

PAPER = r"""%! TEX program = xelatex
\documentclass{article} % with \begin{document} in a comment
\usepackage{amsmath}
\begin{document}
Let $x$ be 50\,\% of \\% a break, then a comment
% a line of its own
   % another
  $y$; see \url{http://a/b%20c} and \verb|%d| too.

\begin{verbatim}
% kept \end{document}
\end{verbatim}
\begin{comment}
gone
\end{comment}
\begin{align} x &= y \end{align}
\end{document}
notes after the end
"""
PLAIN = r"""
Let $x$ be 50\,\% of \\
  $y$; see \url{http://a/b%20c} and \verb|%d| too.

\begin{verbatim}
% kept \end{document}
\end{verbatim}

\begin{align} x &= y \end{align}
"""


def test_comments_and_the_preamble_go_and_the_rest_stays() -> None:
    assert plain_tex(PAPER) == PLAIN
    assert plain_tex("a chapter % note\nof a book\\%") == "a chapter \nof a book\\%"
    assert plain_tex("\\begin{verbatim}\n100%\n") == "\\begin{verbatim}\n100\n", "it is not closed"
    assert plain_tex("\\begin{verbatim}\n\\begin{document}\n\\end{verbatim}\nx") == (
        "\\begin{verbatim}\n\\begin{document}\n\\end{verbatim}\nx"
    )
    assert plain_tex("% only a comment") == plain_tex("") == ""


@pytest.mark.parametrize("unit", ["\\begin{verbatim}", "%\n", "\\verb|", "\\url{", "\\", " \t", "\\begin{comment}%"])
def test_the_time_is_linear(unit: str) -> None:
    taken = []
    for count in (20_000, 160_000):
        start = time.process_time()
        plain_tex(unit * count)
        taken.append(time.process_time() - start)
    assert taken[1] < 40 * max(taken[0], 0.002), taken


def test_tex_is_read_from_files_and_records(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.tex").write_text(PAPER)
    (tmp_path / "in/b.jsonl").write_text('{"text": "50\\\\% of % this", "format": "tex"}\n')
    recipe = make_recipe({"math": [{"uri": str(tmp_path / "in")}]})
    assert check_sources(recipe) == []
    collect(recipe, tmp_path / "out")
    rows = [row for shard in collected_shards(tmp_path / "out") for row in pq.read_table(shard.uri).to_pylist()]
    assert sorted(row["text"] for row in rows) == ["50\\% of", PLAIN.strip()]
    forced = make_recipe({"math": [{"uri": str(tmp_path / "in/a.tex"), "format": "txt"}]})
    collect(forced, tmp_path / "raw")
    (shard,) = collected_shards(tmp_path / "raw")
    assert "documentclass" in pq.read_table(shard.uri)["text"][0].as_py()
