"""Documents out of a Parquet file, as batches whose text stays Arrow from the file to the shard.

Columns that are absent or of another type in one file than in the next do not matter: only the text column has to be
there and to hold strings, and all others are taken over where they are of use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llama3.data.dates import FIELDS, iso_date
from llama3.data.document import Batch, format_of
from llama3.data.files import File, opened
from llama3.data.skips import Fault, Skips
from llama3.recipe.data import Source

_MOST_ROWS = 8192
_NULL = Fault("null_text", "is a row whose text is null; remove it")
_BAD_UTF8 = Fault("bad_utf8", "is a row whose text is not UTF-8; convert it")


def parquet_batches(file: File, source: Source, skips: Skips, most: int) -> Iterator[Batch]:
    """Yield the rows of `file` in batches of about `most` bytes. Raises SourceError, or Arrow's and OS errors."""
    with opened(file.uri) as raw:
        parquet = pq.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)
        fault = _fault_of(parquet.schema_arrow, source.text)
        if fault:
            skips.fault(file.uri, file.uri, fault, documents=parquet.metadata.num_rows)
            return
        wanted = {source.text, "url", "language", "licence", "license", "format", *FIELDS}
        columns = [name for name in parquet.schema_arrow.names if name in wanted]
        rows = 0
        for batch in parquet.iter_batches(_rows_at_a_time(parquet, source.text, most), columns=columns):
            numbers = range(rows + 1, rows + len(batch) + 1)
            yield _batch(batch, [f"{file.uri}:{number}" for number in numbers], file, source, skips)
            rows += len(batch)


def _fault_of(schema: Any, field: str) -> Fault | None:
    if field not in schema.names:
        known = ", ".join(sorted(schema.names)) or "none"
        return Fault("no_text_field", f"has no text column {field!r}; name one of {known} with text:")
    kind = schema.field(field).type
    if not _is_text(kind) and not pa.types.is_null(kind):
        return Fault("not_text", f"{field!r} holds {kind}, not text; name another column with text:")
    return None


def _is_text(kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _rows_at_a_time(parquet: Any, field: str, most: int) -> int:
    """Return how many rows hold about `most` bytes of text, by the sizes in the file's footer."""
    metadata, size, total = parquet.metadata, 0, int(parquet.metadata.num_rows)
    for group in range(metadata.num_row_groups):
        columns = (metadata.row_group(group).column(place) for place in range(metadata.num_columns))
        size += sum(column.total_uncompressed_size for column in columns if column.path_in_schema == field)
    return max(1, min(_MOST_ROWS, most * total // max(size, 1)))


def _batch(batch: Any, places: list[str], file: File, source: Source, skips: Skips) -> Batch:
    """Return the rows of an Arrow batch that can be read."""
    text = batch[source.text].cast(pa.large_string())
    good = ~np.asarray(text.is_null())
    for place in np.flatnonzero(~good):
        skips.fault(file.uri, places[place], _NULL)
    text = pc.fill_null(text, "")
    for place in _not_utf8(text):
        skips.fault(file.uri, places[place], _BAD_UTF8, len(text[place].as_buffer()))
        good[place] = False
    url, language, licence = (_texts(batch, *names) for names in (("url",), ("language",), ("licence", "license")))
    whole = Batch(
        text,
        places,
        [own or place for own, place in zip(url, places, strict=True)],
        [source.language or own for own in language],
        [source.licence if source.licence != "unknown" else own or "unknown" for own in licence],
        list(map(format_of, _texts(batch, "format"))),
        _dates(batch),
    )
    return whole.keep(good)


def _texts(batch: Any, *names: str) -> list[str | None]:
    """Return the first of the columns `names` that holds text, or None for every row."""
    for name in names:
        if name in batch.schema.names and _is_text(batch.schema.field(name).type):
            column = batch[name].cast(pa.large_string())
            bad = set(_not_utf8(column).tolist())
            return [None if i in bad else column[i].as_py() for i in range(len(column))] if bad else column.to_pylist()
    return [None] * len(batch)


def _dates(batch: Any) -> list[str]:
    """Return every row's date out of the first column that gives it one."""
    dates = [""] * len(batch)
    for name in FIELDS:
        if name in batch.schema.names:
            dates = [date or iso_date(value) for date, value in zip(dates, _values(batch[name]), strict=True)]
    return dates


def _values(column: Any) -> list[object]:
    """Return a column of dates as Python values; nothing where Python cannot hold them."""
    if pa.types.is_timestamp(column.type):  # nanoseconds do not fit Python's datetime
        column = column.cast(pa.timestamp("s", "UTC" if column.type.tz else None), safe=False)
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):  # a year beyond 9999, text that is not UTF-8
        return [None] * len(column)


def _not_utf8(text: Any) -> NDArray[np.int64]:
    """Return which texts are not UTF-8, which Parquet does not promise whatever its schema says."""
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return np.array([i for i in range(len(text)) if not _is_utf8(text[i])], np.int64)
    return np.zeros(0, np.int64)


def _is_utf8(text: Any) -> bool:
    try:
        text.as_py()
    except UnicodeDecodeError:
        return False
    return True
