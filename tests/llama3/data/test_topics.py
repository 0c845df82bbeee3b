from __future__ import annotations

import random
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.mapreduce import CurationJob, hash_threshold
from herd.llama3.data.topics import TopicCaps, kept_documents, max_total
from herd.llama3.data.work_items import run_serial
from herd.llama3.recipe.data_schema import Curate
from tests.llama3.data.shard_samples import attributes, dropped_rows, ids, make_job, without

made = partial(make_job, stages=[TopicCaps()])
TOPICS = ("art", "sport", "science")


def recipe(caps: dict[str, str], domains: tuple[str, ...] = ("general",), held_out: str = "0%") -> Any:
    seeds = {topic: ["x"] for topic in TOPICS}
    topics = {"seeds": seeds, "caps": caps, "domains": list(domains)}
    return SimpleNamespace(curate=Curate.model_validate({"topics": topics, "validation_fraction": held_out}))


def documents(topic: str, count: int, size: int = 100, domain: str = "general") -> list[dict[str, Any]]:
    """Return documents of about `size` bytes with ranks 0, 0.1, ... 0.9 in turn."""
    draw = random.Random(f"{topic} {domain}")
    return [
        {"text": f"{domain} {topic} {index} " + "x" * draw.randrange(size), "topic": topic, "domain": domain}
        | {"rank": index % 10 / 10}
        for index in range(count)
    ]


def capped(job: CurationJob) -> dict[str, tuple[str, str | None]]:
    TopicCaps().run(run_serial, job)
    names = ids(job)
    return {names[row]: why for row, why in dropped_rows(job, "topic").items()}


def left(job: CurationJob, gone: Any, domain: str = "general") -> dict[str, int]:
    sizes = dict.fromkeys(TOPICS, 0)
    for row in attributes(job).values():
        if row["id"] not in gone and row["domain"] == domain:
            sizes[row["topic"]] += row["bytes"]
    return sizes


def test_a_topic_holds_at_most_its_share_of_what_is_left(tmp_path: Path) -> None:
    given = documents("art", 300) + documents("sport", 100) + documents("science", 50)
    job = made(tmp_path, given, 2, recipe=recipe({"art": "40%", "sport": "30%"}))
    gone = capped(job)
    assert set(gone.values()) == {("topic_cap", None)}
    sizes = left(job, gone)
    total = sum(sizes.values())
    assert 0.35 * total < sizes["art"] <= 0.4 * total
    assert 0.25 * total < sizes["sport"] <= 0.3 * total
    assert sizes["science"] == left(job, {})["science"], "what has no cap stays whole"


def test_held_out_documents_stay_and_do_not_count(tmp_path: Path) -> None:
    given = documents("art", 300) + documents("sport", 100) + documents("science", 50)
    job = made(tmp_path, given, 2, recipe=recipe({"art": "40%", "sport": "30%"}, held_out="20%"))
    gone, bound = capped(job), hash_threshold(Fraction(1, 5))
    held_out = {row["id"] for row in attributes(job).values() if row["draw"] < bound}
    assert len(held_out) > 50
    assert not held_out & set(gone)
    sizes = left(job, set(gone) | held_out)
    total = sum(sizes.values())
    assert 0.35 * total < sizes["art"] <= 0.4 * total
    assert 0.25 * total < sizes["sport"] <= 0.3 * total


def test_the_lowest_score_goes_first_and_then_the_hash_decides(tmp_path: Path) -> None:
    job = made(tmp_path, documents("art", 200) + documents("science", 100), recipe=recipe({"art": "50%"}))
    gone = capped(job)
    art = [row for row in attributes(job).values() if row["topic"] == "art"]
    order = [row["id"] for row in sorted(art, key=lambda row: (-row["rank"], row["draw"], row["id"]))]
    assert 0 < len(gone) < 200
    assert set(order[-len(gone) :]) == set(gone)


def test_a_topic_below_its_cap_loses_nothing(tmp_path: Path) -> None:
    job = made(tmp_path, documents("art", 10) + documents("science", 100), recipe=recipe({"art": "40%"}))
    assert capped(job) == {}


