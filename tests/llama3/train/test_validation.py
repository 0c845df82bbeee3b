"""Held-out documents scored inside training: packed whole, the same under any layout, and without a trace in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.evaluate.held_out import ValidationDocument
from herd.llama3.evaluate.scoring import score_requests
from herd.llama3.evaluate.task import Request
from herd.llama3.model.files import load_model
from herd.llama3.model.loss import NO_TARGET
from herd.llama3.recipe.base import DOMAINS
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Share
from herd.llama3.train import metrics
from herd.llama3.train.journal import read_journal
from herd.llama3.train.validation import COLUMNS, ValidationSequences, pack_sequences, validation_interval
from tests.dist import run
from tests.llama3.train.train_samples import BEGIN, STEP, job, losses, output, recipe, stages, train, work

SEQ = 16
EVERY = 3 * STEP
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "dp2-zero3": (2, {"zero": 3}),
}
MODEL = {"layers": 4, "dim": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "max_seq_len": 64}
TEXTS = ("one", "a little more text", "ü" * 30, "x", "four and twenty blackbirds", "é1", "{}", "z" * 40)


class Bytes:
    """A tokenizer whose ids are bytes."""

    begin = start = BEGIN

    def text_of(self, token: int) -> bytes:
        return bytes([token])

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def documents() -> list[ValidationDocument]:
    return [ValidationDocument(f"d{number}", DOMAINS[number % 4], text) for number, text in enumerate(TEXTS)]


def asked(**evaluate: Any) -> Recipe:
    return recipe(model=MODEL, stages=stages(7), evaluate={"val_interval": f"{EVERY} tokens", **evaluate})


@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=12), st.integers(2, 24))
def test_every_document_is_scored_once_and_whole_in_a_row(texts: list[str], seq_len: int) -> None:
    held = pack_sequences(
        [ValidationDocument(str(i), DOMAINS[i % 4], text) for i, text in enumerate(texts)], Bytes(), seq_len
    )
    scored = [token for token in held.columns["targets_BS"].flatten().tolist() if token != NO_TARGET]
    assert scored == [token for text in texts for token in list(text.encode())[:seq_len]]
    assert sum(held.bytes.values()) == len(scored)
    tokens, ids = held.columns["tokens_BS"], held.columns["documents_BS"]
    for row in range(len(tokens)):
        starts = [place for place in range(seq_len) if tokens[row, place] == BEGIN]
        assert [int(ids[row, place]) for place in starts] == list(range(len(starts)))
        assert all(int(a) <= int(b) for a, b in zip(ids[row], ids[row][1:], strict=False))


def test_the_interval_costs_a_hundredth_by_default() -> None:
    assert validation_interval(asked(val_interval="auto"), 3000) == 100_000
    assert validation_interval(asked(), 3000) == EVERY


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One stage under a layout by its name, or `without` held-out documents; each is trained once."""
    folder = tmp_path_factory.mktemp("trained")

    @cache
    def train_under(name: str) -> Path:
        size, layout = LAYOUTS.get(name, (1, {}))
        path = job(folder, asked(), name=name, layout=layout, micro_batch=4)
        work(path).mkdir()
        if name != "without":
            pack_sequences(documents(), Bytes(), SEQ).write(work(path))
        assert run(size, train, path) == [0] * size, output(path)
        return path

    return train_under


def scores(path: Path) -> dict[int, dict[str, float]]:
    """Return the held-out scores in the journal by position."""
    records = read_journal(work(path) / "journal.jsonl")
    found = {
        record.position: {key: value for key, value in record.metrics.items() if key.startswith(metrics.HELD_OUT)}
        for record in records
    }
    return {position: values for position, values in found.items() if values}


def test_scores_stand_at_multiples_of_the_interval_and_at_the_end(trained: Callable[[str], Path]) -> None:
    assert sorted(scores(trained("alone"))) == [EVERY, 2 * EVERY, 7 * STEP]
    assert not scores(trained("without"))


