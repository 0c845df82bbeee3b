"""Tell a flow run's name that a person typed from one that Prefect made up.

A flow run that shows which run it works on is easy to find, so one called `calm-otter` is renamed to `quickstart-7`. A
name that was typed into the form is somebody's own and stays. What this gives up: who types two words of Prefect's
list loses them to the run's name.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, cast

from coolname.data import config  # what Prefect draws its names from

_FORM = re.compile(r"[A-Z][a-z]+-[A-Z][a-z]+")
"""What the form of the V2 UI fills in: Licensed-Krait, from words of its own."""


@cache
def _words() -> frozenset[str]:
    parts = cast(dict[str, dict[str, Any]], config)
    return frozenset(word for part in parts.values() for word in part.get("words", []))


def is_made_up(name: str) -> bool:
    """Return whether Prefect made up the flow run's name `name`: two words of its list, `adjective-animal`."""
    if _FORM.fullmatch(name):
        return True
    words = name.split("-")
    return len(words) == 2 and all(word in _words() for word in words)
