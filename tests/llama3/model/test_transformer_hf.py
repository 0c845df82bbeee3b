"""Our transformer against transformers' LlamaForCausalLM: the same weights give the same logits and train the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from herd.llama3.export.hf import hugging_face_settings
from herd.llama3.model.param_table import param_table
from herd.llama3.model.transformer import Transformer, build_model
from herd.llama3.recipe.sections import INIT_STD, Model

VOCAB_SIZE = 83
SHAPE: dict[str, Any] = {"layers": 2, "dim": 128, "ffn": 352, "heads": 4, "kv_heads": 2, "max_seq_len": 131_072}
SCALED = {"factor": 8, "original": 512}
"""Of 16 rotary pairs 4 keep their frequency, 2 are blended and 10 slowed: the three parts of the rule."""
CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "grouped-tied": {"tied_embeddings": True},
    "all-heads": {"kv_heads": 4},
    "one-kv-head-of-128": {"dim": 256, "heads": 2, "kv_heads": 1},
    "scaled": {"rope_scaling": SCALED},
    "scaled-tied": {"rope_scaling": SCALED, "tied_embeddings": True},
    "scaled-as-3.1": {"rope_scaling": {}},
    "scaled-as-3.2": {"rope_scaling": {"factor": 32}, "tied_embeddings": True},
    "theta-and-eps": {"rope_theta": 10_000.0, "norm_eps": 1e-2},
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    library = pytest.importorskip("transformers", reason="package transformers is not installed")
    library.logging.disable_progress_bar()
    return library


def ours(config: Model, spread: float | None = None) -> Transformer:
    """Return a model whose norms are not 1; with `spread`, a product of normed inputs has that standard deviation.

    0.7 makes attention far from uniform. transformers computes rotary angles in fp32: at position 1,500 they are off by
    3e-5 radians, which is why larger weights, whose attention is sharper, would differ by more than 1e-5.
    """
    model = build_model(config, VOCAB_SIZE, 7, torch.float32, torch.device("cpu"))
    wide = spread / INIT_STD / config.dim**0.5 if spread else 1.0
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(wide if parameter.ndim > 1 else 1 + 0.02 * index)
    return model


def theirs(transformers: Any, model: Transformer, **other: Any) -> Any:
    """Return transformers' model with our weights and settings, some of them replaced by `other`."""
    settings = {**hugging_face_settings(model.config, VOCAB_SIZE, torch.float32), **other}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings))
    state = {param.hf: model.state_dict()[param.name].clone() for param in param_table(model.config, VOCAB_SIZE)}
    lost = made.load_state_dict(state, strict=False)
    assert not lost.unexpected_keys
    assert set(lost.missing_keys) <= ({"lm_head.weight"} if model.config.tied_embeddings else set())
    return made


def tokens(batch: int, seq_len: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (batch, seq_len), generator=torch.Generator().manual_seed(seed))


def error(transformers: Any, model: Transformer, seq_len: int, **other: Any) -> float:
    """Return the largest difference of logits relative to the largest logit."""
    tokens_BS = tokens(2, seq_len)
    with torch.no_grad():
        logits, expected = model(tokens_BS, None), theirs(transformers, model, **other)(tokens_BS).logits
    assert expected.abs().max() > 1  # a model that does something
    return float((logits - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("case", "seq_len"),
    [
        *((case, 300) for case in CASES),
        ("scaled", 1500),
        *(pytest.param(case, seq_len, marks=pytest.mark.slow) for case in CASES for seq_len in (7, 1500)),
    ],
)
def test_logits_are_equal(transformers: Any, case: str, seq_len: int) -> None:
    model = ours(Model(**{**SHAPE, **CASES[case]}), spread=0.7)
    assert error(transformers, model, seq_len) < 1e-5


@pytest.mark.parametrize(
    ("case", "other"),
    [
        ("scaled", {"rope_scaling": None}),
        ("scaled", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                     "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}}),
        ("grouped", {"rope_theta": 400_000.0}),
        ("grouped", {"rms_norm_eps": 1e-3}),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_seen(transformers: Any, case: str, other: dict[str, Any]) -> None:
    """The bound above is tight enough to find each of these: they are off by 10,000 times it."""
    model = ours(Model(**{**SHAPE, **CASES[case]}), spread=0.7)
    assert error(transformers, model, 300, **other) > 0.1


@pytest.mark.parametrize(
    "case", ["scaled", *(pytest.param(case, marks=pytest.mark.slow) for case in ("grouped", "grouped-tied"))]
)
def test_losses_of_20_training_steps_are_equal(transformers: Any, case: str) -> None:
    model = ours(Model(**{**SHAPE, **CASES[case]}))
    other = theirs(transformers, model).train()
    settings: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW(module.parameters(), **settings) for module in (model, other)]
    losses: list[tuple[float, float]] = []
    for step in range(20):
        batch_BS = tokens(4, 65, seed=step) % 7  # something to learn: few of the tokens occur
        inputs_BS, targets_BS = batch_BS[:, :-1], batch_BS[:, 1:].contiguous()
        pair = (
            model(inputs_BS, None, targets_BS).mean(),
            F.cross_entropy(other(inputs_BS).logits.flatten(0, 1), targets_BS.flatten()),
        )
        for loss, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append((pair[0].item(), pair[1].item()))
    assert max(abs(one - two) for one, two in losses) < 1e-5
    assert losses[-1][0] < 0.8 * losses[0][0]