def test_training_does_not_notice(trained: Callable[[str], Path]) -> None:
    assert losses(trained("alone")) == losses(trained("without"))


@pytest.mark.slow
def test_layers_that_free_their_weights_score_the_same(trained: Callable[[str], Path]) -> None:
    """Other layouts are in tests/llama3/train/test_trainer_sft.py."""
    mine, reference = scores(trained("dp2-zero3")), scores(trained("alone"))
    assert mine.keys() == reference.keys()
    for position, values in reference.items():
        assert mine[position] == pytest.approx(values, rel=1e-9)


def test_the_evaluation_finds_the_same(trained: Callable[[str], Path]) -> None:
    model = load_model(work(trained("alone")) / "result" / "model")
    last = scores(trained("alone"))[7 * STEP]
    for domain in DOMAINS:
        cut = [d.text.encode()[:SEQ].decode(errors="ignore") for d in documents() if d.domain == domain]
        found = score_requests(model, Bytes(), [Request("t", "d", 0, "", text, 0) for text in cut], 64)
        bits = sum(likelihood.nll for likelihood in found) / math.log(2)
        assert last[metrics.held_out(domain)] == pytest.approx(bits / sum(len(t.encode()) for t in cut), rel=1e-9)
    shares = {domain: float(share) for domain, share in asked().mix["base"].items()}
    mean = sum(shares[domain] * last[metrics.held_out(domain)] for domain in DOMAINS)
    assert last[metrics.HELD_OUT] == pytest.approx(mean, rel=1e-12)


def test_never_is_never(tmp_path: Path) -> None:
    path = job(tmp_path, asked(val_interval="never"))
    work(path).mkdir()
    pack_sequences(documents(), Bytes(), SEQ).write(work(path))
    assert run(1, train, path) == [0], output(path)
    assert not scores(path)


def test_two_scores_are_compared_document_by_document() -> None:
    """Documents differ by far more than the two sets of weights do."""
    random = np.random.default_rng(1)
    sizes = [(number % 4, int(random.integers(50, 90))) for number in range(40)]
    held = ValidationSequences({}, sizes)
    shares = {domain: Share.parse("25%") for domain in DOMAINS}
    bits = np.array([size * random.uniform(2, 6) for _, size in sizes])
    noise = np.array([size * random.normal(0, 0.05) for _, size in sizes])
    low, high = held.compare(bits + noise, bits, shares)
    assert low < 0 < high
    better = np.array([0.1 * size for _, size in sizes])
    low, high = held.compare(bits + noise + better, bits, shares)
    assert 0 < low < 0.1 < high
    changed = np.where(np.arange(40) % 4 == 0, bits + noise + better, 9e9)
    only_first = held.compare(changed, bits, {DOMAINS[0]: shares["math"]})
    assert 0 < only_first[0] < 0.1 < only_first[1], "other domains do not count"
    few = ValidationSequences({}, sizes[:8]).compare(bits[:8], bits[:8] - noise[:8], shares)
    assert not all(map(math.isfinite, few))
    assert not all(map(math.isfinite, ValidationSequences({}, sizes).compare(bits, bits, {})))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    held = pack_sequences(documents(), Bytes(), SEQ)
    held.write(tmp_path)
    again = ValidationSequences.read(tmp_path)
    assert again is not None
    assert (again.bytes, again.document_bytes) == (held.bytes, held.document_bytes)
    numbers, count = again.columns["numbers_BS"], len(held.document_bytes)
    targets = again.columns["targets_BS"] != NO_TARGET
    assert numbers[~targets].tolist() == [count] * int((~targets).sum())
    sizes = np.bincount(numbers[targets], minlength=count)
    assert sizes.tolist() == [size for _, size in held.document_bytes], "a token of a byte each"
    assert all((again.columns[name] == held.columns[name]).all() for name in COLUMNS)
    assert ValidationSequences.read(tmp_path / "elsewhere") is None
