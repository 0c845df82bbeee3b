"""Our language identification, one document at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from herd.llama3.data.text.language import detect_language


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Return the language of each document."""
    return {"languages": [detect_language(json.loads(line)["text"]) for line in source.open()]}
