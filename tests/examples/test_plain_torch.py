"""The reader and the loop that share no code with herd: herd's batches, and its losses from the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples import plain_torch
from examples.plain_torch import Dataset, Tokens
from herd.llama3.model.files import save_model
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe import keys
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens import shards as shards_module
from herd.llama3.tokens import source_stream
from herd.llama3.tokens.stream import TokenStream
from tests.dist import run
from tests.llama3.tokens.token_samples import LENGTHS, recipe, stage, write_shards
from tests.llama3.train import train_samples

EXTRA = {"general": [{"uri": "x"}, {"uri": "y", "name": "notes"}]}
CASES: dict[str, dict[str, Any]] = {
    "one mix": {"stages": [stage("a", 4000, 16, 64)]},
    "several lengths": {"stages": [stage("a", 200), stage("b", 400, 16), stage("c", 3000, 32, mix="anneal")]},
    "a mix that comes back": {
        "stages": [stage("a", 600), stage("b", 496, 16, mix="anneal"), stage("c", 208, mix="base")],
        "unit": 24,
    },
    "shuffled chunks": {"stages": [stage("a", 4000, 16, 64)], "unit": 16, "tokens": {"shuffle": "chunks"}},
    "data offset": {"stages": [stage("a", 800), {**stage("b", 800), "data_offset": 2}]},
    "weights": {
        "stages": [stage("a", 4000, 16, 64)],
        "weights": {"general": [17, 19], "math": [3, 7], "code": [11, 13]},
    },
    "many blocks": {"stages": [stage("a", 2**14, 64, 512)], "unit": 64, "seed": 9},
}


def described(asked: Recipe, folder: Path, name: str) -> dict[str, Any]:
    """Return the parameters of the stage's checkpoint, as its manifest has them."""
    span = asked.schedule.span(name)
    parameters = keys.checkpoint(asked, span, TokenStream(folder, asked).identity(span.start, span.end))
    plain: dict[str, Any] = json.loads(json.dumps(parameters, sort_keys=True))
    return plain


@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_herd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    for module, name, size in (
        (source_stream, "GROUP", 2),
        (shards_module, "GROUP", 2),
        (source_stream, "BLOCK", 3),
        (plain_torch, "GROUP", 2),
        (plain_torch, "BLOCK", 3),
    ):
        monkeypatch.setattr(module, name, size)  # small datasets then have several blocks
    asked = recipe(**CASES[case])
    folder = write_shards(tmp_path, asked, LENGTHS)
    stream, targets = TokenStream(folder, asked), 0
    for span in asked.schedule.spans:
        parameters = described(asked, folder, span.name)
        reader = Tokens(folder, parameters["stream"])
        batches = reader.steps(parameters["shape"])
        for segment in span.segments:
            for start in range(segment.start, segment.end, segment.batch):
                due = stream.sequences(start, segment.seq_len, segment.batch // segment.seq_len)[:3]
                for ours, theirs in zip(due, next(batches), strict=True):
                    assert np.array_equal(ours, theirs), (span.name, start)
                targets += int((due[1] != plain_torch.IGNORED).sum())
        assert next(batches, None) is None
    assert targets > asked.schedule.tokens // 3


def test_an_epoch_of_the_published_groups_is_that_of_herd(tmp_path: Path) -> None:
    """150,000 documents are 586 groups in three blocks, whose permutation walks beyond its range."""
    lengths = np.random.default_rng(2).integers(1, 5, 150_000).tolist()
    asked = recipe([stage("a", 4000, 16, 64)], mixes={"base": {"general": "100%"}})
    folder = write_shards(tmp_path, asked, [lengths], cuts=60_000)
    index = json.loads((folder / "tokens.json").read_text())
    reader = Dataset(folder / "general", index["datasets"]["general"]["shards"], index["dtype"], asked.seed, None)
    theirs = source_stream.SourceStream("general", folder / "general", index["datasets"]["general"], asked.seed)
    for first in (0, theirs.tokens // 2, theirs.tokens - 500, 3 * theirs.tokens + 7):
        tokens, _ = reader.read(first, 1000)
        documents, due = theirs.overlapping(first, first + 1000), np.empty(1000, np.int64)
        skipped = np.maximum(first - documents.start, 0)
        lengths_read = np.minimum(documents.start + documents.length, first + 1000) - documents.start - skipped
        theirs.copy(documents, skipped, lengths_read, np.cumsum(lengths_read) - lengths_read, due)
        assert np.array_equal(tokens, due), first


@pytest.mark.slow
def test_losses_from_the_same_weights_are_those_of_herd(tmp_path: Path) -> None:
    asked = train_samples.recipe(stages=train_samples.stages(20), optimizer={}, name="plain")
    job = train_samples.job(tmp_path, asked)
    assert run(1, train_samples.train, job) == [0]
    records = train_samples.records(job)
    model = build_model(asked.model, train_samples.VOCAB_SIZE, asked.seed, torch.float64, torch.device("cpu"))
    save_model(tmp_path / "model", asked.model, train_samples.VOCAB_SIZE, model.state_dict())
    parameters = described(asked, tmp_path / "tokens", "main")
    losses = plain_torch.train(
        Tokens(tmp_path / "tokens", parameters["stream"]),
        parameters["shape"],
        tmp_path / "model",
        [record.metrics["train/lr"] for record in records],
    )
    assert len(losses) == 20
    assert losses == pytest.approx([record.metrics["train/loss"] for record in records], rel=1e-9)
    assert losses[-1] < 0.9 * losses[0]


def test_the_reader_needs_numpy_alone() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('herd', 'torch', 'safetensors', 'pyarrow', 'numba')));"
        "import plain_torch; plain_torch.Tokens"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(plain_torch.__file__).parent)
