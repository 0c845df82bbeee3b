from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.data.annotate import annotate
from herd.llama3.data.collect import collect
from herd.llama3.data.count import count_requests, written
from herd.llama3.data.curate import curate
from herd.llama3.data.readers.sources import read_source
from herd.llama3.data.work_items import run_serial
from herd.llama3.recipe.schema import Recipe
from herd.storage.counted import StoreRequest
from herd.storage.filesystem import filesystem_of
from tests.llama3.data.test_curate import prose

FAN = 2
KINDS = {"GET": "reads", "HEAD": "reads", "PUT": "writes", "LIST": "writes"}


@pytest.fixture
def recipe(tmp_path: Path, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Return a recipe whose 16 source files are read as three shards of three pieces."""
    monkeypatch.setattr("herd.llama3.data.write_shards.SHARD_BYTES", 24_000)
    monkeypatch.setattr("herd.llama3.data.collect.MOST_TEXT", 24_000)
    monkeypatch.setattr("herd.llama3.data.collect.ITEM_BYTES", 72_000)
    monkeypatch.setattr("herd.llama3.data.curate.PARTITION_DOCUMENTS", 20)
    monkeypatch.setattr("herd.llama3.data.collect.read_source", partial(read_source, most=4000))
    texts = prose(5, 230)
    texts += [f"{text.replace(' ', '  ', 1)} more" for text in texts[:40]]
    (tmp_path / "in").mkdir()
    for file in range(16):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[file::16]]
        (tmp_path / f"in/{file}.jsonl").write_text("".join(lines))
    return make_recipe({"general": [{"uri": f"counted://{tmp_path}/in/*.jsonl", "language": "en"}]})


def asked(requests: list[StoreRequest]) -> Counter[str]:
    return Counter(KINDS[request.method] for request in requests)


@pytest.mark.slow
def test_the_count_is_what_curation_asks(tmp_path: Path, recipe: Recipe) -> None:
    store, base = filesystem_of("counted://"), f"counted://{tmp_path}/real"
    start, steps = len(store.requests), Counter[str]()

    def runner(job: Any, step: str, work: Any, items: Any) -> None:
        steps[step] += len(items)
        run_serial(job, step, work, items)

    collect(recipe, f"{base}/collected", runner)
    annotate(recipe, f"{base}/collected", f"{base}/annotated", runner)
    curate(recipe, f"{base}/collected", f"{base}/annotated", tmp_path / "out", f"{base}/work", runner, fan=FAN)
    real = asked(store.requests[start:])
    rounds, stars = (
        len(list((tmp_path / "real/work/minhash").glob(flag))) for flag in ("[0-9]*/open", "stars-*/changed")
    )
    (tmp_path / "count").mkdir()
    count = count_requests(recipe, tmp_path / "count", documents=1000, fan=FAN, rounds=rounds, stars=stars)
    assert count.amounts[1:] == (3, 3)
    assert count.total.tasks == sum(steps.values())
    assert count.total.reads == pytest.approx(real["reads"], rel=0.15)
    assert count.total.writes == pytest.approx(real["writes"], rel=0.15)


def test_a_large_file_is_sent_in_parts() -> None:
    assert written(100e6).writes == 1
    assert written(5e9).writes == 2 + 48
