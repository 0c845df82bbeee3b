"""Records of the messages that a rank sends in a step, for the planner. No torch; readable as JSON.

`herd.llama3.parallel.comm_trace` fills them from the engine; pipeline transfers are computed here. Bytes are those of
whole tensors: a ring moves (n - 1) / n of them per process in a gather or a reduce-scatter, twice that in an
all-reduce.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load
from herd.llama3.recipe.sections import Model

NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp8": "bfloat16"}
"""torch name of the residual stream's type."""


@dataclass(frozen=True)
class Collective:
    """A kind of message of a process, and its count."""

    kind: str
    """all-gather, reduce-scatter, all-reduce; send (which as many receives answer) between pipeline stages."""
    axis: str
    """tp, cp, fsdp (dp and cp together), replica or pp."""
    phase: str
    """forward or backward."""
    when: str
    """each micro-batch, or once a step: at its first or its last micro-batch."""
    region: str
    """layer: in the stage's layers, equally often in each; ends: embedding, last norm, output and loss."""
    bytes: int
    """Of the whole tensor: what a gather returns, a reduction takes in. A ring moves (n - 1) / n of it per process."""
    dtype: str
    group_size: int
    count: float
    """In the stage, for one `when`; a fraction only in `StageTrace.per_layer`."""


@dataclass(frozen=True)
class StageTrace:
    """One pipeline stage of a rank."""

    stage: int
    layers: int
    collectives: list[Collective]

    def per_layer(self) -> list[Collective]:
        """Return the collectives of one layer: equal in each, except for an unneeded gather of FSDP.

        In the last backward pass of a stage without ends, it gathers the last layer for the micro-batch before (torch
        2.13): 1 / layers in this list.
        """
        layer = [collective for collective in self.collectives if collective.region == "layer"]
        return [replace(collective, count=collective.count / self.layers) for collective in layer]


@dataclass(frozen=True)
class RankTrace:
    """All messages of a rank in a step; `as_json` is for the planner."""

    rank: int
    world: int
    stages: list[StageTrace]

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankTrace:
        data = json.loads(text)
        stages = [
            StageTrace(stage["stage"], stage["layers"], [Collective(**fields) for fields in stage["collectives"]])
            for stage in data["stages"]
        ]
        return cls(data["rank"], data["world"], stages)


def transfers(number: int, config: Model, layout: Layout, load: Load) -> list[Collective]:
    """Return the messages of stage `number` to its neighbors per micro-batch: [B, S, D] of this process's tokens."""
    if layout.pp == 1:
        return []
    size = load.micro_batch * load.seq_len // (layout.cp * layout.tp) * config.dim * load.narrow
    ways = [("forward", number < layout.stages - 1), ("backward", number > 0)]
    dtype = NAMES[load.precision]
    return [Collective("send", "pp", phase, "each", "ends", size, dtype, 2, 1) for phase, has_peer in ways if has_peer]
