"""Statistics of documents, one column for every quantity that a quality rule bounds (`llama3/recipe/quality.py`).

Lines end at \n; blank ones are left out of every count. A paragraph is a run of lines between blank ones. Words are
those of `words.joined_words`; a letter is what words are made of but ASCII digits and the underscore. Lengths are in
characters (code points). A share of nothing is 0.

Definitions follow Gopher (arXiv 2112.11446, appendix A.1.1), C4 (arXiv 1910.10683, section 2.2) and FineWeb (arXiv
2406.17557, section 3.4). datatrove, the toolkit that FineWeb was made with, takes words from a tokenizer that gives
punctuation marks as words and keeps case. So here n-grams reach across punctuation, and an n-gram that occurs once does
not count as the most frequent. `alphabetic_words` is the share of what stands between blanks (2.3.7 is one word), where
each word of a script without spaces counts too. Lines without a letter or digit, such as code fences, repeat nothing.
FineWeb's texts have no blank lines, so they do not count in `newlines_per_word`. `braces` and `placeholder_text` are
counted in the whole text, as C4's paper says, and not in the lines it keeps only. Sentences are counted in lines that
C4 would keep, by their punctuation: an abbreviation before a capital counts as an end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from llama3.data.kernels.arrow import text_buffers
from llama3.data.kernels.statistics import Statistic, measure

COLUMNS = tuple(statistic.name.lower() for statistic in Statistic)
"""Columns of `document_statistics`, named like fields of Quality without min_ and max_; one for each n of n-grams."""
COUNTS = ("chars", "words", "stop_words", "sentences", "braces", "placeholder_text")
"""Columns that hold whole numbers; the others are shares and means."""


def document_statistics(texts: Any) -> pa.Table:
    """Return one row per text of `texts`, a string or large_string (chunked) array without nulls, in its order.

    Columns: COLUMNS, int64 for COUNTS and float64 for the rest.
    """
    data, offsets = text_buffers(texts)
    values = np.zeros((len(COLUMNS), len(offsets) - 1))
    measure(data, offsets, values)
    return pa.table(
        {
            name: pa.array(row.astype(np.int64) if name in COUNTS else row)
            for name, row in zip(COLUMNS, values, strict=True)
        }
    )
