"""Which documents were in the batch of a bad step: `incidents/<position>.json` in the stage's folder.

A spike is understood by reading what was trained on. The file says why the step was bad and what was done, the tokens
and documents of its batch by domain, source, language and licence, and the documents themselves in order of position,
at most a thousand. `herd inspect` shows the same range with the texts. It is written by the leading process while the
device works on: 0.1 to 0.7 s for a batch of 4M tokens in documents of 20, and there are at most `spikes.most` of them.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from llama3.recipe.schema import Recipe
from llama3.tokens.inspect import Inspection, inspect
from llama3.train.reader import Step
from llama3.train.spikes import Found, Verdict
from storage.filesystem import write_atomic

FOLDER = "incidents"


def write_incident(work: Path, tokens: Path, recipe: Recipe, step: Step, found: Found, verdict: Verdict) -> Path:
    """Write down the bad `step` of a run of `recipe` over the shards in `tokens`; return the file.

    The same step found bad again, after a restart, replaces its file.
    """
    incident = {
        "position": step.start,
        "end": step.end,
        "time": time.time(),
        "outcome": verdict.kind,
        "reason": verdict.reason,
        "loss": _number(found.loss),
        "grad_norm": _number(found.grad_norm),
        "score": found.score,
        "skip": None if verdict.skip is None else verdict.skip.model_dump(exclude={"reason"}),
        **_batch(inspect(tokens, recipe, step.start, step.end)),
    }
    path = work / FOLDER / f"{step.start:018}.json"
    write_atomic(path, json.dumps(incident, indent=1, allow_nan=False) + "\n")
    return path


def told(step: Step, verdict: Verdict, incident: Path) -> str:
    """Return the line that logs a bad step or ends the run."""
    text = f"position {step.start}: {verdict.reason}"
    if verdict.skip is not None:
        text += f"; back to before {verdict.skip.start}, passing over the batches until {verdict.skip.end}"
    elif verdict.kind == "skipped":
        text += "; its batch changed nothing"
    else:
        text += ". Nothing of this step is kept. Look at its documents, or lower lr.peak"
    return f"{text}. Documents of the batch: {incident}"


def _batch(found: Inspection) -> dict[str, Any]:
    totals = {
        name: {value: count._asdict() for value, count in getattr(found, name).items()}
        for name in ("domains", "sources", "languages", "licences")
    }
    return {**totals, "documents": [use._asdict() for use in found.documents], "complete": found.complete}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no word for infinity
