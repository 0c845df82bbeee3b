"""Find the text of a record: nested fields, lists of strings, bytes; and the columns that a path names.

`data.content` is the field `content` of `data`, unless a column has that literal name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

MISSING = object()
PARAGRAPHS = "\n\n"
"""Between the strings of a list."""
_SPELLINGS = {"lang": "language", "licence": "license"}
_NO_VALUE = ("", "__HIVE_DEFAULT_PARTITION__")


def value_of(record: dict[str, Any], field: str) -> Any:
    """Return the value of `field` in a JSON object; None in a null object, MISSING if it is not there."""
    if field in record:
        return record[field]
    for head, rest in _cuts(field):
        if head in record:
            inner = record[head]
            value = value_of(inner, rest) if isinstance(inner, dict) else None if inner is None else MISSING
            if value is not MISSING:
                return value
    return MISSING


def text_of(value: Any) -> Any:
    """Return the strings of a list as one, null as no text, and any other value as it is."""
    if isinstance(value, list) and all(part is None or isinstance(part, str) for part in value):
        return PARAGRAPHS.join(part for part in value if part is not None)
    return "" if value is None else value


def field_names(value: Any, depth: int = 3) -> list[str]:
    """Return the names of the fields of a JSON object, a schema or a struct, those of its objects with dots."""
    if isinstance(value, dict):
        inner = list(value.items())
    else:
        inner = [(field.name, field.type if pa.types.is_struct(field.type) else None) for field in value]
    names = []
    for name, below in inner:
        nested = isinstance(below, dict | pa.StructType) and depth and field_names(below, depth - 1)
        names += [f"{name}.{each}" for each in nested] if nested else [name]
    return names


def column_path(kind: Any, field: str) -> list[str]:
    """Return the names that lead to the column `field` of a schema or a struct; [] if none or several have a name."""
    names = [one.name for one in kind]
    if field in names:
        return [field] * (names.count(field) == 1)
    for head, rest in _cuts(field):
        inner = kind.field(head).type if names.count(head) == 1 else None
        if inner is not None and pa.types.is_struct(inner) and (below := column_path(inner, rest)):
            return [head, *below]
    return []


def column_type(kind: Any, path: Sequence[str]) -> Any:
    """Return the type of the column that `path` leads to."""
    for name in path:
        kind = kind.field(name).type
    return kind


def is_text(kind: Any) -> bool:
    """Return whether columns of a type are strings."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def may_be_text(kind: Any) -> bool:
    """Return whether columns of a type can be read as text: strings, bytes, lists of them, or nothing but nulls."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return is_text(kind) or pa.types.is_null(kind) or _is_bytes(plain)


def _is_bytes(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def text_column(batch: Any, path: Sequence[str]) -> Any:
    """Return the column at `path` as large strings, whose UTF-8 is not checked; null is no text."""
    column = batch.column(batch.schema.get_field_index(path[0]))
    for name in path[1:]:
        column = pc.struct_field(column, name)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = _joined(column)
    if not is_text(column.type):
        plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        column = plain.cast(pa.large_binary()).view(pa.large_string())
    return pc.fill_null(column.cast(pa.large_string()), "")


def _joined(column: Any) -> Any:
    """Return the strings of each list as one, in bytes: strings need not be UTF-8."""
    values = column.flatten()
    values = values.cast(pa.large_string()) if pa.types.is_dictionary(values.type) else values
    parts = iter(values.cast(pa.large_binary()).to_pylist())
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_pylist()
    rows = [[part for part in islice(parts, length) if part is not None] for length in lengths]
    return pa.array([PARAGRAPHS.encode().join(row) for row in rows], pa.large_binary())


def _cuts(field: str) -> Iterator[tuple[str, str]]:
    """Yield what is before and after each dot, the longest name first."""
    head = field
    while "." in head:
        head = head.rpartition(".")[0]
        yield head, field[len(head) + 1 :]


@lru_cache(64)
def path_columns(uri: str) -> dict[str, str]:
    """Return the columns that the folders of a file name, as Hive does: `language` of `lang=de/a.parquet`."""
    named = (folder.partition("=") for folder in uri.split("/")[:-1] if "=" in folder)
    columns = {_SPELLINGS.get(name, name): unquote(value) for name, _, value in named}
    return {name: value for name, value in columns.items() if value not in _NO_VALUE}
