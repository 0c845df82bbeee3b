from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from herd.llama3.data.classifiers import check_seeds, prepare_scores, read_seeds, sample_texts, score_texts, topic_texts
from herd.llama3.recipe.data_schema import Curate
from tests.llama3.data.test_classifiers import arithmetic, cooking

Write = Callable[..., str]


@pytest.fixture
def corpus(tmp_path: Path) -> dict[Any, list[str]]:
    """Documents of two domains in text shards: one in ten is about cooking, the others are arithmetic."""
    files: dict[Any, list[str]] = {"general": [], "math": []}
    for domain, found in files.items():
        for shard in range(2):
            numbers = range(1000 + 100 * shard, 1100 + 100 * shard)
            texts = [cooking(index) if index % 10 == 0 else arithmetic(index) for index in numbers]
            found.append(write_shard(tmp_path / f"text/{domain}-{shard:05}.parquet", texts, list(numbers)))
    return files


def write_shard(path: Path, texts: list[str], draws: list[int]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"draw": pa.array(draws, pa.uint64()), "text": texts}), path, row_group_size=16)
    return str(path)


def section(**fields: Any) -> Curate:
    return Curate.model_validate(fields)


def test_a_score_without_bad_examples_is_trained_against_the_corpus(
    tmp_path: Path, corpus: dict[Any, list[str]], write_jsonl: Write
) -> None:
    good = write_jsonl("good.jsonl", [cooking(index) for index in range(100)])
    curate = section(scores=[{"name": "tasty", "good": [good], "domains": ["general"]}])
    facts = prepare_scores(curate, corpus, tmp_path / "models")
    assert facts["tasty"]["examples"] == {"good": 100, "bad": 100}
    assert facts["tasty"]["auc"] > 0.9
    texts = pa.array([cooking(5000), arithmetic(5000)])
    scores = score_texts(curate, tmp_path / "models", "general", texts)
    assert list(scores) == ["score_tasty"]
    assert scores["score_tasty"][0] > 0.6 > 0.4 > scores["score_tasty"][1]
    assert np.isnan(score_texts(curate, tmp_path / "models", "math", texts)["score_tasty"]).all()


def test_bad_examples_may_be_named(tmp_path: Path, write_jsonl: Write) -> None:
    good = write_jsonl("seeds/good.jsonl", [arithmetic(index) for index in range(30)])
    bad = write_jsonl("seeds/bad.jsonl", [cooking(index) for index in range(20)])
    curate = section(scores=[{"name": "sums", "good": [good], "bad": [bad]}])
    facts = prepare_scores(curate, {}, tmp_path)
    assert facts["sums"]["examples"] == {"good": 30, "bad": 20}
    scores = score_texts(curate, tmp_path, "code", pa.array([arithmetic(70), cooking(70)]))["score_sums"]
    assert scores[0] > 0.8 > 0.2 > scores[1]


def test_topics_are_assigned_in_their_domains(tmp_path: Path, write_jsonl: Write) -> None:
    seeds = {
        "food": [write_jsonl("food.jsonl", [cooking(index) for index in range(40)])],
        "sums": [write_jsonl("sums.jsonl", [arithmetic(index) for index in range(40)])],
    }
    curate = section(topics={"seeds": seeds})
    facts = prepare_scores(curate, {}, tmp_path)
    assert set(facts) == {"topics"}
    assert topic_texts(curate, tmp_path, "general", pa.array([arithmetic(90), cooking(90)])) == ["sums", "food"]
    assert topic_texts(curate, tmp_path, "math", pa.array(["x"])) == [""]
    assert topic_texts(section(), tmp_path, "general", pa.array(["x", "y"])) == ["", ""]
    assert score_texts(section(), tmp_path, "general", pa.array(["x"])) == {}


