from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.mapreduce import CurationJob, hash_threshold
from herd.llama3.data.work_items import run_serial
from herd.llama3.data.write_shards import held_out_bounds
from herd.llama3.recipe.data_schema import HELD_OUT_BYTES, HELD_OUT_DOCUMENTS, Curate
from tests.llama3.data.shard_samples import attributes, make_job, without

APART = 3
"""Index of a named source."""
SIZES = st.lists(st.tuples(st.sampled_from([1, 100, 1999, 2000, 2001, 30_000, 10**6]), st.integers(0, 3)), max_size=60)


def job_of(folder: Path, documents: list[dict[str, Any]], share: str, shards: int = 1) -> CurationJob:
    curate = Curate.model_validate({"validation_fraction": share})
    recipe = SimpleNamespace(curate=curate, places_apart=lambda domain: [APART] if domain == "general" else [])
    return make_job(folder, documents, shards, recipe=recipe, fan=2)


def held_out(job: CurationJob, domain: str) -> list[dict[str, Any]]:
    bound = held_out_bounds(run_serial, job)[domain]  # type: ignore[index]
    rows = [row for row in attributes(job).values() if row["domain"] == domain and row["source_index"] != APART]
    return [row for row in rows if row["draw"] < bound]


@given(SIZES, st.sampled_from(["0.1%", "5%", "50%", "100%"]), st.integers(1, 5))
def test_a_small_domain_holds_out_what_can_judge_and_no_more(
    sizes: list[tuple[int, int]], share: str, shards: int
) -> None:
    """The smallest draws until there are documents and bytes enough, or the share, or a third or tenth."""
    documents = [
        {"text": f"{number}", "bytes": size, "source_index": source} for number, (size, source) in enumerate(sizes)
    ]
    others = [{"text": f"{number}", "bytes": 5000, "domain": "code"} for number in range(40)]
    with TemporaryDirectory() as folder:
        job = job_of(Path(folder), documents + others, share, shards)
        chosen = sorted(held_out(job, "general"), key=lambda row: row["draw"]) if documents else []
        rows = sorted(attributes(job).values(), key=lambda row: row["draw"])
        code = held_out(job, "code")
    judged = [row for row in rows if row["domain"] == "general" and row["source_index"] != APART]
    assert chosen == judged[: len(chosen)]
    bound = hash_threshold(Fraction(Curate.model_validate({"validation_fraction": share}).validation_fraction))
    share_of = [row for row in judged if row["draw"] < bound]

    def enough(rows: list[dict[str, Any]]) -> bool:
        counted = sum(min(row["bytes"], 1024) for row in rows)
        return len(rows) >= HELD_OUT_DOCUMENTS and counted >= HELD_OUT_BYTES

    def small(rows: list[dict[str, Any]]) -> bool:
        most = 3 if len(rows) <= HELD_OUT_DOCUMENTS else 10
        size = sum(row["bytes"] for row in judged)
        return len(rows) * most <= len(judged) and sum(row["bytes"] for row in rows) * most <= size

    assert len(chosen) >= len(share_of)
    if len(chosen) > len(share_of):
        assert small(chosen)
        assert not enough(chosen[:-1])
    elif not enough(chosen) and len(chosen) < len(judged):
        assert not small(judged[: len(chosen) + 1])
    assert len(code) >= HELD_OUT_DOCUMENTS


def test_what_other_steps_drop_is_not_counted(tmp_path: Path) -> None:
    documents = [{"text": f"{number}", "bytes": 5000} for number in range(220)]
    job = job_of(tmp_path, documents, "1%")
    smallest = sorted(attributes(job).items(), key=lambda item: item[1]["draw"])
    job = without(job, [row for row, _ in smallest[:20]])
    bound = held_out_bounds(run_serial, job)["general"]
    assert [row["draw"] < bound for _, row in smallest].count(True) == 20 + 20, "20 times 1,024 bytes"


def test_nothing_is_held_out_if_none_is_wanted(tmp_path: Path) -> None:
    assert held_out_bounds(run_serial, job_of(tmp_path, [{"text": "a"}], "0%")) == {"general": 0}
