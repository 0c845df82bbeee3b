"""Several processes find what one finds, to the bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from herd.llama3.evaluate.distributed import EvalRanks
from herd.llama3.model.files import save_model
from herd.llama3.model.param_table import param_table
from herd.llama3.parallel.layout import Layout
from herd.llama3.recipe.sections import Model
from tests.dist import run
from tests.llama3.evaluate.rank_samples import (
    TOKENIZER,
    evaluated,
    evaluated_within,
    gathered,
    scored_alone,
    scored_together,
    write_checkpoint,
    write_model,
)


def test_two_processes_find_the_bits_that_one_finds() -> None:
    (alone,) = run(1, scored_alone)
    assert run(2, scored_together) == [alone, alone]
    assert all(math.isfinite(nll) and nll > 0 for nll, _, _ in alone)


def test_every_process_gets_what_all_found_in_order() -> None:
    ranks = run(3, gathered)
    for rank, (found, nothing, me) in enumerate(ranks):
        assert [item["rank"] for item in found] == [0, 1, 2]
        assert [len(item["text"]) for item in found] == [0, 100, 200]
        assert found[2]["numbers"] == [0.1, math.inf, None, True]
        assert nothing == [[], [], []]
        assert me == (rank, 3)


def test_one_process_gathers_its_own() -> None:
    assert EvalRanks().gather(lambda: [1, "a"]) == [[1, "a"]]


def test_a_model_split_over_processes_scores_and_writes_the_same(tmp_path: Path) -> None:
    """Tensor parallel and pipeline together, and two replicas of a tensor-parallel one."""
    write_model(tmp_path)
    ((scores, answers, text),) = run(1, evaluated, tmp_path, None)
    assert any(answer for group in answers for answer in group)
    assert [greedy for *_, greedy in scores].count(True) >= 6
    for layout in (Layout(tp=2, pp=2), Layout(tp=2)):
        for split_scores, split_answers, split_text in run(4, evaluated, tmp_path, layout):
            assert split_answers == answers
            assert split_text == text
            assert [(tokens, greedy) for _, tokens, greedy in split_scores] == [(t, g) for _, t, g in scores]
            assert [nll for nll, *_ in split_scores] == pytest.approx([nll for nll, *_ in scores], rel=1e-5)


def test_a_checkpoint_in_progress_is_scored_as_the_model_that_it_holds(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    run(2, write_checkpoint, tmp_path / "000000000000004096")
    (expected,) = run(1, evaluated, tmp_path / "model", None)
    assert run(1, evaluated, tmp_path / "000000000000004096", None) == [expected]
    (tp, *_) = run(2, evaluated, tmp_path / "000000000000004096", Layout(tp=2))
    assert tp[1:] == expected[1:]
    assert [nll for nll, *_ in tp[0]] == pytest.approx([nll for nll, *_ in expected[0]], rel=1e-5)
    damaged = next((tmp_path / "000000000000004096").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(RuntimeError, match="has another size than when it was saved"):
        run(1, evaluated, damaged.parent, None)


def test_a_layout_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(RuntimeError, match=r"tp: 4 does not divide .*kv_heads 2"):
        run(4, evaluated, tmp_path, Layout(tp=4))


def test_a_model_larger_than_the_memory_of_a_process_is_evaluated_by_four(tmp_path: Path) -> None:
    config = Model(layers=4, dim=1024, ffn=3072, heads=8, kv_heads=8, max_seq_len=512, tied_embeddings=False)
    shapes = {param.name: param.shape for param in param_table(config, TOKENIZER.vocab_size)}
    save_model(
        tmp_path, config, TOKENIZER.vocab_size, {name: torch.full(s, 0.01).bfloat16() for name, s in shapes.items()}
    )
    size = 2 * (tmp_path / "model.safetensors").stat().st_size  # it is evaluated in fp32
    assert run(1, evaluated_within, tmp_path, None, size // 2) == ["does not fit"]
    assert run(4, evaluated_within, tmp_path, Layout(tp=2, pp=2), size // 2) == ["fits"] * 4
