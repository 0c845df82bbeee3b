"""What is sent to MLflow, in MLflow's own types and within its limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Param, RunTag

PARAM_CHARACTERS = 6000
DIGEST_CHARACTERS = 36
KEY_CHARACTERS = 250
T = TypeVar("T")


def params_of(params: dict[str, Any]) -> list[Param]:
    """Return parameters; a list or mapping is written whole, as JSON, and cut at what MLflow takes."""
    from mlflow.entities import Param

    return [Param(key, _text(value)[:PARAM_CHARACTERS]) for key, value in params.items()]


def tags_of(tags: dict[str, str]) -> list[RunTag]:
    from mlflow.entities import RunTag

    return [RunTag(key, str(value)) for key, value in tags.items()]


def dataset_of(data: dict[str, Any]) -> DatasetInput:
    """Return a data set that was trained on; `data` has name, digest, uri and profile."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    kind = "s3" if data["uri"].startswith("s3:") else "local"
    source, profile = json.dumps({"uri": data["uri"]}), json.dumps(data["profile"])
    dataset = Dataset(data["name"], data["digest"][:DIGEST_CHARACTERS], kind, source, profile=profile)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])


def metric_key(text: str) -> str:
    """Return `text` as a metric's name: MLflow refuses a whole batch for one `@`, `%`, `=` or doubled `/` in it."""
    return re.sub("/+", "/", re.sub(r"[^\w\-. :/]", "_", text)).strip("/")[:KEY_CHARACTERS]


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`, the last one shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
