"""Scoring, generation and calibration on a CUDA device: every request gets an answer, on a real GPU the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda import null_device

null_device.require()

from tests.dist import run  # noqa: E402

TEXT = "The sun rises. The sun sets. Pi is 3.14159; the rest is silence. " * 3


def answers(dtype: str, device: str) -> tuple[list[float], str, list[str]]:
    """Return nats of each request, a text that was generated, and a batch of them."""
    import torch

    from herd.llama3.evaluate.generate import Sampler, generate, generate_batch
    from herd.llama3.evaluate.generation_settings import GenerationSettings
    from herd.llama3.evaluate.scoring import score_requests
    from herd.llama3.evaluate.task import Prompt, Request
    from herd.llama3.model.transformer import build_model
    from herd.llama3.recipe.sections import Model
    from herd.llama3.tokens.tokenizer import train_tokenizer

    if null_device.NULL:
        pick = Sampler.pick  # what it reads from the device is no token
        Sampler.pick = lambda *words: [number % 256 for number in pick(*words)]  # type: ignore[method-assign]
    tokenizer = train_tokenizer([TEXT], 280)
    config = Model(layers=2, dim=64, ffn=128, heads=4, kv_heads=2, max_seq_len=128)
    model = build_model(config, tokenizer.vocab_size, 3, torch.float32, torch.device("cpu")).eval()
    model = model.to(device, getattr(torch, dtype))
    requests = [Request("eval/x", "id", number, TEXT[:number], " rises.", 0) for number in range(20)]
    scored = score_requests(model, tokenizer, requests, config.max_seq_len, device=device, greedy={"eval/x"})
    one = generate(model, tokenizer, "The sun", 8)
    prompts = [Prompt("x", str(number), TEXT[: 10 * number], ()) for number in range(1, 4)]
    batch = generate_batch(model, tokenizer, prompts, GenerationSettings(max_tokens=8), 0)
    return [score.nll for score in scored], one, ["".join(texts) for texts in batch]


def test_requests_are_scored_and_answers_written() -> None:
    for dtype in ("float32", "bfloat16"):
        ((scored, one, batch),) = run(1, answers, dtype, "cuda")
        assert (len(scored), len(batch)) == (20, 3), dtype
        if not null_device.NULL:
            ((expected, one_there, batch_there),) = run(1, answers, dtype, "cpu")
            assert scored == pytest.approx(expected, rel=1e-5 if dtype == "float32" else 0.02)
            if dtype == "float32":
                assert (one, batch) == (one_there, batch_there)


def split(folder: Path, dtype: str) -> tuple[int, int]:
    """Return how many requests four processes scored, each with a part of the model, and how many texts they wrote."""
    import torch

    from herd.llama3.evaluate.distributed import EvalRanks
    from herd.llama3.evaluate.generate import Sampler, generate_batch
    from herd.llama3.evaluate.generation_settings import GenerationSettings
    from herd.llama3.evaluate.scoring import score_requests
    from herd.llama3.evaluate.task import Prompt, Request
    from herd.llama3.parallel.layout import Layout
    from herd.llama3.parallel.mesh import init_distributed
    from herd.llama3.tokens.tokenizer import Tokenizer

    pick = Sampler.pick
    Sampler.pick = lambda *words: [7 for _ in pick(*words)]  # type: ignore[method-assign]
    tokenizer = Tokenizer.load(folder)
    requests = [Request("eval/x", "id", number, TEXT[:number], " rises.", 0) for number in range(20)]
    prompts = [Prompt("x", str(number), TEXT[: 10 * number], ()) for number in range(1, 4)]
    with init_distributed("cuda", 240, Layout(tp=2, pp=2)) as world:
        ranks = EvalRanks(world)
        model = ranks.load(folder, getattr(torch, dtype), "cuda")
        scored = score_requests(model, tokenizer, requests, 128, "cuda", greedy={"eval/x"}, ranks=ranks)
        written = generate_batch(model, tokenizer, prompts, GenerationSettings(max_tokens=8), 0)
    return len(scored), len(written)


def test_a_split_model_is_scored_and_writes(tmp_path: Path) -> None:
    null_device.require(4)
    import torch

    from herd.llama3.model.files import save_model
    from herd.llama3.model.transformer import build_model
    from herd.llama3.recipe.sections import Model
    from herd.llama3.tokens.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([TEXT], 280)
    config = Model(layers=3, dim=64, ffn=128, heads=4, kv_heads=2, max_seq_len=128, tied_embeddings=False)
    model = build_model(config, tokenizer.vocab_size, 3, torch.float32, torch.device("cpu"))
    save_model(tmp_path, config, tokenizer.vocab_size, model.state_dict())
    tokenizer.save(tmp_path)
    for dtype in ("float32", "bfloat16"):
        assert run(4, split, tmp_path, dtype) == [(20, 3)] * 4, dtype


def measured() -> list[str]:
    """Return what the planner's calibration measured, one name per kind of operation."""
    from herd.llama3.planner.calibrate import calibrate

    names: list[str] = []
    calibrate("cuda", 0.5, lambda point: names.append(point.what))
    return sorted(set(names))


def test_the_planner_measures_the_device() -> None:
    assert run(1, measured) == [["attention backward", "attention forward", "elementwise", "products"]]
