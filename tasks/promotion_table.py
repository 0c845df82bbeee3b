"""The promotion log of a family as a table for the terminal: what was decided, on which model, by whom and why."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from storage.root import Root
from tasks.promotion_log import families, read_log
from tasks.promotions import CHAMPION, Promotion, holders

COLUMNS = ("n", "time", "what", "model", "holds", "by", "why")


def promotion_table(root: Root, family: str) -> Table:
    """Return the table, oldest first. Raises ValueError if the family has no log, or it is damaged."""
    log = read_log(root, family)
    if not log:
        known = ", ".join(families(root)) or "none yet"
        raise ValueError(f"family {family!r} has no promotions under {root.uri}; families: {known}")
    held: dict[str, list[str]] = {}
    for alias, label in sorted(holders(log).items()):
        held.setdefault(label, []).append(alias)
    newest = {record.artifact: record.n for record in log}
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold", no_wrap=column != "why")
    for record in log:
        aliases = held.get(record.artifact, []) if newest[record.artifact] == record.n else []
        table.add_row(*map(escape, _cells(record, aliases)))
    return table


def _cells(record: Promotion, aliases: list[str]) -> list[str]:
    by, model = record.by or record.run, record.artifact.rpartition("/")[2]
    time = record.time[:16].replace("T", " ")
    what = record.kind if record.alias == CHAMPION else f"{record.kind} ({record.alias})"
    return [str(record.n), time, what, model, ", ".join(aliases), by, record.why]
