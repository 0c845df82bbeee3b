"""How a model is split over processes, and which sizes must divide which. No torch: the planner uses it.

Every layout gives the loss of one process. World size is tp x cp x pp x dp; dp follows from the other three. The order
is Llama 3's, [TP, CP, PP, DP] from the innermost (section 3.3.2): neighbors in rank communicate most.
"""

from __future__ import annotations

from math import gcd
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from herd.llama3.parallel.pipeline_schedule import check_split
from herd.llama3.recipe.sections import Model

FIELD = "cluster.layout"
AXES = ("dp", "pp", "cp", "tp")
"""Mesh axes, outermost first."""
LLAMA3_VOCAB_SIZE = 128_256
"""128,000 and 256 special tokens."""
Backend = Literal["auto", "nccl", "gloo", "ncclx"]
"""Library of collectives (`herd.llama3.parallel.mesh.resolve_backend`)."""


class Layout(BaseModel):
    """Degrees of parallelism and the memory and speed choices that go with them."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    tp: int = Field(default=1, ge=1)
    """Tensor parallel: processes that share each matrix; sequence and loss parallel with it."""
    cp: int = Field(default=1, ge=1)
    """Context parallel: processes that share each sequence."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallel: processes that share the layers."""
    dp_replicate: int = Field(default=1, ge=1)
    """Copies of the sharded state (HSDP): FSDP shards over dp / dp_replicate processes."""
    zero: Literal[2, 3] = 2
    """2: weights stay gathered from forward to backward; 3: gathered again, and gradients reduced after each
    micro-batch, less memory."""
    vpp: int = Field(default=1, ge=1)
    """Pipeline stages per process (V); more of them shrink the bubble and send more."""
    microbatch_group_size: int = Field(default=0, ge=0)
    """Micro-batches that a stage runs in a row (N of section 3.3.2); 0: as many as pp."""
    schedule: Literal["interleaved", "1f1b", "zero-bubble"] = "interleaved"
    """Order of pipeline actions."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, those of the feed-forward half of each layer, or all."""
    compile: bool = False
    """Compile each block: minutes at the start; on GPUs a tenth faster, by arithmetic. A 70B on tp 8 needs it, because
    its host launches for 0.7 to 0.9 of the GPU's time (compiled: 0.2 to 0.6)."""
    async_tp: bool = False
    """Overlap tensor-parallel communication with matrix products (GPUs with NVLink, needs compile)."""

    flash: Literal["auto", 2, 3] = "auto"
    """FlashAttention of packed documents; auto: 3 on Hopper if flash-attn-3 is installed and the run is not
    deterministic, else 2."""

    @property
    def model_parallel(self) -> int:
        """Processes that compute one copy of the model: tp x cp x pp."""
        return self.tp * self.cp * self.pp

    @property
    def stages(self) -> int:
        """Pipeline stages over all processes."""
        return self.pp * self.vpp

    def reduces_each(self, exact: bool) -> bool:
        """Return whether gradients are reduced after each micro-batch, so that no process holds whole ones.

        Not with `exact` sums, which a shard in the type of the weights would round, and not in a pipeline, whose
        schedule reduces after the last action of a stage.
        """
        return self.zero == 3 and self.pp == 1 and not exact

    def dp(self, world: int) -> int:
        """Return the data-parallel size of `world` processes. Raises ValueError if they do not divide."""
        if world % self.model_parallel:
            whole = max(1, round(world / self.model_parallel)) * self.model_parallel
            raise ValueError(
                f"{FIELD}: tp {self.tp} x cp {self.cp} x pp {self.pp} = {self.model_parallel} does not divide "
                f"{world} processes; start {whole}"
            )
        return world // self.model_parallel

    def text(self, world: int) -> str:
        """Return the layout of `world` processes as text, without defaults: `tp 2 dp 4 recompute full`."""
        degrees = [f"{axis} {size}" for axis, size in (("tp", self.tp), ("cp", self.cp), ("pp", self.pp)) if size > 1]
        settings = self.model_dump(exclude={"tp", "cp", "pp"}, exclude_defaults=True)
        return " ".join([*degrees, f"dp {self.dp(world)}", *(f"{name} {value}" for name, value in settings.items())])

    def check(self, config: Model, vocab_size: int, world: int) -> None:
        """Raise ValueError, one line per fault, if a model of shape `config` cannot be split this way."""
        if self.schedule == "zero-bubble":
            check_split(self.zero, self.recompute, self.compile)
        faults = []
        counts = {"heads": config.heads, "kv_heads": config.kv_heads, "ffn": config.ffn, "vocab_size": vocab_size}
        if odd := [f"{name} {count}" for name, count in counts.items() if count % self.tp]:
            common = gcd(*counts.values())
            divisors = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
            faults.append(f"tp: {self.tp} does not divide {', '.join(odd)}; use one of {divisors}")
        if self.async_tp and not (self.compile and self.tp > 1):
            faults.append(f"async_tp: needs compile: true and tp above 1, which is {self.tp}; leave it out")
        if self.pp == 1 and self.vpp > 1:
            faults.append(f"vpp: {self.vpp} stages per process need pp above 1; leave it out")
        if self.pp > 1 and config.tied_embeddings:
            faults.append(
                f"pp: {self.pp} separates a tied embedding from its output; use tp, or set model.tied_embeddings: false"
            )
        if self.pp > 1 and self.stages > config.layers + 2:  # the ends count as a layer each
            faults.append(f"pp: {self.pp} x vpp {self.vpp} stages are too many for {config.layers} layers")
        if self.schedule == "1f1b" and self.vpp > 1:
            faults.append(f"schedule: 1f1b has one stage per process, vpp is {self.vpp}; write interleaved")
        dp = self.dp(world)
        if dp % self.dp_replicate:
            faults.append(f"dp_replicate: {self.dp_replicate} does not divide the data-parallel size {dp}")
        if faults:
            raise ValueError("\n".join(f"{FIELD}.{fault}" for fault in faults))

    @property
    def pieces(self) -> int:
        """Number of pieces into which tensor and context parallelism split a sequence."""
        return (2 * self.cp if self.cp > 1 else 1) * self.tp

    def check_sequence(self, seq_len: int) -> None:
        """Raise ValueError if sequences of `seq_len` tokens cannot be split this way."""
        pieces = self.pieces
        if seq_len % pieces:
            raise ValueError(
                f"{FIELD}: sequence {seq_len} does not split into {pieces} pieces (twice cp {self.cp}, if above 1, "
                f"times tp {self.tp}); use sequences that are a multiple of {pieces}"
            )


class Published(NamedTuple):
    """A row of Table 4 (arXiv 2407.21783): how the 405B was trained."""

    world: int
    layout: Layout
    seq_len: int
    sequences: int
    """Per data-parallel rank and step."""
    tflops: float
    """BF16, per GPU, as published."""


TABLE_4 = (
    Published(8_192, Layout(tp=8, pp=16), 8_192, 32, 430),
    Published(16_384, Layout(tp=8, pp=16), 8_192, 16, 400),
    Published(16_384, Layout(tp=8, cp=16, pp=16), 131_072, 16, 380),
)
"""TP 8, CP 1 or 16, PP 16; data parallelism follows: 64, 128, 8."""
