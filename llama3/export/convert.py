"""Convert local model folders between formats, tokenizer included, one parameter at a time.

The target appears atomically: it is built in a folder beside it and renamed. Memory holds one file of weights (5 GB),
or one rank's file for Meta's `.pth`. GGUF is only written, not read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import torch

from llama3.export.gguf import write_gguf
from llama3.export.hf import open_hugging_face, write_hugging_face
from llama3.export.meta import check_parts, open_meta, write_meta
from llama3.export.names import WeightReader, parameters
from llama3.model.files import CONFIG, open_model, save_model
from llama3.model.init import empty
from llama3.model.transformer import Transformer
from llama3.recipe.sections import Model, Start
from llama3.tokens.tokenizer import MODEL_FILE, Tokenizer, use_tokenizer
from storage.filesystem import filesystem_of, is_local, listing, local_path, sync_folder

Format = Literal["herd", "hf", "meta"]
Target = Literal["herd", "hf", "meta", "meta-safetensors", "gguf"]
Number = Literal["bf16", "fp16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPEN: dict[Format, Callable[[Path], WeightReader]] = {"herd": open_model, "hf": open_hugging_face, "meta": open_meta}
TOKENIZERS = {"herd": MODEL_FILE, "hf": "tokenizer.json", "meta": MODEL_FILE}
SUFFIXES = (".safetensors", ".json", ".pth", ".bin")
"""Suffixes of the files of a model (`.bin`, so that the reader can reject it by name)."""
FREE = {"preset", "max_seq"}
"""Fields of a model that do not change what it computes."""


def convert(
    source: Path,
    source_format: Format,
    target: Path,
    target_format: Target,
    dtype: Number | None = None,
    *,
    parts: int = 1,
    add: Callable[[Path], None] | None = None,
) -> Model:
    """Write the model in folder `source` as the new folder `target`; return its shape.

    Numbers stay as stored unless `dtype` is given. A tokenizer beside the weights goes with them. `parts` are Meta's
    model-parallel ranks; `add` writes more files into the folder before it appears. Raises ValueError, with what to do,
    if the source is no Llama 3, the tokenizer does not fit it, it has no such parts, or the target exists.
    """
    model = open_source(source, source_format)
    tokenizer = _tokenizer(source, source_format, model.rows)
    check_parts(model.spec, model.rows, parts, target_format == "meta")
    with building(target) as folder:
        _write(folder, target_format, model, tokenizer, DTYPES[dtype] if dtype else None, parts)
        if add is not None:
            add(folder)
    return model.spec


def open_source(folder: Path, form: Format) -> WeightReader:
    """Return the model in `folder`, to read one parameter at a time. Raises ValueError if it is not of that format."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: is not a folder; name the folder of a model on this machine")
    if form not in OPEN:
        raise ValueError(f"format {form!r} is unknown; choose {', '.join(OPEN)}")
    return OPEN[form](folder)


def format_of(folder: Path) -> Format:
    """Return the format of the model in `folder`. Raises ValueError if there is none."""
    if (folder / "params.json").is_file():
        return "meta"
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(f"{folder}: has neither {CONFIG} nor params.json; name the folder of a model") from None
    return "hf" if isinstance(config, dict) and "model_type" in config else "herd"


