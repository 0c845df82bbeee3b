from __future__ import annotations

import random
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.classifiers import (
    MODEL,
    Classifier,
    TooFewExamples,
    area_under_curve,
    select_examples,
    train_classifier,
    truncate,
)
from herd.llama3.data.kernels.histogram import PIECE
from herd.llama3.data.text.words import split_words

FOODS = re.findall(
    r"\w+", "butter flour onion garlic rice lemon pepper carrot cheese basil tomato cream bread honey ginger"
)
ACTS = re.findall(r"\w+", "chop stir bake fry whisk melt knead simmer roast pour season peel grate serve chill")
THINGS = re.findall(r"\w+", "apples boxes coins pages trains litres metres books tickets hours")


def cooking(seed: int, sentences: int = 12) -> str:
    draw = random.Random(f"cooking {seed}")
    parts = [
        f"{draw.choice(ACTS)} the {draw.choice(FOODS)} with {draw.choice(FOODS)} for {draw.randint(2, 40)} minutes"
        for _ in range(sentences)
    ]
    return ".\n".join(parts)


def arithmetic(seed: int, sentences: int = 12) -> str:
    draw = random.Random(f"arithmetic {seed}")
    parts = []
    for _ in range(sentences):
        left, right = draw.randint(2, 99), draw.randint(2, 99)
        parts.append(f"If {left} {draw.choice(THINGS)} are added to {right}, the sum is {left + right} for all")
    return ".\n".join(parts)


