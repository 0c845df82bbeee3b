"""Base class of recipe sections, and safe reading of YAML."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")
Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]

Domain = Literal["general", "math", "code", "multilingual"]
DOMAINS: tuple[Domain, ...] = ("general", "math", "code", "multilingual")
CONVERSATIONS = "conversations"
"""Name of conversations beside the domains, in metrics and artifacts."""
SPECIAL_TOKENS = 256
"""Reserved ids after the base vocabulary."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


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
