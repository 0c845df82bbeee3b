"""What all sections of a recipe share: no unknown keys, nothing changes after reading, docstrings describe fields."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")
Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]

Domain = Literal["general", "math", "code", "multilingual"]
DOMAINS: tuple[Domain, ...] = ("general", "math", "code", "multilingual")
SPECIAL_TOKENS = 256
"""Reserved ids right after the base vocabulary."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
