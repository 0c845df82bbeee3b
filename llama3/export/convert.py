"""Convert local model folders between formats, with their tokenizer, one parameter at a time.

Memory holds one file of weights (5 GB), or one rank's file for Meta's `.pth`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from herd.llama3.export.formats import EXPORT_FORMATS, ExportSource, Format
from herd.llama3.export.gguf import GgufModel, gguf_files
from herd.llama3.export.hf import HuggingFaceModel
from herd.llama3.export.meta import PARAMS, MetaModel, check_parts
from herd.llama3.model.files import CONFIG, JSON_BYTES, StoredModel, WeightReader, parameters, read_json, save_model
from herd.llama3.model.transformer import Transformer, empty_model
from herd.llama3.recipe.sections import InitFrom, Model
from herd.llama3.tokens.tokenizer import JSON_FILE, MODEL_FILE, TEMPLATE_FILE, Tokenizer, tokenizer_file, use_tokenizer
from herd.storage.filesystem import (
    filesystem_of,
    is_local,
    list_files,
    local_path,
    source_state,
    sync_folder,
    write_atomic,
)

Number = Literal["bf16", "fp16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPEN: dict[str, Callable[[Path], WeightReader]] = {
    "herd": StoredModel,
    "hf": HuggingFaceModel,
    "meta": MetaModel,
    "gguf": GgufModel,
}
TOKENIZERS = {"herd": MODEL_FILE, "hf": JSON_FILE, "gguf": "model.gguf", "meta": MODEL_FILE}
SUFFIXES = (".safetensors", ".json", ".pth", ".gguf", ".bin")
"""Suffixes of model files (`.bin`, so that the reader rejects it by name)."""


def write_herd(folder: Path, source: ExportSource) -> None:
    """Write the model as our own folder."""
    weights = ((param.name, tensor) for param, tensor in parameters(source.model, source.dtype))
    save_model(folder, source.model.config, source.model.vocab_size, weights)
    if source.tokenizer is not None:
        source.tokenizer.save(folder)
    if source.template:
        write_atomic(folder / TEMPLATE_FILE, source.template)


WRITERS = {"herd": write_herd} | {name: form.write for name, form in EXPORT_FORMATS.items() if form.write}


def convert(
    source: Path,
    source_format: Format,
    target: Path,
    target_format: str,
    dtype: Number | None = None,
    *,
    parts: int = 1,
    add: Callable[[Path], None] | None = None,
) -> Model:
    """Write the model in folder `source` as the new folder `target`, with its tokenizer if any; return its shape.

    Values stay as stored unless `dtype` is given. `parts` are Meta's model-parallel ranks; `add` writes more files into
    the folder before it appears. Raises ValueError if the source is not a Llama 3, the tokenizer does not fit it, the
    format or its `parts` do not exist, or the target does.
    """
    if target_format not in WRITERS:
        raise ValueError(f"format {target_format!r} is unknown; choose {', '.join(WRITERS)}")
    model = open_source(source, source_format)
    tokenizer = _tokenizer(source, source_format, model.vocab_size)
    check_parts(model.config, model.vocab_size, parts, target_format == "meta")
    stored_as = DTYPES[dtype] if dtype else None
    template = chat_template_of(source, source_format, tokenizer)
    with staging_folder(target) as folder:
        WRITERS[target_format](folder, ExportSource(model, tokenizer, stored_as, template, parts))
        if add is not None:
            add(folder)
    return model.config


def chat_template_of(folder: Path, form: str, tokenizer: Tokenizer | None) -> str:
    """Return the chat template of a model that was trained on conversations; empty: it was not, or has none.

    In our folders and beside Meta's files a file tells; in other formats the tokenizer may hold it.
    """
    mark = folder / TEMPLATE_FILE
    if mark.is_file():
        return mark.read_text(encoding="utf-8")
    return tokenizer.template if tokenizer is not None and form in ("hf", "gguf") else ""


def open_source(folder: Path, form: str) -> WeightReader:
    """Return the model in `folder`, to read one parameter at a time; format gguf may be a file.

    Raises ValueError if it is not of that format.
    """
    if not folder.is_dir() and form != "gguf":
        raise ValueError(f"{folder}: is not a folder; name the folder of a model on this machine")
    if form not in OPEN:
        raise ValueError(f"format {form!r} is unknown; choose {', '.join(OPEN)}")
    return OPEN[form](folder)


def format_of(place: Path | str) -> Format:
    """Return the format of the model in a folder or file, on this machine or under a URI.

    Raises ValueError if there is none.
    """
    top = str(place).rstrip("/")
    if is_local(top):
        path = local_path(top)
        files = [file.name for file in ([path] if path.is_file() else path.glob("*"))]
    else:
        files = [uri.rsplit("/", 1)[1] for uri in _top_level(top, [uri for uri, _ in list_files(top)])]
    if PARAMS in files:
        return "meta"
    if _only_gguf(files):  # many folders with such files have the config.json of the model they were made from
        return "gguf"
    if CONFIG in files:
        config = read_json(local_path(top) / CONFIG) if is_local(top) else _remote_json(f"{top}/{CONFIG}")
        return "hf" if isinstance(config, dict) and "model_type" in config else "herd"
    raise ValueError(f"{place}: has neither {CONFIG} nor {PARAMS} nor a .gguf file; name the folder of a model")


def _only_gguf(files: Sequence[str]) -> bool:
    """Return whether the weights among `files` are in GGUF files."""
    return {Path(name).suffix for name in files} & {".gguf", ".safetensors", ".pth", ".bin"} == {".gguf"}


def _top_level(folder: str, uris: Sequence[str]) -> list[str]:
    """Return those of `uris` that are directly below the URI `folder`, or are it."""
    top, *others = (uri.split("://")[1].strip("/") for uri in (folder, *uris))
    return [uri for uri, name in zip(uris, others, strict=True) if top in (name, name.rpartition("/")[0])]


def _remote_json(uri: str) -> object:
    try:
        data: object = json.loads(filesystem_of(uri).cat_file(uri, end=JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{uri}: cannot be read as JSON ({error}); write init_from: {{format: hf}}") from error
    return data


def load_model_any_format(folder: Path, dtype: torch.dtype, device: str = "cpu") -> tuple[Transformer, Tokenizer]:
    """Return the model in `folder`, in evaluation mode as `dtype` on `device`, and its tokenizer.

    Raises ValueError if it is not a Llama 3 of a known format, or there is no tokenizer that fits it.
    """
    form = format_of(folder)
    source = open_source(folder, form)
    tokenizer = _tokenizer(folder, form, source.vocab_size)
    if tokenizer is None:
        raise ValueError(f"{folder}: has no {TOKENIZERS[form]}; put the tokenizer of the model there")
    model = empty_model(source.config, source.vocab_size)
    state = {param.name: tensor.to(device) for param, tensor in parameters(source, dtype)}
    model.load_state_dict(state, assign=True)
    return model.eval(), tokenizer


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to `target` if the block succeeds. Raises ValueError if `target` has files."""
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


