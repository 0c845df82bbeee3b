"""What all sections of a recipe share: no unknown keys, nothing changes after reading, docstrings describe fields."""

from __future__ import annotations

import math
import re
from itertools import chain
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")
Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]

Domain = Literal["general", "math", "code", "multilingual"]
DOMAINS: tuple[Domain, ...] = ("general", "math", "code", "multilingual")
SPECIAL_TOKENS = 256
"""Reserved ids right after the base vocabulary."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


# YAML text to plain data that can be walked: what its aliases stand for is counted before it is made.
#
# A kilobyte of aliases of aliases stands for more values than a memory holds, and an alias can hold itself. What
# this gives up: an alias that stands for very much, or for what it is part of.

MOST = 100_000
"""Values that the aliases of one file may stand for."""


def read_plain(text: str | bytes) -> Any:
    """Return what YAML text holds. Raises yaml.YAMLError."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        sizes: dict[int, float] = {}
        if _size(node, sizes) - len(sizes) > MOST:
            raise yaml.YAMLError(f"its aliases stand for more than {MOST:,} values; write out what they mean")
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply; a recipe needs less than ten levels") from None
    finally:
        loader.dispose()


def _size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Return how many values a node stands for, each alias written out; without end for one that holds itself."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf
        parts = chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        nested = isinstance(node, yaml.CollectionNode)
        sizes[id(node)] = 1 + (sum(_size(part, sizes) for part in parts) if nested else 0)
    return sizes[id(node)]