def test_models_are_trained_once_and_the_same_for_any_sharding(tmp_path: Path, write_jsonl: Write) -> None:
    good = write_jsonl("good.jsonl", [cooking(index) for index in range(60)])
    curate = section(scores=[{"name": "tasty", "good": [good]}])
    documents = [(random.Random(index).getrandbits(64), arithmetic(index)) for index in range(200)]
    models, facts = set(), []
    for shards in (1, 4, 5):
        random.Random(shards).shuffle(documents)
        files = [
            write_shard(tmp_path / f"{shards}/{place}.parquet", [t for _, t in cut], [d for d, _ in cut])
            for place in range(shards)
            if (cut := documents[place::shards])
        ]
        folder = tmp_path / f"models-{shards}"
        facts.append(prepare_scores(curate, {"general": files}, folder))
        models.add((folder / "scores/tasty/model.safetensors").read_bytes())
    assert len(models) == 1
    assert facts[0] == facts[1] == facts[2]
    Path(good).write_text(json.dumps({"text": "other"}))
    assert prepare_scores(curate, {}, tmp_path / "models-1") == facts[0], "a killed job does not train again"


def test_the_sample_is_drawn_over_all_files(tmp_path: Path) -> None:
    first = write_shard(tmp_path / "a.parquet", [f"text {index}" for index in range(50)], list(range(0, 100, 2)))
    other = write_shard(tmp_path / "b.parquet", [f"text {index}" for index in range(50, 100)], list(range(1, 101, 2)))
    assert sorted(sample_texts([first, other], 5)) == ["text 0", "text 1", "text 2", "text 50", "text 51"]
    assert len(sample_texts([first, other], 1000)) == 100
    assert sample_texts([], 5) == []


def test_seeds_are_read_as_documents_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\x00")
    (tmp_path / "b.html").write_text("<html><body><p>A <b>bold</b> paragraph of text.</p></body></html>")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "three"}))
    assert list(read_seeds([str(tmp_path)], "x")) == ["one\ntwo", "A bold paragraph of text.", "three"]


def test_missing_seeds_are_named_before_any_work(tmp_path: Path, write_jsonl: Write) -> None:
    good = write_jsonl("good.jsonl", [cooking(index) for index in range(30)])
    curate = section(
        scores=[
            {"name": "a", "good": [good], "bad": ["nowhere/*.jsonl"]},
            {"name": "b", "model": str(tmp_path / "no")},
        ],
        topics={"seeds": {"x": ["missing.txt"], "y": [good]}},
    )
    faults = check_seeds(curate)
    assert faults[0].startswith("curate.scores.0.bad: 'nowhere/*.jsonl' matches no file; correct the path")
    assert faults[1].startswith("curate.topics.seeds.x: 'missing.txt' matches no file")
    assert faults[2].startswith(f"curate.scores.1.model: {tmp_path / 'no'} has no config.json")
    with pytest.raises(ValueError, match=r"curate\.scores\.0\.bad: .* matches no file"):
        prepare_scores(curate, {}, tmp_path / "models")
    assert not (tmp_path / "models").exists()
    with pytest.raises(ValueError, match=r"curate\.scores\.0\.good: 'gone' matches no file"):
        next(read_seeds(["gone"], "curate.scores.0.good"))


def test_too_few_seeds_are_named(tmp_path: Path, write_jsonl: Write) -> None:
    few = write_jsonl("few.jsonl", ["one", "two"])
    enough = write_jsonl("enough.jsonl", [cooking(index) for index in range(30)])
    with pytest.raises(ValueError, match=r"^curate\.scores\.0\.good: 2 different examples are too few"):
        prepare_scores(section(scores=[{"name": "a", "good": [few], "bad": [enough]}]), {}, tmp_path)
    with pytest.raises(ValueError, match=r"^curate\.scores\.0\.bad: 0 different examples are too few"):
        prepare_scores(section(scores=[{"name": "a", "good": [enough]}]), {"general": []}, tmp_path)
    with pytest.raises(ValueError, match=r"^curate\.topics\.seeds\.x: 2 different examples are too few"):
        prepare_scores(section(topics={"seeds": {"x": [few], "y": [enough]}}), {}, tmp_path)
