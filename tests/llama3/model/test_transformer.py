"""The transformer against an independent one in plain numpy, and the properties that training rests on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from herd.llama3.model.flops import flops_per_token, parameter_count
from herd.llama3.model.transformer import Transformer, build_model, empty_model, initial_value
from herd.llama3.recipe.sections import Model

VOCAB_SIZE = 37
CPU = torch.device("cpu")
Array = np.ndarray


def config(tied: bool = False) -> Model:
    return Model(
        layers=2,
        dim=24,
        ffn=40,
        heads=6,
        kv_heads=2,
        max_seq_len=64,
        tied_embeddings=tied,
        rope_theta=1000.0,
        norm_eps=1e-3,
    )


def scaled(model: Transformer) -> Transformer:
    """Enlarge the weights so that attention is far from uniform and norms matter."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(12.0) if parameter.ndim > 1 else parameter.mul_(1 + 0.1 * index)
    return model


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def turn(vector: Array, position: int, theta: float) -> Array:
    half = len(vector) // 2
    out = np.empty_like(vector)
    for i in range(half):
        z = complex(vector[i], vector[i + half]) * np.exp(1j * position * theta ** (-2 * i / len(vector)))
        out[i], out[i + half] = z.real, z.imag
    return out


def reference(shape: Model, w: dict[str, Array], tokens: Array, documents: Array) -> Array:
    """Logits of one sequence, one position and one head at a time."""
    size, group = shape.dim // shape.heads, shape.heads // shape.kv_heads
    x = w["embedding.weight"][tokens]
    for layer in range(shape.layers):
        at = f"layers.{layer}."
        h = norm(x, w[at + "attention_norm.weight"], shape.norm_eps)
        q, k, v = (h @ w[f"{at}attention.{name}.weight"].T for name in "qkv")
        mixed = np.zeros((len(tokens), shape.heads * size))
        for head in range(shape.heads):
            mine, theirs = (
                slice(head * size, (head + 1) * size),
                slice(head // group * size, (head // group + 1) * size),
            )
            for t in range(len(tokens)):
                seen = [s for s in range(t + 1) if documents[s] == documents[t]]
                query = turn(q[t, mine], t, shape.rope_theta)
                scores = np.array([query @ turn(k[s, theirs], s, shape.rope_theta) for s in seen]) / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                mixed[t, mine] = (weights / weights.sum()) @ v[seen, theirs]
        x = x + mixed @ w[at + "attention.o.weight"].T
        h = norm(x, w[at + "ffn_norm.weight"], shape.norm_eps)
        gate = h @ w[at + "ffn.gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[at + "ffn.up.weight"].T)) @ w[at + "ffn.down.weight"].T
    head_weight = w.get("output.weight", w["embedding.weight"])
    return norm(x, w["norm.weight"], shape.norm_eps) @ head_weight.T


@pytest.mark.parametrize("tied", [False, True])
def test_equals_an_independent_implementation(tied: bool) -> None:
    model = scaled(build_model(config(tied), VOCAB_SIZE, 3, torch.float64, CPU))
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB_SIZE, (2, 11)))
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])
    w = {name: value.detach().numpy() for name, value in model.named_parameters()}
    expected = np.stack([reference(config(tied), w, tokens[b].numpy(), documents[b].numpy()) for b in range(2)])
    assert np.abs(expected).max() > 1  # logits of a model that does something
    with torch.no_grad():
        np.testing.assert_allclose(model(tokens, documents).numpy(), expected, rtol=0, atol=1e-10)


def test_targets_give_the_likelihood_of_the_logits() -> None:
    model = scaled(build_model(config(), VOCAB_SIZE, 3, torch.float64, CPU))
    tokens = torch.arange(22).view(2, 11) % VOCAB_SIZE
    targets = (tokens * 7 + 1) % VOCAB_SIZE
    targets[0, 3] = targets[1, 10] = -100
    nll = model(tokens, torch.zeros_like(tokens), targets)
    expected = torch.nn.functional.cross_entropy(
        model(tokens, None).flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100
    )
    torch.testing.assert_close(nll.flatten(), expected, rtol=0, atol=1e-12)
    assert nll[0, 3] == 0
    assert nll[1, 10] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packed_documents_equal_documents_alone(dtype: torch.dtype) -> None:
    model = scaled(build_model(config(), VOCAB_SIZE, 3, dtype, CPU))
    lengths = [5, 1, 9, 3]
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB_SIZE, sum(lengths)))
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    with torch.no_grad():
        packed = model(tokens[None], documents[None])[0]
        alone = torch.cat([model(part[None], torch.zeros_like(part[None]))[0] for part in tokens.split(lengths)])
    bound = 1e-12 if dtype == torch.float64 else 1e-4
    assert (packed - alone).abs().max() <= bound * alone.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_document_has_the_same_bits_with_and_without_a_mask(dtype: torch.dtype) -> None:
    model = build_model(Model(preset="tiny"), VOCAB_SIZE, 0, dtype, CPU)
    tokens = torch.arange(2 * 96).view(2, 96) % VOCAB_SIZE
    with torch.no_grad():
        assert torch.equal(model(tokens, None), model(tokens, torch.zeros_like(tokens)))


def test_initial_weights_are_a_function_of_seed_and_name() -> None:
    whole = dict(build_model(config(), VOCAB_SIZE, 5, torch.float32, CPU).named_parameters())
    for name in reversed(whole):  # another order, one at a time: as another layout would draw them
        assert torch.equal(whole[name], initial_value(config(), 5, name, whole[name].shape).float())
    other = dict(build_model(config(), VOCAB_SIZE, 6, torch.float32, CPU).named_parameters())
    assert not torch.equal(whole["layers.0.ffn.up.weight"], other["layers.0.ffn.up.weight"])
    assert not torch.equal(whole["layers.0.ffn.up.weight"], whole["layers.1.ffn.up.weight"])


def test_initial_scales() -> None:
    model = build_model(Model(preset="tiny", layers=8), 512, 0, torch.float32, CPU)
    w = dict(model.named_parameters())
    assert w["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    assert w["layers.3.ffn.up.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    assert w["layers.3.ffn.down.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert w["layers.3.attention.o.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(w["norm.weight"], torch.ones(64))
    wide = Model(preset="tiny", tied_embeddings=False, embedding_std=1)
    w = dict(build_model(wide, 512, 0, torch.float32, CPU).named_parameters())
    assert w["embedding.weight"].std().item() == pytest.approx(1, rel=0.03)
    assert w["output.weight"].std().item() == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize(
    ("preset", "count"), [("8b", 8_030_261_248), ("70b", 70_553_706_496), ("405b", 405_853_388_800)]
)
def test_published_sizes(preset: str, count: int) -> None:
    shape = Model(preset=preset)
    assert sum(parameter.numel() for parameter in empty_model(shape, 128_256).parameters()) == count
    assert parameter_count(shape, 128_256) == count


def test_count_of_tied_model() -> None:
    assert parameter_count(config(True), VOCAB_SIZE) == sum(
        p.numel() for p in empty_model(config(True), VOCAB_SIZE).parameters()
    )


def test_flops_per_token() -> None:
    flops = flops_per_token(Model(preset="405b"), 128_256, 8192)
    assert flops.causal == pytest.approx(2.526e12, rel=0.005)
    assert flops.six_n == pytest.approx(6 * (405_853_388_800 - 128_256 * 16_384), rel=1e-4)  # all but lookup and norms
