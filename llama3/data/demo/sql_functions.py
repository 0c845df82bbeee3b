"""A reference of DuckDB's SQL functions and questions about them: `duckdb-functions`, which needs no download.

Names, parameters, descriptions and examples are those that the installed DuckDB reports of itself
(`duckdb_functions()`), and the results of the examples are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING

from herd.llama3.data.readers.document import Document

if TYPE_CHECKING:
    import duckdb

LICENSE = "MIT"
MAY_BE_HELD_OUT = 2**62
"""Pages with a draw (`mapreduce.text_hash`) below this are in no conversation."""
_FUNCTIONS = """
    SELECT function_name, min(function_type), list_sort(list(DISTINCT parameters)),
        list_sort(list(DISTINCT return_type)), min(description), min(alias_of), min(examples),
        coalesce(bool_and(stability = 'CONSISTENT'), false)
    FROM duckdb_functions()
    WHERE description != '' AND regexp_full_match(function_name, '[a-z][a-z0-9_]*')
    GROUP BY function_name ORDER BY function_name"""


@dataclass(frozen=True)
class SqlFunction:
    """A function as DuckDB describes it."""

    name: str
    kind: str
    """scalar, aggregate, table, window, macro or pragma."""
    calls: tuple[str, ...]
    """How it may be called: `list_sort(list)`, `list_sort(list, sort_order)`."""
    returns: tuple[str, ...]
    description: str
    alias_of: str
    examples: tuple[tuple[str, str], ...]
    """Expressions and their values; "" if an expression needs a table, or its value changes."""

    @property
    def reference(self) -> str:
        """Return the page of the function."""
        title = f"{self.name}, {self.kind} function" + (f", the same as {self.alias_of}" if self.alias_of else "")
        lines = [title, "", *self.calls, "", self.description]
        if self.returns:
            lines += ["", f"Returns {' or '.join(self.returns)}."]
        for expression, value in self.examples:
            lines += ["", f"SELECT {expression};", *([f"-> {value}"] if value else [])]
        return "\n".join(lines)

    @property
    def example(self) -> str:
        """Return a sentence with the first example."""
        if not self.examples:
            return f"Call it as {self.calls[0]}."
        expression, value = self.examples[0]
        return f"For example, SELECT {expression}" + (f" returns {value}." if value else " calls it.")


@cache
def sql_functions() -> tuple[SqlFunction, ...]:
    """Return the described functions of the installed DuckDB, by name."""
    import duckdb  # which `herd plan` does not need

    with duckdb.connect(":memory:", config={"enable_external_access": False}) as connection:
        connection.execute("SET TimeZone = 'UTC'")  # values with a time zone are shown in that of the session
        found = []
        for name, kind, parameters, returns, description, alias_of, examples, consistent in connection.execute(
            _FUNCTIONS
        ).fetchall():
            calls = tuple(f"{name}({', '.join(names)})" for names in parameters or [[]])
            different = dict.fromkeys(examples or [])
            shown = tuple((each, _value(connection, each) if consistent else "") for each in different)
            described = " ".join(description.split())
            types = tuple(each for each in returns or [] if each)
            found.append(SqlFunction(name, kind, calls, types, described, alias_of or "", shown))
    return tuple(found)


def sql_function_documents(name: str) -> Iterator[Document]:
    """Yield the page of each function in an order without meaning, under the source name `name`."""
    for function in sorted(sql_functions(), key=lambda function: blake2b(function.name.encode()).digest()):
        yield Document(function.reference, f"duckdb/{function.name}", "en", LICENSE, name)


def sql_conversations() -> Iterator[list[dict[str, str]]]:
    """Yield a conversation about each function: what it does, how it is called, or which one does something.

    None is about a function whose page may be held out (`curate.validation_fraction` up to 25 %): what the pages score
    would be in the conversations.
    """
    from herd.llama3.data.mapreduce import text_hash  # imports duckdb

    for function in sorted(sql_functions(), key=lambda function: blake2b(function.name.encode()).digest()):
        if (draw := text_hash(function.reference)) < MAY_BE_HELD_OUT:
            continue
        calls = " or ".join(function.calls[:2])
        question, answer = (
            (f"What does the DuckDB function {function.name} do?", _sentence(function.description)),
            (f"How do I call {function.name} in DuckDB?", f"As {calls}."),
            (f"Which DuckDB function does this: {function.description}", f"{function.name}."),
        )[draw % 3]
        content = f"{answer} {function.example}"
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": content}]


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _value(connection: duckdb.DuckDBPyConnection, expression: str) -> str:
    """Return the value of an expression as text; "" if it cannot be computed alone."""
    import duckdb

    try:
        rows = connection.execute(f"SELECT ({expression})::VARCHAR").fetchall()
    except duckdb.Error:
        return ""
    return str(rows[0][0]) if len(rows) == 1 else ""
