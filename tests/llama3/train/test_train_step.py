"""Two stages of training beside a second implementation: plain fp64 torch that uses nothing of the model and trainer.

Settings are not the defaults, so each of them must arrive; each feature of a stage comes before and after another.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from herd.llama3.recipe.schema import Recipe
from herd.llama3.train.data_loader import Batches, TokenBatch
from herd.llama3.train.job import TrainJob
from herd.llama3.train.trainer import open_stream
from tests.dist import run
from tests.llama3.train.test_trainer_bad_steps import pass_over
from tests.llama3.train.test_trainer_sft import chat_job
from tests.llama3.train.train_samples import STEP, VOCAB_SIZE, job, recipe, records, train, work

STEPS = 4
"""Of each stage."""
SEQ = (16, 32)
SETTINGS: dict[str, dict[str, Any]] = {
    "untied": {
        "seed": 11,
        "z_loss": 0.02,
        "optimizer": {"betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.3, "decay_norms": True, "clip": 0.5},
        "lr": {"peak": 2e-2, "warmup": "3 steps", "cosine": {"to": 1e-3, "over": "7 steps"}},
        "model": {
            "layers": 2,
            "dim": 32,
            "ffn": 40,
            "heads": 4,
            "kv_heads": 2,
            "max_seq_len": 64,
            "norm_eps": 1e-2,
            "rope_theta": 50.0,
            "embedding_std": 0.5,
            "rope_scaling": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, "original": 32},
        },
    },
    "tied": {
        "seed": 12,
        "optimizer": {"betas": [0.7, 0.99], "eps": 1e-5, "weight_decay": 0.5, "decay_embeddings": True, "clip": 100.0},
        "lr": {"peak": 1e-2, "warmup": "2 steps", "wsd": {"to": 1e-4, "decay": "3 steps", "shape": "sqrt"}},
        "model": {
            "layers": 1,
            "dim": 24,
            "ffn": 16,
            "heads": 2,
            "kv_heads": 1,
            "max_seq_len": 64,
            "tied_embeddings": True,
        },
    },
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "last": {"weight_averaging": "last 2"},
    "polyak": {"weight_averaging": "polyak"},
    "ema": {"weight_averaging": "ema 0.7"},
    "rule": {"lr": "linear to 0"},
    "own rate": {"lr": "linear from 8e-3 to 2e-3"},
    "offset": {"data_offset": 1},
    "skips": {},
}
SKIPPED = 2
"""Step that the feature `skips` passes over."""
CHAT = {"kind": "sft", "replay": "25%"}


def chain_recipe(settings: str, features: tuple[str, str], folder: Path) -> Recipe:
    stages = []
    for number, feature in enumerate(features):
        length = f"{STEPS * (number + 1) * STEP} tokens"
        stage = {"name": ("main", "chat")[number], "for": length, "seq_len": SEQ[number], "mix": "base"}
        stages.append({**stage, "batch": f"{(number + 1) * STEP} tokens", **(FEATURES | {"sft": CHAT})[feature]})
    more: dict[str, Any] = {"stages": stages}
    if "sft" in features:
        chats = folder / "chats.jsonl"
        rows = [{"prompt": "q" * (n % 9 + 1), "response": "ab" * (n % 5 + 1)} for n in range(200)]
        chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
        more["conversations"] = [{"uri": str(chats)}]
    return recipe(**{**SETTINGS[settings], **more})


def train_all(paths: list[Path]) -> list[int]:
    return [train(path) for path in paths]


# The second implementation


def initial_weights(model: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Normal weights, each from a generator that only the seed and its name decide."""
    heads, dim, ffn = model["heads"], model["dim"], model["ffn"]
    kv = dim // heads * model["kv_heads"]
    shapes = {"embedding.weight": (VOCAB_SIZE, dim), "norm.weight": (dim,)}
    if not model.get("tied_embeddings"):
        shapes["output.weight"] = (VOCAB_SIZE, dim)
    for number in range(model["layers"]):
        matrices = {"attention.q": (dim, dim), "attention.k": (kv, dim), "attention.v": (kv, dim)}
        matrices |= {"attention.o": (dim, dim), "ffn.gate": (ffn, dim), "ffn.up": (ffn, dim), "ffn.down": (dim, ffn)}
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"layers.{number}.{name}.weight": (dim,) for name in ("attention_norm", "ffn_norm")}
    weights = {}
    for name, shape in shapes.items():
        std = model.get("embedding_std", 0.02) if name.startswith("embedding") else 0.02
        if name.endswith((".o.weight", ".down.weight")):
            std /= math.sqrt(2 * model["layers"])
        key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
        normal = np.random.Generator(np.random.Philox(key=key)).standard_normal(shape) * std
        weights[name] = torch.from_numpy(np.ones(shape) if "norm" in name else normal).requires_grad_()
    return weights


