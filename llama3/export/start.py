"""Weights to start training from, whatever their format, as a model folder of ours.

The shape that the weights have and the shape that the recipe asks for must compute the same function: a wrong rotary
setting loads without an error and costs 10 % at 512 tokens, so it is refused like a wrong size. The longest sequence is
the recipe's, because it changes nothing computed. Weights under a URI are copied beside the target first, and deleted
when they are written in our form. What this gives up: for that time the disk holds the weights twice.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from llama3.export.convert import building, open_source
from llama3.export.names import parameters
from llama3.model.files import save_model
from llama3.recipe.schema import Model
from llama3.recipe.start import Start
from storage.filesystem import filesystem_of, is_local, listing, local_path

SUFFIXES = (".safetensors", ".json", ".pth", ".bin")
"""Files that a model can consist of (`.bin` to be refused by name)."""
FREE = {"preset", "max_seq"}
"""Fields of a model that change nothing computed."""


class Shaped(Protocol):
    """What tells the shape of a model."""

    @property
    def spec(self) -> Model: ...

    @property
    def rows(self) -> int: ...


def import_weights(start: Start, folder: Path, asked: Model | None = None, rows: int | None = None) -> Model:
    """Write the weights that `start` names as the new model folder `folder`; return its shape.

    `asked` is the recipe's model, which the folder's configuration then is, and `rows` the embedding rows that its
    tokenizer has. Numbers stay as stored; the tokenizer is not copied. Raises ValueError, naming field and values, if
    the weights are no Llama 3, are not of that shape, or `folder` exists.
    """
    assert start.format != "checkpoint"
    with building(folder) as new, _here(start, folder) as source:
        model = open_source(source, start.format)
        compare_shapes(start, model, asked, rows)
        weights = ((name.ours, value) for name, value in parameters(model, None))
        save_model(new, asked or model.spec, model.rows, weights)
    return asked or model.spec


def compare_shapes(start: Start, model: Shaped, asked: Model | None, rows: int | None = None) -> None:
    """Raise ValueError if `model`, which `start` names, is not of the shape `asked` with `rows` embedding rows."""
    if rows is not None and rows != model.rows:
        raise ValueError(
            f"start.from: {start.origin} has {model.rows} embedding rows, the recipe's tokenizer {rows}; "
            "name the tokenizer that the weights were trained with (tokenizer.use)"
        )
    found, due = model.spec.model_dump(mode="json"), (asked or model.spec).model_dump(mode="json")
    for field in (field for field in due if field not in FREE and found[field] != due[field]):
        value = json.dumps(found[field])
        raise ValueError(
            f"start.from: {start.origin} has {field} {value}, model.{field} is {json.dumps(due[field])}; "
            f"write model: {{{field}: {value}}}, or name other weights"
        )


@contextmanager
def _here(start: Start, folder: Path) -> Iterator[Path]:
    """Yield a local folder of the weights; of a URI only the files at its top, without a second copy below it."""
    if is_local(start.origin):
        yield local_path(start.origin)
        return
    copy = folder.with_name(f".{folder.name}.fetched")
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    try:
        for uri in _files(start.origin):
            filesystem_of(uri).get_file(uri, str(copy / uri.rsplit("/", 1)[1]))
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _files(origin: str) -> list[str]:
    top = origin.rstrip("/").split("://")[1].count("/") + 1
    found = [uri for uri, _ in listing(origin)]
    files = [uri for uri in found if uri.endswith(SUFFIXES) and uri.split("://")[1].strip("/").count("/") == top]
    if not files:
        raise ValueError(f"start.from: {origin} holds no weights ({len(found)} files); name the folder they are in")
    return files
