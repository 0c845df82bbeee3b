from __future__ import annotations

import pytest
import torch

from herd.llama3.tokens.stream import TokenStream
from herd.llama3.train.data_loader import Batches, TokenBatch
from tests.llama3.tokens.token_samples import LENGTHS, recipe, stage, write_shards

STAGES = [stage("a", 256, seq_len=8, batch=64), stage("b", 256, seq_len=32, batch=64, mix="anneal")]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Batches:
    asked = recipe(STAGES)
    return Batches(TokenStream(write_shards(tmp_path_factory.mktemp("shards"), asked, LENGTHS), asked))


def columns(batch: TokenBatch) -> list[torch.Tensor]:
    return [batch.tokens_BS, batch.targets_BS, batch.documents_BS, batch.domains_BS]


def test_targets_are_the_next_token_of_the_same_segment(batches: Batches) -> None:
    window = batches.stream.read(0, 513)
    batch = batches.sequences(0, 32, 0, 16)
    tokens, targets = batch.tokens_BS.flatten().tolist(), batch.targets_BS.flatten().tolist()
    assert tokens == window.tokens[:512].tolist()
    masked = 0
    for place, target in enumerate(targets):
        if window.segments[place] == window.segments[place + 1]:
            assert target == window.tokens[place + 1]
        else:
            assert target == -100
            masked += 1
    assert 20 < masked < 256


def test_a_target_may_lie_in_the_next_sequence(batches: Batches) -> None:
    batch = batches.sequences(0, 8, 0, 32)
    last, following = batch.targets_BS[:-1, -1], batch.tokens_BS[1:, 0]
    assert (last == following).any()
    assert ((last == following) | (last == -100)).all()


def test_documents_count_segments_from_zero_in_each_sequence(batches: Batches) -> None:
    documents = batches.sequences(0, 32, 0, 16).documents_BS
    segments = torch.from_numpy(batches.stream.read(0, 512).segments).view(16, 32)
    assert (documents[:, 0] == 0).all()
    assert documents.max() > 1
    for row in range(16):
        assert torch.equal(documents[row], torch.unique(segments[row], return_inverse=True)[1])


def test_any_ranks_give_the_same_step(batches: Batches) -> None:
    whole = batches.sequences(64, 8, 0, 8)
    for ranks in (2, 4, 8):
        parts = [batches.sequences(64, 8, rank * 8 // ranks, 8 // ranks) for rank in range(ranks)]
        for column, pieces in zip(columns(whole), zip(*map(columns, parts), strict=True), strict=True):
            assert torch.equal(column, torch.cat(pieces))


def test_the_last_step_of_a_run_has_all_its_targets(batches: Batches) -> None:
    batch = batches.sequences(448, 32, 0, 2)
    assert all(column.shape == (2, 32) and column.dtype == torch.int64 for column in columns(batch))
    assert batch.targets_BS[-1, -1] == -100
    assert batch.domains_BS.min() >= 0
    with pytest.raises(ValueError, match="are not in the run"):
        batches.sequences(448, 32, 0, 3)
