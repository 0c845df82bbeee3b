from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.annotate import (
    BUCKETS,
    LEAST_REFERENCE,
    LEAST_WORDS,
    add_words,
    count_words,
    divergences,
    expected_log,
    reference_counts,
    word_distribution,
)
from herd.llama3.data.text.words import split_words
from herd.llama3.data.work_items import run_serial
from tests.llama3.data.shard_samples import make_job

WORDS = [f"word{index}" for index in range(3000)]
LIKELY = [1 / (index + 2) for index in range(3000)]
"""Word frequencies as in languages: one over the rank."""


def text(seed: Any, size: int = 300) -> str:
    return " ".join(random.Random(f"text {seed}").choices(WORDS, LIKELY, k=size))


def outlier(seed: Any, size: int = 300) -> str:
    draw = random.Random(f"outlier {seed}")
    return " ".join(f"{draw.getrandbits(40):x}" for _ in range(size))


def counts(texts: list[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    found = np.zeros(BUCKETS, np.int64)
    add_words(pa.array(texts), found)
    return found


def bucket(word: str) -> int:
    return int(np.flatnonzero(counts([word]))[0])


@pytest.fixture(scope="module")
def usual() -> Any:
    return word_distribution(counts([text(index) for index in range(400)]))


def test_words_are_counted_by_bucket() -> None:
    found = counts(["Red red. blue", "", "red"])
    assert found.sum() == 4
    assert found[bucket("RED")] == 3
    assert found[bucket("blue")] == 1


def test_outliers_diverge_and_usual_texts_do_not(usual: Any) -> None:
    found = divergences(pa.array([text(f"new {index}") for index in range(20)]), usual)
    strange = divergences(pa.array([outlier(index) for index in range(20)]), usual)
    assert abs(found).max() < 0.5
    assert strange.min() > 3
    half = divergences(pa.array([text("x", 150) + " " + outlier("x", 150)]), usual)
    assert found.max() < half[0] < strange.min()
    assert divergences(pa.array(["word2000 " * 300]), usual)[0] > 3, "one word again and again is no usual text either"


def test_length_alone_does_not_diverge(usual: Any) -> None:
    """Without the correction, 20 words drawn from the reference diverge by 4 nats, 20,000 by a tenth."""
    for size in [LEAST_WORDS, 50, 200, 1000, 20_000]:
        found = divergences(pa.array([text(f"{size} {index}", size) for index in range(30)]), usual)
        assert abs(found.mean()) < 0.12


def test_short_texts_and_small_references_are_not_judged(usual: Any) -> None:
    assert divergences(pa.array(["", "xyzzy " * (LEAST_WORDS - 1)]), usual).tolist() == [0, 0]
    assert divergences(pa.array(["xyzzy " * LEAST_WORDS]), usual)[0] > 1
    small = word_distribution(counts([text(0, LEAST_REFERENCE - 1)]))
    assert divergences(pa.array([outlier(0)]), small).tolist() == [0]
    assert divergences(pa.array([outlier(0)]), word_distribution(counts([]))).tolist() == [0]
    assert divergences(pa.array([], pa.string()), usual).tolist() == []


@given(st.lists(st.sampled_from([*WORDS[:40], "never", "seen"]), min_size=LEAST_WORDS, max_size=60))
def test_the_measure_equals_its_formula(usual: Any, drawn: list[str]) -> None:
    """Differences between two texts of one length are those of the plain Kullback-Leibler divergence."""
    other = [*drawn[1:], "never"]
    both = divergences(pa.array([" ".join(drawn), " ".join(other)]), usual)
    slow = [plain_divergence(some, usual) for some in (drawn, other)]
    assert both[1] - both[0] == pytest.approx(slow[1] - slow[0], abs=1e-9)


def plain_divergence(drawn: list[str], reference: Any) -> float:
    shares = {bucket(word): count / len(drawn) for word, count in Counter(split_words(" ".join(drawn))).items()}
    return sum(share * (math.log(share) - reference.log_shares[place]) for place, share in shares.items())


def test_a_reference_is_a_distribution_that_rules_nothing_out(usual: Any) -> None:
    shares = np.exp(usual.log_shares)
    assert shares.sum() == pytest.approx(1)
    assert shares.min() > 0
    assert (np.diff(usual.expected) < 1e-9).all(), "the more words, the nearer to the reference"


def test_the_mean_logarithm_equals_its_sum() -> None:
    means = np.array([1e-6, 0.3, 1, 7, 59.9, 60.1, 300, 2000])
    slow = []
    for mean in means:
        logs = [math.exp(-mean + c * math.log(mean) - math.lgamma(c + 1)) * math.log1p(c) for c in range(4000)]
        slow.append(math.fsum(logs))
    np.testing.assert_allclose(expected_log(means), slow, rtol=2e-7)


def samples() -> list[dict[str, Any]]:
    english = [{"text": text(index)} for index in range(40)]
    german = [{"text": outlier(index), "language": "de"} for index in range(40)]
    return english + german + [{"text": text(index, 5), "domain": "math"} for index in range(3)]


def test_references_are_by_domain_and_language(tmp_path: Path) -> None:
    job = make_job(tmp_path, samples(), shards=3)
    count_words(run_serial, job)
    assert reference_counts(job, "general", "en").words == reference_counts(job, "general", "de").words == 12_000
    assert reference_counts(job, "math", "en").words == 15
    assert reference_counts(job, "code", "en").words == 0
    strange = pa.array([outlier(1)])
    in_english, in_german = (divergences(strange, reference_counts(job, "general", name)) for name in ("en", "de"))
    assert in_english[0] > in_german[0] + 3


def test_references_do_not_depend_on_shards_or_order(tmp_path: Path) -> None:
    written = set()
    for turn, shards in enumerate((1, 4, 7)):
        given = samples()
        random.Random(turn).shuffle(given)
        job = make_job(tmp_path / str(turn), given, shards, threads=1 + turn % 2)
        count_words(lambda *work: run_serial(*work[:3], work[3][::-1]), job)
        written.add(Path(job.file("divergence/reference", 0)).read_bytes())
    assert len(written) == 1


def test_counting_goes_on_where_it_stopped(tmp_path: Path) -> None:
    job = make_job(tmp_path, samples(), shards=2)
    count_words(run_serial, job)
    reference, sums = (Path(job.file(f"divergence/{step}", 0)) for step in ("reference", "count/sums/0"))
    whole = reference.read_bytes()
    for file in (reference, sums, Path(job.file("divergence/count", 1))):
        file.unlink()
    done: list[tuple[str, list[int]]] = []

    def runner(job: Any, step: str, work: Any, items: Any) -> None:
        done.append((step, list(items)))
        run_serial(job, step, work, items)

    count_words(runner, job)
    assert done == [("divergence/count", [1]), ("divergence/count/sums/0", [0])]
    assert reference.read_bytes() == whole
