"""How one model is cut over processes, and what must divide what. Pure Python: the planner uses it without torch.

A layout is where a run works, never what it makes: every layout gives the loss of one process. World size is
tp x cp x pp x dp, and dp is what the other three leave. The order is Llama 3's, [TP, CP, PP, DP] from the innermost
(section 3.3.2): neighbours in rank talk most. Every refusal names the field, the numbers and what to write instead.
"""

from __future__ import annotations

from math import gcd
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from llama3.parallel.pipeline_schedule import check_split
from llama3.recipe.sections import Model

FIELD = "cluster.layout"
AXES = ("dp", "pp", "cp", "tp")
"""Mesh axes, outermost first."""


class Layout(BaseModel):
    """Degrees of parallelism and the memory and speed choices that go with them."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    tp: int = Field(default=1, ge=1)
    """Tensor parallel: processes that share each matrix; sequence and loss parallel with it."""
    cp: int = Field(default=1, ge=1)
    """Context parallel: processes that share each sequence."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallel: processes that share the layers."""
    replicas: int = Field(default=1, ge=1)
    """Copies of the sharded state (HSDP): shards stay inside dp / replicas processes."""
    zero: Literal[2, 3] = 2
    """2: weights stay gathered from forward to backward; 3: gathered again, less memory."""
    virtual: int = Field(default=1, ge=1)
    """Pipeline stages per process (V); more of them shrink the bubble and send more."""
    contiguous: int = Field(default=0, ge=0)
    """Micro-batches that a stage runs in a row (N of section 3.3.2); 0: as many as pp."""
    schedule: Literal["interleaved", "1f1b", "zero-bubble"] = "interleaved"
    """Order of pipeline work."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, those of the feed-forward half of each layer, or all."""
    compile: bool = False
    """Compile each block (minutes at the start; a tenth faster on GPUs)."""
    async_tp: bool = False
    """Overlap tensor-parallel exchange with matrix products (GPUs with NVLink, needs compile)."""

    @property
    def model_parallel(self) -> int:
        """Processes that hold one copy of the model's arithmetic: tp x cp x pp."""
        return self.tp * self.cp * self.pp

    @property
    def stages(self) -> int:
        """Pipeline stages over all processes."""
        return self.pp * self.virtual

    def dp(self, world: int) -> int:
        """Return the data-parallel size of `world` processes. Raises ValueError if they do not divide."""
        if world % self.model_parallel:
            whole = max(1, round(world / self.model_parallel)) * self.model_parallel
            raise ValueError(
                f"{FIELD}: tp {self.tp} x cp {self.cp} x pp {self.pp} = {self.model_parallel} does not divide "
                f"{world} processes; start {whole}"
            )
        return world // self.model_parallel

    def check(self, spec: Model, rows: int, world: int) -> None:
        """Raise ValueError, one line per fault, if a model of shape `spec` cannot be cut this way."""
        if self.schedule == "zero-bubble":
            check_split(self.zero, self.recompute, self.compile)
        faults = [*self._tensor_faults(spec, rows), *self._pipeline_faults(spec), *self._data_faults(world)]
        if faults:
            raise ValueError("\n".join(f"{FIELD}.{fault}" for fault in faults))

    @property
    def pieces(self) -> int:
        """Parts into which tensor and context parallelism cut a sequence."""
        return (2 * self.cp if self.cp > 1 else 1) * self.tp

    def check_sequence(self, seq: int) -> None:
        """Raise ValueError if sequences of `seq` tokens cannot be cut this way."""
        pieces = self.pieces
        if seq % pieces:
            raise ValueError(
                f"{FIELD}: sequence {seq} does not split into {pieces} parts (twice cp {self.cp}, if above 1, times "
                f"tp {self.tp}); use sequences that are a multiple of {pieces}"
            )

    def _tensor_faults(self, spec: Model, rows: int) -> list[str]:
        counts = {"heads": spec.heads, "kv_heads": spec.kv_heads, "ffn": spec.ffn, "embedding rows": rows}
        odd = [f"{name} {count}" for name, count in counts.items() if count % self.tp]
        common = gcd(*counts.values())
        able = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
        faults = [f"tp: {self.tp} does not divide {', '.join(odd)}; of all of them {able} do"] if odd else []
        if self.async_tp and not (self.compile and self.tp > 1):
            faults.append(f"async_tp: needs compile: true and tp above 1, which is {self.tp}; leave it out")
        return faults

    def _pipeline_faults(self, spec: Model) -> list[str]:
        faults = []
        if self.pp == 1 and self.virtual > 1:
            faults.append(f"virtual: {self.virtual} stages per process need pp above 1; leave it out")
        if self.pp > 1 and spec.tied_embeddings:
            faults.append(f"pp: {self.pp} parts a tied embedding from its output; set model.tied_embeddings: false")
        if self.pp > 1 and self.stages > spec.layers + 2:  # the ends count as a layer each
            faults.append(f"pp: {self.pp} x virtual {self.virtual} stages are too many for {spec.layers} layers")
        if self.schedule == "1f1b" and self.virtual > 1:
            faults.append(f"schedule: 1f1b has one stage per process, virtual is {self.virtual}; write interleaved")
        return faults

    def _data_faults(self, world: int) -> list[str]:
        dp = self.dp(world)
        if dp % self.replicas:
            return [f"replicas: {self.replicas} does not divide the data-parallel size {dp}"]
        return []
