"""Documents out of a Parquet or Arrow file, as batches whose text stays Arrow from the file to the shard.

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

from llama3.data.dates import FIELDS, record_date
from llama3.data.document import Batch, format_of
from llama3.data.files import File
from llama3.data.skips import Fault, Skips
from llama3.recipe.data import Source

_MOST_ROWS = 8192
_NULL = Fault("null_text", "is a row whose text is null; remove it")
_BAD_UTF8 = Fault("bad_utf8", "is a row whose text is not UTF-8; convert it")


def parquet_batches(raw: Any, file: File, source: Source, skips: Skips, most: int) -> Iterator[Batch]:
    """Yield the rows of `file` in batches of about `most` bytes. Raises SourceError, or Arrow's and OS errors."""
    parquet = pq.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)
    fault = _fault_of(parquet.schema_arrow, source.text)
    if fault:
        skips.fault(file.uri, file.uri, fault, file.size, documents=parquet.metadata.num_rows)
        return
    columns = _columns(parquet.schema_arrow, source.text)
    rows = 0
    for batch in parquet.iter_batches(_rows_at_a_time(parquet, source.text, most), columns=columns):
        yield _batch(batch, rows, file, source, skips)
        rows += len(batch)


def arrow_batches(raw: Any, file: File, source: Source, skips: Skips, most: int) -> Iterator[Batch]:
    """Yield the rows of an Arrow file or stream (`.feather`, `.arrow`) like those of a Parquet file."""
    marked = raw.read(6) == b"ARROW1"
    raw.seek(0)
    reader = pa.ipc.open_file(raw) if marked else pa.ipc.open_stream(raw)
    found = (reader.get_batch(place) for place in range(reader.num_record_batches)) if marked else iter(reader)
    fault = _fault_of(reader.schema, source.text)
    if fault:
        documents = sum(len(batch) for batch in found)
        skips.fault(file.uri, file.uri, fault, file.size, documents=documents)
        return
    columns, rows = _columns(reader.schema, source.text), 0
    for batch in found:
        chosen = batch.select(columns)
        step = max(1, min(_MOST_ROWS, most * len(batch) // max(batch[source.text].nbytes, 1)))
        for start in range(0, len(batch), step):
            piece = chosen.slice(start, step)
            yield _batch(piece, rows, file, source, skips)
            rows += len(piece)


def _columns(schema: Any, text: str) -> list[str]:
    """Return the columns that are of use; one that is named twice is of none."""
    wanted = {text, "url", "language", "licence", "license", "format", *FIELDS}
    return [name for name in schema.names if name in wanted and schema.names.count(name) == 1]


def _fault_of(schema: Any, field: str) -> Fault | None:
    if field not in schema.names:
        known = ", ".join(sorted(schema.names)) or "none"
        return Fault("no_text_field", f"has no text column {field!r}; name one of {known} with text:")
    if schema.names.count(field) > 1:
        return Fault("doubled_column", f"has two columns {field!r}; rename one")
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


def _batch(batch: Any, before: int, file: File, source: Source, skips: Skips) -> Batch:
    """Return the rows of an Arrow batch that can be read; `before` rows of the file came before it."""
    places = [f"{file.uri}:{number}" for number in range(before + 1, before + len(batch) + 1)]
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
    columns = {name: _values(batch[name]) for name in FIELDS if name in batch.schema.names}
    if not columns:
        return [""] * len(batch)
    return [record_date(dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]


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