def rotary_frequencies(features: int, theta: float, scaling: Mapping[str, float] | None) -> list[float]:
    """Radians per position of each pair, as Llama 3.1's release states them, by wavelength."""
    plain = [theta ** (-2 * pair / features) for pair in range(features // 2)]
    if scaling is None:
        return plain
    scaled = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < scaling["original"] / scaling["high_freq_factor"]:
            scaled.append(frequency)
        elif wavelength > scaling["original"] / scaling["low_freq_factor"]:
            scaled.append(frequency / scaling["factor"])
        else:
            smooth = scaling["original"] / wavelength - scaling["low_freq_factor"]
            smooth /= scaling["high_freq_factor"] - scaling["low_freq_factor"]
            scaled.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    return scaled


def logits(weights: Mapping[str, Tensor], model: dict[str, Any], batch: TokenBatch) -> Tensor:
    """Return [B, S, V] for tokens that read earlier tokens of their document."""
    heads, groups, eps = model["heads"], model["heads"] // model["kv_heads"], model.get("norm_eps", 1e-5)
    features, length = model["dim"] // heads, batch.tokens_BS.shape[1]
    frequencies = rotary_frequencies(features, model.get("rope_theta", 5e5), model.get("rope_scaling"))
    turns = torch.exp(1j * torch.outer(torch.arange(length).double(), torch.tensor(frequencies, dtype=torch.float64)))
    same = batch.documents_BS[:, :, None] == batch.documents_BS[:, None, :]
    hidden = ~(same & torch.ones(length, length, dtype=torch.bool).tril())

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weights[f"{name}.weight"]

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : features // 2], x[..., features // 2 :]) * turns[:, None]
        return torch.cat([pairs.real, pairs.imag], -1)

    x = weights["embedding.weight"][batch.tokens_BS]
    for number in range(model["layers"]):
        layer = f"layers.{number}"
        normed = norm(x, f"{layer}.attention_norm")
        q, k, v = (
            (normed @ weights[f"{layer}.attention.{name}.weight"].T).unflatten(-1, (-1, features)) for name in "qkv"
        )
        k, v = (tensor.repeat_interleave(groups, 2) for tensor in (rotated(k), v))
        scores = torch.einsum("bqhe,bkhe->bhqk", rotated(q), k) / math.sqrt(features)
        shares = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
        mixed = torch.einsum("bhqk,bkhe->bqhe", shares, v).flatten(2)
        x = x + mixed @ weights[f"{layer}.attention.o.weight"].T
        normed = norm(x, f"{layer}.ffn_norm")
        gate, up = (normed @ weights[f"{layer}.ffn.{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ weights[f"{layer}.ffn.down.weight"].T
    return norm(x, "norm") @ weights.get("output.weight", weights["embedding.weight"]).T


def scheduled_rate(lr: dict[str, Any], step: int, schedule_end: int) -> float:
    """Rate of the run's schedule at the zero-based `step`; all lengths are in steps."""
    warmup, peak = int(lr["warmup"].split()[0]), lr["peak"]
    if step + 1 < warmup:
        return float(peak * (step + 1) / warmup)
    if "cosine" in lr:
        low, over = lr["cosine"]["to"], int(lr["cosine"]["over"].split()[0])
        done = min(1.0, max(0.0, (step - warmup) / (over - warmup)))
        return float(low + (peak - low) * (1 + math.cos(math.pi * done)) / 2)
    low, decay = lr["wsd"]["to"], int(lr["wsd"]["decay"].split()[0])
    done = min(1.0, max(0.0, (step - (schedule_end - decay)) / decay))
    return float(low + (peak - low) * (1 - math.sqrt(done)))


def stage_rates(lr: dict[str, Any], features: tuple[str, str], stage: int) -> Iterator[float]:
    ruled = [feature in ("rule", "own rate") for feature in features]
    schedule_end = STEPS * next((number for number in (2, 1) if not ruled[number - 1]), 2)
    for step in range(STEPS):
        if features[stage] == "rule":
            yield scheduled_rate(lr, stage * STEPS, schedule_end) * (1 - step / STEPS)
        elif features[stage] == "own rate":
            yield 8e-3 + (2e-3 - 8e-3) * step / STEPS
        else:
            yield scheduled_rate(lr, stage * STEPS + step, schedule_end)


def averaged(feature: str, after_steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the model of a stage from its weights after each step."""
    last = after_steps[-1]
    if feature == "ema":
        mean = after_steps[0]
        for weights in after_steps[1:]:
            mean = {name: 0.7 * mean[name] + 0.3 * weights[name] for name in mean}
        return mean
    taken = {"last": [after_steps[1], last], "polyak": after_steps}.get(feature, [last])
    return {name: torch.stack([weights[name] for weights in taken]).mean(0) for name in last}


def check_chain(settings: str, features: tuple[str, str], paths: list[Path]) -> None:
    """Train both stages again and compare each loss, each gradient norm and the model of each stage."""
    given = SETTINGS[settings]
    model, optimizer = given["model"], given["optimizer"]
    weights = initial_weights(model, given["seed"])
    decays = {"norm": optimizer.get("decay_norms", False), "embedding": optimizer.get("decay_embeddings", False)}
    kinds = {name: "norm" if "norm" in name else name.split(".")[0] for name in weights}
    groups = [
        {"params": [weight], "weight_decay": optimizer["weight_decay"] if decays.get(kinds[name], True) else 0.0}
        for name, weight in weights.items()
    ]
    adamw = torch.optim.AdamW(groups, betas=tuple(optimizer["betas"]), eps=optimizer["eps"], foreach=False)
    for stage, (feature, path) in enumerate(zip(features, paths, strict=True)):
        job_file = TrainJob.model_validate_json(path.read_text())
        chain = chain_recipe(settings, features, path.parent)
        span = chain.schedule.span(job_file.stage)
        batches, after_steps = Batches(open_stream(job_file, chain, span)), []
        journal = {record.position: record.metrics for record in records(path)}
        for step, rate in enumerate(stage_rates(given["lr"], features, stage)):
            size = (stage + 1) * STEP
            start = stage * STEPS * STEP + step * size
            if not (feature == "skips" and step == SKIPPED):
                batch = batches.sequences(start, SEQ[stage], 0, size // SEQ[stage])
                scores, counted = logits(weights, model, batch), batch.targets_BS != -100
                log_z = torch.logsumexp(scores, -1)[counted]
                nll = F.cross_entropy(scores[counted], batch.targets_BS[counted], reduction="sum")
                count = int(counted.sum())
                ((nll + given.get("z_loss", 0.0) * (log_z**2).sum()) / count).backward()
                norm = torch.stack(
                    [weight.grad.norm() for weight in weights.values() if weight.grad is not None]
                ).norm()
                numbers = {"train/loss": nll.item() / count, "train/grad_norm": norm.item(), "train/lr": rate}
                logged = {name: journal[start + size][name] for name in numbers}
                assert logged == pytest.approx(numbers, rel=1e-9), (features, stage, step)
                for group in adamw.param_groups:
                    group["lr"] = rate
                    group["params"][0].grad *= min(1.0, optimizer["clip"] / norm.item())
                adamw.step()
                adamw.zero_grad()
            after_steps.append({name: weight.detach().clone() for name, weight in weights.items()})
        result = load_file(work(path) / "result" / "model" / "model.safetensors")
        expected = averaged(feature, after_steps)
        assert result.keys() == expected.keys()
        for name, weight in expected.items():
            bad = (result[name] - weight).abs().max().item() / weight.abs().max().item()
            assert bad < 1e-9, (features, stage, name)


NAMES = list(FEATURES)
IN_TURN = [*zip(NAMES, [*NAMES[3:], *NAMES[:3]], strict=True), ("ema", "sft")]
"""Each feature comes first once and second once."""
OTHERS = [(first, second) for first in NAMES for second in [*NAMES, "sft"] if (first, second) not in IN_TURN]


@pytest.mark.parametrize(
    ("settings", "chains"),
    [
        pytest.param("untied", IN_TURN[::2], id="untied"),
        pytest.param("tied", IN_TURN[1::2], id="tied"),
        pytest.param("untied", [*OTHERS, *IN_TURN[1::2]], id="untied-others", marks=pytest.mark.slow),
        pytest.param("tied", [*OTHERS, *IN_TURN[::2]], id="tied-others", marks=pytest.mark.slow),
    ],
)
def test_two_stages_train_as_a_second_implementation_does(
    settings: str, chains: list[tuple[str, str]], tmp_path: Path
) -> None:
    trained: dict[tuple[str, str], list[Path]] = {}
    for features in chains:
        folder = tmp_path / "-".join(features).replace(" ", "-")
        folder.mkdir()
        chain = chain_recipe(settings, features, folder)
        first = job(folder, chain, name="first")
        state = work(first) / "result" / "state"
        if features[1] == "sft":
            second = chat_job(folder, "second", chain, state)
        else:
            second = job(folder, chain, "chat", "second", parent=state)
        for stage, (feature, path) in enumerate(zip(features, (first, second), strict=True)):
            if feature == "skips":
                number = SKIPPED if not stage else STEPS + 2 * SKIPPED
                pass_over(path, *([number, number + 1] if stage else [number]))
        trained[features] = [first, second]
    paths = [path for pair in trained.values() for path in pair]
    assert run(1, train_all, paths) == [[0] * len(paths)]
    for features, pair in trained.items():
        check_chain(settings, features, pair)
