"""Base class of recipe sections, and safe reading of YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")
Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]

Domain = Literal["general", "math", "code", "multilingual"]
DOMAINS: tuple[Domain, ...] = ("general", "math", "code", "multilingual")
CONVERSATIONS = "conversations"
"""Name of conversations beside the domains, in metrics and artifacts."""
SPECIAL_TOKENS = 256
"""Reserved ids after the base vocabulary."""


class FrozenModel(BaseModel):
    """Contents of a YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


# What a field decides, and from when. Keys of artifacts (`keys.py`) and the frozen past (`frozen.py`) derive from it.

DataKind = Literal["collected", "annotated", "curated"]
TokensKind = Literal["tokenizer", "tokens", "conversations"]
TrainingKind = Literal["weights", "checkpoint"]
JudgementKind = Literal["evaluation", "gate"]
ArtifactKind = Literal[DataKind, TokensKind, TrainingKind, JudgementKind]
"""A kind of artifact that a recipe decides."""
Decided = Literal[ArtifactKind, "promotion"]
"""An artifact, or whether a model is promoted."""
DECISIONS: dict[str, tuple[Decided, ...]] = {
    "data": get_args(DataKind),
    "tokens": get_args(TokensKind),
    "training": get_args(TrainingKind),
    "judgement": (*get_args(JudgementKind), "promotion"),
}
"""What a recipe decides -> its kinds of artifacts, in the order of the pipeline."""
Since = Literal["start", "stage", "use", "never"]


@dataclass(frozen=True)
class Decides:
    """What a field decides; see `decides`."""

    kinds: tuple[Decided, ...]
    since: Since

    @property
    def decisions(self) -> list[str]:
        """The keys of DECISIONS; empty: nothing."""
        return [name for name, kinds in DECISIONS.items() if set(kinds) & set(self.kinds)]


def decides(*kinds: Decided | Literal["nothing"], since: Since = "start") -> Decides:
    """Return the mark of a field: the first artifacts that it decides, whose keys have its value, or `nothing`.

    An artifact that is made from these follows by its inputs. `since`: from where a started run cannot change the
    field: the first token (`start`), the first of its stage (`stage`), the first that a computed part of the past uses
    it for (`use`), or `never`: only artifacts tell. What decides only a judgement never changes a token.
    """
    named = tuple(kind for kind in kinds if kind != "nothing")
    if not kinds or 0 < len(named) < len(kinds) or set(named) - set(get_args(Decided)):
        raise ValueError(f"decides{kinds}: write nothing, or some of {', '.join(get_args(Decided))}")
    return Decides(named, since)


def left_out(value: object) -> Any:
    """Return the mark of a field that recipes did not have at first, with the value that changes nothing.

    Keys and resolved recipes leave this value out, so they are what they were before the field.
    """
    return Field(exclude_if=lambda given: bool(given == value))


def merge_mappings(below: Any, given: Any) -> Any:
    """Return the mapping `given` over `below` by key, all the way down; an empty mapping and other values replace."""
    if not isinstance(below, dict) or not isinstance(given, dict) or not given:
        return given
    return {**below, **{key: merge_mappings(below.get(key), value) for key, value in given.items()}}


@dataclass(frozen=True)
class Replaced:
    """Mark of a mapping field whose values replace its default as a whole."""


class Section(FrozenModel):
    """A part of a recipe. Each field is marked with what it decides, or leaves that to the sections in it.

    A mapping with a default is merged over it by key, so that one entry does not remove the others; `{}` removes all.
    """

    @model_validator(mode="before")
    @classmethod
    def _over_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            **given,
            **{name: merge_mappings(default, given[name]) for name, default in _merged(cls) if name in given},
        }

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Raise TypeError for a field that does not say what it decides."""
        for name, field in cls.model_fields.items():
            if mark_of(field) is None and not _leads_to_sections(field.annotation):
                raise TypeError(
                    f"{cls.__name__}.{name}: does not say what it decides; write {name}: Annotated[..., "
                    "decides('checkpoint', since='stage')] with the kinds of artifacts that its value changes "
                    f"({', '.join(get_args(Decided))}), or decides('nothing')"
                )


@cache
def _merged(model: type[BaseModel]) -> list[tuple[str, dict[Any, Any]]]:
    """Return the mapping fields that are merged over their default, and the default."""
    defaults = [
        (field.alias or name, field.get_default(call_default_factory=True))
        for name, field in model.model_fields.items()
        if not field.is_required() and not any(isinstance(mark, Replaced) for mark in field.metadata)
    ]
    return [(name, default) for name, default in defaults if isinstance(default, dict) and default]


def _leads_to_sections(annotation: Any) -> bool:
    """Return whether all values of the type are sections, lists or mappings of them, or None."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (list, dict):
        return _leads_to_sections(arguments[-1])
    if origin in (Union, UnionType):
        return all(_leads_to_sections(argument) for argument in arguments if argument is not NoneType)
    return isinstance(annotation, type) and issubclass(annotation, Section)


