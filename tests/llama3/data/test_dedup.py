from __future__ import annotations

import random
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from llama3.data.dedup import components, near_duplicates
from llama3.data.minhash import WordHashes, band_hashes, shingles
from llama3.recipe.data import Dedup
from storage.duck import session

VOCABULARY = [f"w{i}" for i in range(3000)]


def word_tuples(text: str) -> set[tuple[str, ...]]:
    """Return the word 5-tuples of an ASCII text of five words or more, by plain Python."""
    found = re.findall(r"\w+", text.lower())
    return {tuple(found[i : i + 5]) for i in range(len(found) - 4)}


def clusters(texts: dict[str, str], jaccard: float) -> dict[str, str]:
    """Return each document's cluster, from the Jaccard of all pairs."""
    sets = {name: word_tuples(text) for name, text in texts.items()}
    pairs = [(a, b) for a, b in combinations(texts, 2) if len(sets[a] & sets[b]) >= jaccard * len(sets[a] | sets[b])]
    return components(pairs)


def dropped(tmp_path: Path, texts: dict[str, str], settings: Dedup | None = None) -> dict[str, str]:
    with session(tmp_path / "spill") as connection:
        connection.execute("CREATE TABLE texts (id VARCHAR, text VARCHAR)")
        connection.register("given", pa.table({"id": list(texts), "text": list(texts.values())}))
        connection.execute("INSERT INTO texts SELECT * FROM given")
        return dict(near_duplicates(connection, "SELECT id, text FROM texts", settings or Dedup()))


def planted(seed: int, families: int) -> dict[str, str]:
    """Return families of documents: an original and copies with 0.1 to 5 % of the words replaced."""
    rng = random.Random(seed)
    texts = {}
    for _ in range(families):
        original = rng.choices(VOCABULARY, k=rng.randint(60, 300))
        for copy in range(rng.randint(1, 4)):
            words, rate = list(original), rng.uniform(0.001, 0.05)
            for place in range(len(words)):
                if copy and rng.random() < rate:
                    words[place] = rng.choice(VOCABULARY)
            texts[f"{rng.getrandbits(64):016x}"] = " ".join(words)
    return texts


def test_recall_and_precision_against_brute_force(tmp_path: Path) -> None:
    texts = planted(1, 150)
    truth = clusters(texts, 0.8)
    expected = len(truth) - len(set(truth.values()))
    assert expected > 100
    found = dropped(tmp_path, texts, Dedup(jaccard=0.8, bands=14, rows=8))
    for lost, kept in found.items():
        assert truth.get(lost, lost) == truth.get(kept, kept), "dropped for a document that is not alike"
    assert len(found) >= 0.95 * expected
    assert len(dropped(tmp_path, texts, Dedup(jaccard=0.8, bands=40, rows=4))) == expected


def test_bands_alone_would_join_what_is_not_alike(tmp_path: Path) -> None:
    texts = planted(2, 80)
    found = dropped(tmp_path, texts, Dedup(jaccard=0.9, bands=60, rows=2))  # finds nearly every pair as a candidate
    truth = clusters(texts, 0.9)
    assert {lost: truth[lost] for lost in found} == {lost: truth[kept] for lost, kept in found.items()}
    assert len(found) == len(truth) - len(set(truth.values()))
    assert len(found) < len(clusters(texts, 0.5)) - len(set(clusters(texts, 0.5).values()))


def test_the_longest_is_kept_then_the_smallest_id(tmp_path: Path) -> None:
    text = " ".join(VOCABULARY[:100])
    found = dropped(tmp_path, {"b": text, "c": text + " more", "a": text, "d": " ".join(VOCABULARY[500:600])})
    assert found == {"a": "c", "b": "c"}
    assert dropped(tmp_path, {"z": text, "y": text.upper()}) == {"z": "y"}


def test_short_documents_and_scripts_without_spaces(tmp_path: Path) -> None:
    chinese = "深度学习模型需要大量的文本数据。" * 3 + "我们在这里描述如何收集、清理和去除重复的文档。"
    other = "今天天气很好，我们决定去公园散步，然后在湖边吃午饭，看孩子们放风筝，直到太阳下山才回家。"
    russian = "Модель обучается на большом количестве текста, собранного из разных источников и очищенного от повторов."
    texts = {"a": "one two", "b": "One, two!", "c": "two one", "d": "!!!", "e": "???"}
    texts |= {"f": chinese, "g": chinese + "好", "h": other, "i": russian, "j": russian.replace(",", ";")}
    assert dropped(tmp_path, texts) == {"a": "b", "f": "g", "j": "i"}


def test_one_means_exact_copies_only(tmp_path: Path) -> None:
    text = " ".join(VOCABULARY[:50])
    assert dropped(tmp_path, {"a": text, "b": text.upper()}, Dedup(jaccard=1)) == {}


def test_a_hot_bucket_costs_a_star(tmp_path: Path) -> None:
    base = VOCABULARY[:400]
    texts = {f"{i:04}": " ".join([*base, VOCABULARY[1000 + i]]) for i in range(1500)}
    found = dropped(tmp_path, texts)
    assert len(found) == 1499
    assert set(found.values()) == {"0000"}


@given(st.lists(st.tuples(st.sampled_from("abcdefghij"), st.sampled_from("abcdefghij"))))
def test_components_are_the_reachable_sets(edges: list[tuple[str, str]]) -> None:
    groups: list[set[str]] = []
    for left, right in edges:
        touching = [group for group in groups if left in group or right in group]
        groups = [group for group in groups if group not in touching] + [{left, right}.union(*touching)]
    assert components(edges) == {node: min(group) for group in groups for node in group}


def test_signatures_estimate_jaccard() -> None:
    known = WordHashes()
    one, two = " ".join(VOCABULARY[:1000]), " ".join(VOCABULARY[300:1300])
    sets = [shingles(one, known), shingles(two, known)]
    bands = band_hashes(sets, 2000, 1)
    truth = len(word_tuples(one) & word_tuples(two)) / len(word_tuples(one) | word_tuples(two))
    assert abs(float(np.mean(bands[0] == bands[1])) - truth) < 4 * (truth * (1 - truth) / 2000) ** 0.5


def test_a_signature_does_not_depend_on_its_batch() -> None:
    known = WordHashes()
    sets = [shingles(" ".join(VOCABULARY[i : i + 600]), known) for i in range(0, 2400, 600)]
    sets += [shingles(" ".join(VOCABULARY[i : i + 20]), known) for i in range(2400, 3000, 20)]
    together = band_hashes(sets, 14, 8)
    assert all(np.array_equal(band_hashes([one], 14, 8)[0], row) for one, row in zip(sets, together, strict=True))
    assert len(np.unique(together)) == together.size  # no value meets another band's