def noisy(seed: int, share: float) -> str:
    """Return cooking with a share of arithmetic in it."""
    mixed = round(12 * share)
    return cooking(seed, 12 - mixed) + "\n" + arithmetic(seed, mixed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    train_classifier({"cooking": map(cooking, range(300)), "arithmetic": map(arithmetic, range(300))}, folder)
    return folder


def test_two_kinds_of_text_are_told_apart(folder: Path) -> None:
    model = Classifier.load(folder)
    texts = pa.array([cooking(index) for index in range(1000, 1050)] + [arithmetic(i) for i in range(1000, 1050)])
    scores = model.scores(texts, "cooking")
    assert scores.dtype == np.float64
    assert scores[:50].min() > 0.9
    assert scores[50:].max() < 0.1
    labels, probabilities = model.labels(texts)
    assert labels == ["cooking"] * 50 + ["arithmetic"] * 50
    np.testing.assert_array_equal(probabilities[:50], scores[:50])
    np.testing.assert_allclose(probabilities[50:], 1 - scores[50:])


def test_a_mixture_scores_in_between(folder: Path) -> None:
    scores = Classifier.load(folder).scores(pa.array([noisy(7, share) for share in (0, 0.25, 0.5, 0.75, 1)]), "cooking")
    assert (np.diff(scores) < 0).all()


def test_it_reports_how_it_did_on_what_it_had_not_seen(folder: Path) -> None:
    facts = Classifier.load(folder).metadata
    assert facts["examples"] == {"arithmetic": 300, "cooking": 300}
    assert 30 <= sum(facts["held_out"].values()) <= 100
    assert facts["accuracy"] > 0.95
    assert facts["auc"] > 0.99
    assert set(facts["recall"]) == {"arithmetic", "cooking"}


def test_labels_that_mean_nothing_are_reported_as_such(tmp_path: Path) -> None:
    facts = train_classifier({"a": map(cooking, range(0, 600, 2)), "b": map(cooking, range(1, 600, 2))}, tmp_path)
    assert 0.25 < facts["auc"] < 0.75, "held-out examples must not be among those trained on"


def test_the_same_examples_give_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    examples = {"x": [cooking(index) for index in range(40)], "y": [arithmetic(index) for index in range(25)]}
    reverse = {label: [*texts[::-1], texts[0]] for label, texts in reversed(examples.items())}
    facts = [train_classifier(given, tmp_path / str(turn)) for turn, given in enumerate((examples, examples, reverse))]
    written = {(tmp_path / str(turn) / MODEL).read_bytes() for turn in range(3)}
    assert len(written) == 1
    assert facts[0] == facts[2]
    train_classifier(examples, tmp_path / "other", seed=1)
    assert (tmp_path / "other" / MODEL).read_bytes() not in written


def test_a_rare_label_counts_as_much_as_a_common_one(tmp_path: Path) -> None:
    """Where both labels say the same, it is even chances, not one in fifty."""
    same = [" ".join(random.Random(index).choices(["heads", "tails"], k=40)) for index in range(3000)]
    train_classifier({"rare": same[:50], "common": same[50:2500]}, tmp_path)
    scores = Classifier.load(tmp_path).scores(pa.array(same[2500:]), "rare")
    assert 0.4 < scores.mean() < 0.6


def test_words_never_seen_leave_labels_equally_likely(folder: Path) -> None:
    scores = Classifier.load(folder).scores(pa.array(["", "?!", "unheard"]), "cooking")
    assert scores.tolist() == [0.5, 0.5, 0.5]


def test_a_text_scores_the_same_whatever_stands_beside_it(folder: Path) -> None:
    model = Classifier.load(folder)
    texts = [noisy(index, index / 40) for index in range(40)] + ["", "?!", "花火 แม่ 花"]
    together = model.probabilities(pa.array(texts))
    alone = np.concatenate([model.probabilities(pa.chunked_array([[text]])) for text in texts])
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_allclose(together.sum(axis=1), 1)


def test_no_texts_give_no_scores(folder: Path) -> None:
    assert Classifier.load(folder).probabilities(pa.array([], pa.string())).shape == (0, 2)


def test_of_a_long_text_the_beginning_and_the_middle_count(folder: Path) -> None:
    model = Classifier.load(folder)
    filler = "zzz " * PIECE
    begun = cooking(1, 150)[: PIECE - 1] + " " + filler
    middle = filler + cooking(1, 150)[:PIECE] + filler
    ended = filler + filler + cooking(1, 150)
    scores = model.scores(pa.array([begun, middle, ended, filler]), "cooking")
    assert scores[0] > scores[3]
    assert scores[1] > scores[3]
    assert scores[2] == scores[3]


@given(st.text(alphabet="a é花😀\n", max_size=40), st.integers(1, PIECE))
def test_an_example_is_cut_to_what_is_read_of_a_long_text(text: str, copies: int) -> None:
    short = truncate(text * copies)
    assert len(short.encode()) <= 2 * PIECE
    assert truncate(short) == short
    if len((text * copies).encode()) <= 2 * PIECE:
        assert short == text * copies


def test_pieces_of_a_long_text_end_between_characters(folder: Path) -> None:
    model = Classifier.load(folder)
    for shift in range(4):  # a character of 3 bytes lies across both ends of a piece for some of these
        text = "a" * shift + "花" * (3 * PIECE)
        assert len(split_words(text)) > 0
        assert np.isfinite(model.probabilities(pa.array([text]))).all()


def test_examples_are_different_and_in_an_order_of_their_own() -> None:
    found = select_examples(["b", "a", "b", "c"])
    assert {text for _, text in found} == {"a", "b", "c"}
    assert found == select_examples(["c", "b", "a"])


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30))
def test_area_under_the_curve_counts_pairs(found: list[tuple[int, bool]]) -> None:
    good = [score for score, positive in found if positive]
    bad = [score for score, positive in found if not positive]
    if not good or not bad:
        return
    wins = sum((a > b) + (a == b) / 2 for a in good for b in bad)
    scores, positive = np.array([float(s) for s, _ in found]), np.array([p for _, p in found])
    assert area_under_curve(scores, positive) == pytest.approx(wins / len(good) / len(bad))


def test_too_few_examples_name_the_label(tmp_path: Path) -> None:
    with pytest.raises(TooFewExamples, match=r"^good: 3 different examples are too few .* give 10"):
        train_classifier({"good": ["one", "two", "three", "three"], "bad": map(cooking, range(20))}, tmp_path)
    assert not (tmp_path / MODEL).exists()


def test_a_damaged_model_is_refused(folder: Path, tmp_path: Path) -> None:
    whole = (folder / MODEL).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole[:8] + b"x" * 50):
        (tmp_path / MODEL).write_bytes(damaged)
        with pytest.raises(ValueError, match="is not a classifier"):
            Classifier.load(tmp_path)
    with pytest.raises(ValueError, match="is not a classifier"):
        Classifier.load(tmp_path / "nowhere")


@pytest.mark.slow
def test_real_kinds_of_text_are_told_apart(shared: Path, tmp_path: Path) -> None:
    from herd.llama3.data.classifiers import read_seeds

    examples = {
        domain: list(islice(read_seeds([str(shared / "corpora" / domain / names)], "x"), 200))
        for domain, names in (("general", "html*"), ("code", "rust*"), ("math", "stacks*"))
    }
    facts = train_classifier(examples, tmp_path)
    assert facts["accuracy"] > 0.9
    assert min(facts["recall"].values()) > 0.8
