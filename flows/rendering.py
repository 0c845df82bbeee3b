"""The command for those who measure: `herd requests`, which writes down what a suite would ask."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flows.terminal import mistakes, out


def add_requests(app: typer.Typer) -> None:
    """Give `app` the command of this file."""
    app.command()(requests)


def requests(
    suite: Annotated[str, typer.Argument(help="A suite or task: a name (core, full, mmlu, ...) or a YAML file.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; gets one folder a task.")],
    data: Annotated[str | None, typer.Option(help="Folder of published sets.", show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most questions a task.", show_default=False)] = None,
) -> None:
    """Render what a suite asks, as text: one folder a task, which a recipe's evaluate.tasks may name."""
    from rich.table import Table

    from llama3.evaluate.data_rows import MissingFile
    from llama3.evaluate.request_files import write_requests
    from llama3.evaluate.suite_file import planned_of
    from llama3.evaluate.suites import rendered_task

    with mistakes():
        planned = planned_of(suite, data)
        if not planned:
            raise ValueError(f"suite: {suite} asks for no data file, only for what a run makes; name another")
        table = Table("task", "kind", "n", "shots", "chance", "digest", box=None, pad_edge=False)
        left_out = []
        for one in planned:
            try:
                rendered = rendered_task(one, limit)
            except MissingFile as error:
                left_out.append(f"{one.name}: {error}")
                continue
            write_requests(rendered, target / one.name)
            task = rendered.task
            chance = "" if task.chance is None else f"{task.chance:.3g}"
            table.add_row(one.name, task.kind, f"{task.questions:,}", str(task.shots), chance, task.digest[:12])
        out.print(table)
        for line in left_out:
            out.print(f"[yellow]left out[/]  {escape(line)}")
        if len(left_out) == len(planned):
            raise ValueError("nothing was rendered; give the folder of the files with --data")