def test_each_domain_is_capped_by_itself_and_others_not_at_all(tmp_path: Path) -> None:
    given = documents("art", 50) + documents("science", 50)
    given += documents("art", 80, domain="math") + documents("science", 20, domain="math")
    given += documents("art", 50, domain="code")
    job = made(tmp_path, given, 2, recipe=recipe({"art": "60%"}, ("general", "math")))
    gone = capped(job)
    rows = [row for row in attributes(job).values() if row["id"] in gone]
    assert {(row["domain"], row["topic"]) for row in rows} == {("math", "art")}
    sizes = left(job, gone, "math")
    assert sizes["art"] <= 0.6 * sum(sizes.values())


def test_documents_that_were_dropped_before_do_not_count(tmp_path: Path) -> None:
    job = made(tmp_path, documents("art", 60) + documents("science", 60), recipe=recipe({"art": "40%"}))
    job = without(job, [row for row, found in attributes(job).items() if found["topic"] == "science"])
    with pytest.raises(ValueError, match=r"topics\.caps: all of general has a capped topic \(art has 100\.0%"):
        TopicCaps().run(run_serial, job)


def test_without_caps_nothing_is_written(tmp_path: Path) -> None:
    job = made(tmp_path, documents("art", 5), recipe=recipe({}))
    TopicCaps().run(run_serial, job)
    TopicCaps().run(run_serial, made(tmp_path / "none", documents("art", 5)))
    assert not Path(job.folder).exists()


def test_caps_that_leave_nothing_are_refused_with_the_recipe() -> None:
    with pytest.raises(ValueError, match="every topic is capped and the caps sum to 100% or less"):
        recipe({"art": "40%", "sport": "30%", "science": "30%"})


def test_drops_do_not_depend_on_shards_order_or_threads(tmp_path: Path) -> None:
    found = set()
    for turn, shards in enumerate((1, 4, 16)):
        given = documents("art", 90) + documents("sport", 60) + documents("science", 40)
        random.Random(turn).shuffle(given)
        wanted = recipe({"art": "25%", "sport": "20%"})
        job = made(tmp_path / str(turn), given, shards, partitions=turn + 1, recipe=wanted, threads=1 + turn % 2)
        found.add(frozenset(capped(job)))
    assert len(found) == 1
    assert found.pop()


sizes_of = st.lists(st.integers(1, 30), max_size=12)
shares = st.integers(1, 99).map(lambda percent: Fraction(percent, 100))


@given(st.dictionaries(st.sampled_from("abc"), st.tuples(sizes_of, shares)), st.integers(0, 200))
def test_the_most_that_meets_all_caps_stays(topics: dict[str, tuple[list[int], Fraction]], others: int) -> None:
    sizes = {topic: np.array(values, np.int64) for topic, (values, _) in topics.items()}
    caps = {topic: cap for topic, (_, cap) in topics.items()}
    kept = kept_documents(sizes, caps, others)
    best = max(
        (choice for choice in choices({topic: len(values) for topic, values in sizes.items()})
         if meets(choice, sizes, caps, others)),
        key=lambda choice: total(choice, sizes, others),
    )  # fmt: skip
    assert meets(kept, sizes, caps, others)
    assert total(kept, sizes, others) == total(best, sizes, others)
    assert max_total({topic: int(values.sum()) for topic, values in sizes.items()}, caps, others) >= total(
        best, sizes, others
    )


def choices(most: dict[str, int]) -> list[dict[str, int]]:
    found: list[dict[str, int]] = [{}]
    for topic, count in most.items():
        found = [{**choice, topic: kept} for choice in found for kept in range(count + 1)]
    return found


def total(kept: dict[str, int], sizes: dict[str, Any], others: int) -> int:
    return others + sum(int(sizes[topic][:count].sum()) for topic, count in kept.items())


def meets(kept: dict[str, int], sizes: dict[str, Any], caps: dict[str, Fraction], others: int) -> bool:
    whole = total(kept, sizes, others)
    return all(int(sizes[topic][:count].sum()) <= caps[topic] * whole for topic, count in kept.items())


def test_the_total_solves_its_equation() -> None:
    caps = {"art": Fraction(1, 4), "sport": Fraction(1, 2)}
    assert max_total({"art": 500, "sport": 600}, caps, 100) == 400, "100 + a quarter + a half"
    assert max_total({"art": 500, "sport": 30}, caps, 100) == Fraction(520, 3), "sport stays below its cap"
    assert max_total({"art": 1, "sport": 1}, caps, 100) == 102
    assert max_total({"art": 5, "sport": 0}, caps, 0) == 0
    assert max_total({}, {}, 7) == 7
