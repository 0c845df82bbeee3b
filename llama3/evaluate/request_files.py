"""Rendered requests as a folder: what was asked, frozen, so that others ask exactly the same without data or templates.

`task.json` holds the rules, the digest and where the rows came from; `requests.jsonl.gz` one request or prompt a line.
Equal tasks give equal bytes (the gzip header holds no time), and reading checks the digest, so a folder that was
edited is refused. What this gives up: size; a task with five examples repeats them in every request.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llama3.evaluate.render import Rendered
from llama3.evaluate.task import Prompt, Request, Task
from storage.filesystem import write_atomic

TASK_FILE, REQUESTS_FILE = "task.json", "requests.jsonl.gz"
_ASKED = ("requests", "prompts")
_PROMPTED = ("generate", "code")


def write_requests(rendered: Rendered, folder: Path) -> None:
    """Write a task into `folder`, which is made. Raises ValueError if it holds a task already."""
    if (folder / TASK_FILE).exists():
        raise ValueError(f"{folder}: holds a task already; name another folder, or delete it first")
    folder.mkdir(parents=True, exist_ok=True)
    task = rendered.task
    rules = {name: value for name, value in asdict(task).items() if name not in _ASKED}
    facts = {**rules, "digest": task.digest, "chance": task.chance, "sources": rendered.sources}
    with io.BytesIO() as buffer:
        with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=6, mtime=0) as file:
            file.writelines(_lines(task))
        write_atomic(folder / REQUESTS_FILE, buffer.getvalue())
    write_atomic(folder / TASK_FILE, json.dumps(facts, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def read_requests(folder: Path) -> Rendered:
    """Return the task in `folder`. Raises ValueError if it cannot be read or is not what its digest says."""
    facts = stated(folder)
    digest, sources = facts.pop("digest"), facts.pop("sources")
    facts.pop("chance", None)
    asked = "prompts" if facts.get("kind") in _PROMPTED else "requests"
    try:
        lines = gzip.decompress((folder / REQUESTS_FILE).read_bytes()).decode().split("\n")
        rows = [{**json.loads(line), "task": facts.get("key")} for line in lines if line]
        task = TypeAdapter(Task).validate_python({**facts, asked: rows})
    except OSError as error:
        raise ValueError(
            f"{folder / REQUESTS_FILE}: cannot be read ({error.strerror or error}); render it again"
        ) from None
    except (ValueError, EOFError, zlib.error) as error:
        raise ValueError(f"{folder / REQUESTS_FILE}: is damaged ({_first(error)}); render it again") from None
    if task.digest != digest:
        raise ValueError(
            f"{folder}: the digest of its requests is {task.digest}, task.json says {digest}; it was changed after it "
            "was rendered: render it again"
        )
    return Rendered(task, sources)


def is_rendered(folder: Path) -> bool:
    """Return whether `folder` holds a rendered task."""
    return (folder / TASK_FILE).is_file()


def stated(folder: Path) -> dict[str, Any]:
    """Return what `task.json` states, unchecked: key, kind, digest, ... Raises ValueError if it cannot be read."""
    path = folder / TASK_FILE
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give a folder that herd requests wrote") from None
    except ValueError:
        raise ValueError(f"{path}: is not JSON; render it again") from None
    if not isinstance(facts, dict) or not {"key", "kind", "digest", "sources"} <= facts.keys():
        raise ValueError(f"{path}: lacks key, kind, digest or sources; render it again")
    return facts


def _lines(task: Task) -> Iterator[bytes]:
    asked: tuple[Request | Prompt, ...] = task.prompts or task.requests
    for one in asked:
        row = {name: value for name, value in asdict(one).items() if name != "task" and value is not None}
        yield json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        fault = error.errors()[0]
        return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
    return str(error)
