"""A model that is served in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from herd.tasks.models.serve import Served

KEY = "k3y-of-tests"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    from herd.llama3.serve.engine import BatchEngine
    from herd.tasks.models.serve import Served
    from tests.llama3.evaluate.test_generate_batch import TOKENIZER, made
    from tests.tasks.models.test_serve import CONFIG, NAME

    engine = BatchEngine(made(CONFIG), TOKENIZER, max_batch=4, queue=8)
    yield Served(NAME, engine, chat=True, token=KEY)
    engine.stop()


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    from tests.tasks.models.test_serve import client_of, serving

    with serving(served) as address, client_of(address) as client:
        yield client