def _tokenizer(folder: Path, form: Format, vocab_size: int) -> Tokenizer | None:
    """Return the tokenizer in `folder`, if any. Raises ValueError if it does not have one id per embedding row."""
    if form == "gguf":
        path = gguf_files(folder)[0]
    else:
        path = tokenizer_file(folder) if form == "herd" else folder / TOKENIZERS[form]
    if not path.is_file():
        return None
    tokenizer = use_tokenizer(path)
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"{path}: has vocab_size {tokenizer.vocab_size}, the model {vocab_size}; put the tokenizer of the model "
            "there, or take the file away to convert the weights alone"
        )
    return tokenizer


def import_weights(
    start: InitFrom, folder: Path, expected: Model | None = None, vocab_size: int | None = None
) -> Model:
    """Write the weights that `init_from` names as the new model folder `folder`; return its shape.

    `expected` is the recipe's model, written as the folder's configuration with the longest sequence that the weights
    declare, and `vocab_size` that of its tokenizer. Values keep their type; the tokenizer is not copied. Raises
    ValueError if the weights are not a Llama 3, have another shape, or `folder` exists.
    """
    assert start.format != "checkpoint"
    with staging_folder(folder) as new, _local_copy(start, folder) as source:
        model = open_source(source, format_of(source) if start.format == "auto" else start.format)
        compare_shapes(start, model.config, model.vocab_size, expected, vocab_size)
        weights = ((param.name, tensor) for param, tensor in parameters(model, None))
        config = (expected or model.config).model_copy(update={"max_seq_len": model.config.max_seq_len})
        save_model(new, config, model.vocab_size, weights)
    return config


def compare_shapes(
    start: InitFrom, config: Model, vocab_size: int, expected: Model | None, expected_vocab_size: int | None = None
) -> None:
    """Raise ValueError if the weights that `init_from` names, of shape `config`, do not have the expected shape."""
    if expected_vocab_size is not None and expected_vocab_size != vocab_size:
        raise ValueError(
            f"init_from.path: {start.path} has vocab_size {vocab_size}, the recipe's tokenizer {expected_vocab_size}; "
            "name the tokenizer that the weights were trained with (tokenizer.use)"
        )
    actual, due = config.shape, (expected or config).shape
    for field in {**due, **actual}:
        # A wrong rotary setting is an error too: it loads, but changes logits by 10 % at 512 tokens.
        if (value := due.get(field)) != actual.get(field):
            own = json.dumps(actual.get(field))
            raise ValueError(
                f"init_from.path: {start.path} has {field} {own}, model.{field} is {json.dumps(value)}; "
                f"write model: {{{field}: {own}}}, or name other weights"
            )


def weights_state(path: str) -> list[list[object]]:
    """Return name, size and version of each file of the weights at `path`, the same for each spelling of a place."""
    if not is_local(path):
        return source_state(path)
    place = Path(os.path.abspath(local_path(path)))
    parts = gguf_files(place) if place.is_file() or format_of(place) == "gguf" else [place]
    return [state for part in parts for state in source_state(str(part))]


def start_files(start: InitFrom, uris: Sequence[str]) -> list[str]:
    """Return those of `uris`, the files of `start.path`, that hold a model: at its top level, one format of two."""
    files = [uri for uri in _top_level(start.path, uris) if uri.endswith(SUFFIXES)]
    gguf = start.format == "gguf" or (start.format == "auto" and _only_gguf(files))
    files = [uri for uri in files if uri.endswith(".gguf") == gguf]
    if start.format in ("hf", "auto") and any(uri.endswith(".safetensors") for uri in files):
        files = [uri for uri in files if not uri.endswith((".bin", ".pth"))]
    return files


@contextmanager
def _local_copy(start: InitFrom, folder: Path) -> Iterator[Path]:
    """Yield a local folder with the weights: of a URI, a copy beside `folder` of the files at its top level."""
    if is_local(start.path):
        yield local_path(start.path)
        return
    copy = folder.with_name(f".{folder.name}.fetched")
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    try:
        uris = [uri for uri, _ in list_files(start.path)]
        if not (files := start_files(start, uris)):
            raise ValueError(
                f"init_from.path: {start.path} holds no weights ({len(uris)} files); name the folder they are in"
            )
        for uri in files:
            filesystem_of(uri).get_file(uri, str(copy / uri.rsplit("/", 1)[1]))
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)