def load_any(folder: Path, dtype: torch.dtype, device: str = "cpu") -> tuple[Transformer, Tokenizer]:
    """Return the model in `folder`, of whatever format, ready to evaluate as `dtype` on `device`, and its tokenizer.

    Raises ValueError if it is no Llama 3, or there is no tokenizer that fits it.
    """
    form = format_of(folder)
    source = open_source(folder, form)
    tokenizer = _tokenizer(folder, form, source.rows)
    if tokenizer is None:
        raise ValueError(f"{folder}: has no {TOKENIZERS[form]}; put the tokenizer of the model there")
    model = empty(source.spec, source.rows)
    state = {name.ours: value.to(device) for name, value in parameters(source, dtype)}
    model.load_state_dict(state, assign=True)
    return model.eval(), tokenizer


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """Yield a folder that becomes `target` if the block ends well. Raises ValueError if `target` has files in it."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: exists already; name a new folder")
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if target.exists():
        target.rmdir()
    os.replace(part, target)
    sync_folder(target.parent)


def _write(
    folder: Path, form: Target, model: WeightReader, tokenizer: Tokenizer | None, dtype: torch.dtype | None, parts: int
) -> None:
    match form:
        case "herd":
            save_model(folder, model.spec, model.rows, ((name.ours, value) for name, value in parameters(model, dtype)))
            if tokenizer is not None:
                tokenizer.save(folder)
        case "hf":
            write_hugging_face(folder, model, tokenizer, dtype)
        case "meta" | "meta-safetensors":
            write_meta(folder, model, tokenizer, dtype, pickled=form == "meta", parts=parts)
        case "gguf":
            write_gguf(folder, model, tokenizer, dtype)
        case _:
            raise ValueError(f"format {form!r} is unknown; choose herd, hf, meta, meta-safetensors or gguf")


def _tokenizer(folder: Path, form: Format, rows: int) -> Tokenizer | None:
    """Return the tokenizer in `folder`, or None if there is none. Raises ValueError if it is not the model's."""
    path = folder / TOKENIZERS[form]
    if not path.exists():
        return None
    tokenizer = use_tokenizer(path)
    if tokenizer.rows != rows:
        raise ValueError(
            f"{path}: has {tokenizer.rows} ids, the model {rows} embedding rows; put the tokenizer of the model there, "
            "or take the file away to convert the weights alone"
        )
    return tokenizer


# Import of weights to start training from. Weights under a URI are first copied beside the target.


class Shaped(Protocol):
    """An object with the shape of a model."""

    @property
    def spec(self) -> Model: ...

    @property
    def rows(self) -> int: ...


def import_weights(start: Start, folder: Path, asked: Model | None = None, rows: int | None = None) -> Model:
    """Write the weights that `start` names as the new model folder `folder`; return its shape.

    `asked` is the recipe's model, written as the folder's configuration, and `rows` the number of ids of its tokenizer.
    Numbers keep their type; the tokenizer is not copied. Raises ValueError, naming field and values, if the weights are
    not a Llama 3, have another shape, or `folder` exists.
    """
    assert start.format != "checkpoint"
    with building(folder) as new, _here(start, folder) as source:
        model = open_source(source, start.format)
        compare_shapes(start, model, asked, rows)
        weights = ((name.ours, value) for name, value in parameters(model, None))
        save_model(new, asked or model.spec, model.rows, weights)
    return asked or model.spec


def compare_shapes(start: Start, model: Shaped, asked: Model | None, rows: int | None = None) -> None:
    """Raise ValueError if `model`, which `start` names, does not have the shape `asked` with `rows` embedding rows."""
    if rows is not None and rows != model.rows:
        raise ValueError(
            f"start.from: {start.origin} has {model.rows} embedding rows, the recipe's tokenizer {rows}; "
            "name the tokenizer that the weights were trained with (tokenizer.use)"
        )
    actual, expected = model.spec.model_dump(mode="json"), (asked or model.spec).model_dump(mode="json")
    for field in expected:
        # A wrong rotary setting is an error too: it loads, but changes logits by 10 % at 512 tokens.
        if field not in FREE and actual[field] != expected[field]:
            value = json.dumps(actual[field])
            raise ValueError(
                f"start.from: {start.origin} has {field} {value}, model.{field} is {json.dumps(expected[field])}; "
                f"write model: {{{field}: {value}}}, or name other weights"
            )


@contextmanager
def _here(start: Start, folder: Path) -> Iterator[Path]:
    """Yield a local folder with the weights; of a URI, a copy of the files at its top level."""
    if is_local(start.origin):
        yield local_path(start.origin)
        return
    copy = folder.with_name(f".{folder.name}.fetched")
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    try:
        uris = [uri for uri, _ in listing(start.origin)]
        depth = start.origin.rstrip("/").split("://")[1].count("/") + 1
        files = [uri for uri in uris if uri.endswith(SUFFIXES) and uri.split("://")[1].strip("/").count("/") == depth]
        if not files:
            raise ValueError(
                f"start.from: {start.origin} holds no weights ({len(uris)} files); name the folder they are in"
            )
        for uri in files:
            filesystem_of(uri).get_file(uri, str(copy / uri.rsplit("/", 1)[1]))
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)
