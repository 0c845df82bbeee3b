"""Scoring, generation and calibration on a CUDA device: every request gets an answer, whose value means nothing."""

from __future__ import annotations

from tests.cuda import null_device

null_device.require()

from tests.dist import run  # noqa: E402

TEXT = "The sun rises. The sun sets. Pi is 3.14159; the rest is silence. " * 3


def answers(dtype: str) -> tuple[int, int, int]:
    """Return how many requests were scored, the tokens of a text that was generated, and of a batch of them."""
    import torch

    from llama3.evaluate.generate import Sampler, generate, generate_batch
    from llama3.evaluate.scoring import score_requests
    from llama3.evaluate.task import GenerationSettings, Prompt, Request
    from llama3.model.init import build_model
    from llama3.recipe.sections import Model
    from llama3.tokens.tokenizer import train_tokenizer

    pick = Sampler.pick  # what it reads from the device is no token
    Sampler.pick = lambda *words: [number % 256 for number in pick(*words)]  # type: ignore[method-assign]
    tokenizer = train_tokenizer([TEXT], 280)
    config = Model(layers=2, dim=64, ffn=128, heads=4, kv_heads=2, max_seq_len=128)
    model = build_model(config, tokenizer.rows, 3, getattr(torch, dtype), torch.device("cuda")).eval()
    requests = [Request("eval/x", "id", number, TEXT[:number], " rises.", 0) for number in range(20)]
    scored = score_requests(model, tokenizer, requests, config.max_seq_len, device="cuda")
    one = generate(model, tokenizer, "The sun", 8)
    prompts = [Prompt("x", str(number), TEXT[: 10 * number], ()) for number in range(1, 4)]
    batch = generate_batch(model, tokenizer, prompts, GenerationSettings(max_tokens=8), 0)
    return len(scored), len(one), len(batch)


def test_requests_are_scored_and_answers_written() -> None:
    for dtype in ("float32", "bfloat16"):
        ((scored, one, batch),) = run(1, answers, dtype)
        assert (scored, batch) == (20, 3), dtype
        assert one >= 0


def measured() -> list[str]:
    """Return what the planner's calibration measured, one name per kind of operation."""
    from llama3.planner.calibrate import calibrate

    names: list[str] = []
    calibrate("cuda", 0.5, lambda point: names.append(point.what))
    return sorted(set(names))


def test_the_planner_measures_the_device() -> None:
    assert run(1, measured) == [["attention backward", "attention forward", "elementwise", "products"]]