def mark_of(field: FieldInfo) -> Decides | None:
    """Return the mark of a field; None: its sections have the marks."""
    return next((mark for mark in field.metadata if isinstance(mark, Decides)), None)


def models_in(annotation: object) -> list[type[BaseModel]]:
    """Return all models in the annotation of a field."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


@cache
def _fields(model: type[BaseModel]) -> list[tuple[str, str, Decides | None]]:
    """Return the name, the key in YAML and the mark of each field."""
    return [(name, field.alias or name, mark_of(field)) for name, field in model.model_fields.items()]


@cache
def declared(model: type[BaseModel], path: str = "") -> dict[str, Decides]:
    """Return the mark of each field of a section and of those in it, by path (`stages.lr`), in reading order."""
    marks: dict[str, Decides] = {}
    for name, key, mark in _fields(model):
        below = f"{path}.{key}" if path else key
        if mark is not None:
            marks[below] = mark
        else:
            for inner in models_in(model.model_fields[name].annotation):
                marks |= declared(inner, below)
    return marks


def chosen_fields(section: Section, choose: Callable[[str, Decides], bool], path: str = "") -> dict[str, Any]:
    """Return, as plain data, the fields below `path` that `choose` takes by path and mark; without empty sections."""
    chosen: dict[str, Any] = _chosen(section, section.model_dump(mode="json", by_alias=True), choose, path)
    return chosen


def _chosen(value: Any, plain: Any, choose: Callable[[str, Decides], bool], path: str) -> Any:
    if isinstance(value, list):
        items = [_chosen(item, part, choose, path) for item, part in zip(value, plain, strict=True)]
        return items if any(items) else None
    if isinstance(value, dict):
        parts = {key: _chosen(item, plain[key], choose, path) for key, item in value.items()}
        return {key: part for key, part in parts.items() if part}
    if value is None:
        return None
    model: type[BaseModel] = type(value)
    fields: dict[str, Any] = {}
    for name, key, mark in _fields(model):
        below = f"{path}.{key}" if path else key
        if key not in plain:
            continue
        if mark is None:
            if part := _chosen(getattr(value, name), plain[key], choose, below):
                fields[key] = part
        elif choose(below, mark):
            fields[key] = plain[key]
    return fields


MAX_ALIASED = 100_000
"""Maximum values of all expanded aliases of a file."""


MAX_DEPTH = 2000
"""Levels up to which libyaml reads a text: it calls itself for each, and 50,000 overflow the stack of the process."""


def read_plain(text: str | bytes) -> Any:
    """Return the plain data of a YAML text. Raises yaml.YAMLError."""
    # libyaml takes an eighth of the time, but its errors do not quote the line; a level needs a bracket or a column
    shown = text.decode(errors="replace") if isinstance(text, bytes) else text
    columns = max(map(len, shown.splitlines()), default=0)
    if 2 * (shown.count("[") + shown.count("{") + columns) < MAX_DEPTH:
        with suppress(yaml.YAMLError, UnicodeError):
            return _construct(getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text))
    return _construct(yaml.SafeLoader(text))


def _construct(loader: Any) -> Any:
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        sizes: dict[int, float] = {}
        # before construction: a kilobyte of nested aliases can expand beyond memory, and an alias can contain itself
        if _expanded_size(node, sizes) - len(sizes) > MAX_ALIASED:
            raise yaml.YAMLError(f"its aliases expand to more than {MAX_ALIASED:,} values; write the values out")
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply; a recipe needs less than ten levels") from None
    finally:
        loader.dispose()


def read_yaml(path: Path, place: str = "", remedy: str = "name a YAML file") -> Any:
    """Return the plain data of a YAML file. Raises ValueError that begins with `place`, by default the path."""
    try:
        return read_plain(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{place or path}: cannot be read ({error.strerror}); {remedy}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: other bytes than UTF-8, days that no month has
        raise ValueError(f"{place or path}: is not YAML: {error}") from error


def _expanded_size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Return the number of values of a node with all aliases expanded; infinite if it contains itself.

    Raises yaml.YAMLError for a key that is there twice, of which YAML would silently take the last.
    """
    if id(node) not in sizes:
        sizes[id(node)] = math.inf
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = chain(*node.value)
            lines: dict[tuple[str, str], int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                line, name = key.start_mark.line + 1, (key.tag, key.value)
                if name in lines:
                    raise yaml.YAMLError(f"{key.value!r} is in lines {lines[name]} and {line}; write it once")
                lines[name] = line
        nested = isinstance(node, yaml.CollectionNode)
        sizes[id(node)] = 1 + (sum(_expanded_size(child, sizes) for child in children) if nested else 0)
    return sizes[id(node)]
