"""One run of `python -m benchmarks train`: what the user chose, the sizes, and rounds of steps, each taken once.

Sizes: `full` is what the committed table has, some 40 minutes of one core; `small` leaves out the larger model and
takes fewer rounds; `tiny` measures nothing worth reading and shows in a minute that every row can be measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from benchmarks.measure import NotMeasured
from benchmarks.train_rounds import Rounds, Side, take_rounds
from benchmarks.train_side import TARGETS, TOKENS
from herd.llama3.model.transformer import build_model
from herd.llama3.recipe.sections import Model
from herd.llama3.train.state import fast_fp32

SizeName = Literal["tiny", "small", "full"]
PEERS = ("torchtitan", "transformers", "litgpt")


@dataclass(frozen=True)
class TrainSize:
    """How large what is measured is."""

    rounds: int
    models: Mapping[str, tuple[int, int, int, int]]
    """Layers, dim, heads, key/value heads; FFN 3.5 x dim."""
    vocab_size: int
    batch: tuple[int, int]
    """Sequences, tokens of each."""
    vocabulary: tuple[int, int, int]
    """Of the loss rows: vocabulary, tokens, dim."""
    state: int
    """Width of the 8 layers that are saved and loaded."""
    steps: int
    """Of the training run of the loader row."""


SIZES: dict[SizeName, TrainSize] = {
    "tiny": TrainSize(3, {"d384": (2, 32, 4, 2)}, 64, (2, 16), (512, 300, 16), 32, 6),
    "small": TrainSize(7, {"d384": (6, 384, 6, 2)}, 8192, (4, 512), (128_256, 2048, 256), 384, 12),
    "full": TrainSize(
        11, {"d384": (6, 384, 6, 2), "d512": (8, 512, 8, 4)}, 8192, (4, 512), (128_256, 2048, 256), 768, 30
    ),
}


@dataclass(frozen=True)
class TrainSettings:
    """What the user of `python -m benchmarks train` chooses."""

    folder: Path
    """Where weights, runs and logs lie; empty at first."""
    size: SizeName = "small"
    only: tuple[str, ...] = ()
    """Names of rows or of their groups; empty: all."""
    peers: str = sys.executable
    """Python interpreter that has the peers."""
    restart: Callable[[Path, int, Path, bool], float] | None = None
    """Job file, ranks, folder for logs, whether under torchrun -> seconds from the kill of a rank to the next step.

    Given from outside: launchers are not llama3's.
    """


@dataclass
class TrainSession:
    """Measures for the rows of one run."""

    settings: TrainSettings
    versions: dict[str, str] = field(default_factory=dict)
    """Of the peers that took a step."""
    _rounds: dict[str, Rounds] = field(default_factory=dict)

    @property
    def size(self) -> TrainSize:
        return SIZES[self.settings.size]

    @cached_property
    def products(self) -> str:
        """How torch multiplies fp32 on this processor when the trainer has chosen."""
        before = torch.get_float32_matmul_precision()
        fast_fp32()
        chosen = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(before)
        return chosen

    def model(self, name: str) -> Model:
        """Return the shape called `name`. Raises NotMeasured if this size leaves it out."""
        if name not in self.size.models:
            raise NotMeasured("needs --size full")
        layers, dim, heads, kv_heads = self.size.models[name]
        return Model(layers=layers, dim=dim, ffn=dim * 7 // 2, heads=heads, kv_heads=kv_heads, max_seq_len=2048)

    def steps(self, name: str, bf16: bool) -> Rounds:
        """Return rounds of herd's step and the peers' on the model `name`, in fp32 or with products in bf16."""
        peers = {peer: Side(f"peers.train_{peer}", self.settings.peers, bf16, self.products) for peer in PEERS}
        return self.rounds(
            name, f"{name}-{bf16}", {"ours": Side("train_ours", bf16=bf16, products=self.products), **peers}
        )

    def losses(self) -> Rounds:
        """Return rounds of the loss of a large vocabulary, plain and herd's."""
        vocab_size, tokens, dim = self.size.vocabulary
        shape = {"vocab_size": vocab_size, "tokens": tokens, "dim": dim}
        sides = {
            name: Side("train_loss", products=self.products, shape={**shape, "plain": name == "plain"})
            for name in ("plain", "ours")
        }
        return self.rounds("d384", "loss", sides)

    def rounds(self, model: str, name: str, sides: Mapping[str, Side]) -> Rounds:
        """Return rounds of `sides` on the model called `model`, taken once under `name`."""
        if name not in self._rounds:
            config = self.model(model)
            shape: dict[str, Any] = {
                **config.model_dump(exclude={"preset", "rope_scaling", "tied_embeddings"}),
                "vocab_size": self.size.vocab_size,
                "seq_len": self.size.batch[1],
            }
            taken = take_rounds(sides, self._weights(config, self.settings.folder / name), shape, self.size.rounds)
            self.versions |= {side: taken.versions[side] for side in PEERS if side in taken.versions}
            self._rounds[name] = taken
        return self._rounds[name]

    def _weights(self, config: Model, folder: Path) -> Path:
        """Write initial weights and a batch of chance into `folder`; return the file."""
        folder.mkdir()
        sequences, length = self.size.batch
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(0, self.size.vocab_size, (sequences, length + 1), generator=generator)
        weights = build_model(config, self.size.vocab_size, 0, torch.float32, torch.device("cpu")).state_dict()
        # Copies: of one sequence both are contiguous, and would share memory.
        batch = {TOKENS: text[:, :-1].clone(), TARGETS: text[:, 1:].clone()}
        save_file({**weights, **batch}, folder / "weights.safetensors")
        return folder / "weights.safetensors"
