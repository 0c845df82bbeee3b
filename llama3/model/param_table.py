"""Every parameter tensor of the transformer, in module order: shape, sharding, weight decay and names in exports.

Parameter counts, FLOPs, memory, the planner, tensor parallelism, initial weights, model folders and exports read this
table. A new weight is one row here and one module in `attention` or `transformer`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from herd.llama3.recipe.sections import Model  # and no torch: the planner reads the table


class ParamRow(NamedTuple):
    """A parameter, for models of all sizes. Names are without `layers.N.` and `.weight`."""

    name: str
    sizes: tuple[str, ...]
    """Name of each axis's size in `axis_sizes`."""
    tp_axis: int | None
    """Axis that tensor parallelism shards, in our engine and in Meta's files; None: replicated."""
    hf: str
    meta: str
    gguf: str
    """Name in each format; "": the format has no such weight, and reading or writing it is an error."""
    kind: Literal["matrix", "norm", "embedding"] = "matrix"
    """Group of weight decay."""
    stage: Literal["first", "layer", "last"] = "layer"
    """The pipeline stage that has it: the first, that of its layer, or the last."""
    rotary: bool = False
    """Whether its rows are rotary pairs, which Meta's files and GGUF interleave."""
    residual: bool = False
    """Whether it writes to the residual stream; its initial values are smaller."""
    present: Callable[[Model], bool] = lambda config: True
    """Whether a model has it."""

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape in a model with the `axis_sizes` `sizes`."""
        return tuple([sizes[size] for size in self.sizes])


def _is_untied(config: Model) -> bool:
    return not config.tied_embeddings


PARAMS = (
    ParamRow(
        "embedding", ("vocab", "dim"), 0, "model.embed_tokens", "tok_embeddings", "token_embd", "embedding", "first"
    ),
    ParamRow("attention_norm", ("dim",), None, "input_layernorm", "attention_norm", "attn_norm", "norm"),
    ParamRow("attention.q", ("q_dim", "dim"), 0, "self_attn.q_proj", "attention.wq", "attn_q", rotary=True),
    ParamRow("attention.k", ("kv_dim", "dim"), 0, "self_attn.k_proj", "attention.wk", "attn_k", rotary=True),
    ParamRow("attention.v", ("kv_dim", "dim"), 0, "self_attn.v_proj", "attention.wv", "attn_v"),
    ParamRow("attention.o", ("dim", "q_dim"), 1, "self_attn.o_proj", "attention.wo", "attn_output", residual=True),
    ParamRow("ffn_norm", ("dim",), None, "post_attention_layernorm", "ffn_norm", "ffn_norm", "norm"),
    ParamRow("ffn.gate", ("ffn", "dim"), 0, "mlp.gate_proj", "feed_forward.w1", "ffn_gate"),
    ParamRow("ffn.up", ("ffn", "dim"), 0, "mlp.up_proj", "feed_forward.w3", "ffn_up"),
    ParamRow("ffn.down", ("dim", "ffn"), 1, "mlp.down_proj", "feed_forward.w2", "ffn_down", residual=True),
    ParamRow("norm", ("dim",), None, "model.norm", "norm", "output_norm", "norm", "last"),
    ParamRow("output", ("vocab", "dim"), 0, "lm_head", "output", "output", stage="last", present=_is_untied),
)
BY_NAME = {row.name: row for row in PARAMS}


class Param(NamedTuple):
    """One parameter tensor of a model."""

    row: ParamRow
    layer: int | None
    shape: tuple[int, ...]
    name: str

    @property
    def hf(self) -> str:
        """Full name in Hugging Face's format. Raises ValueError if it has none."""
        return self._full_name("hf", "model.layers.")

    @property
    def meta(self) -> str:
        """Full name in Meta's format. Raises ValueError if it has none."""
        return self._full_name("meta", "layers.")

    @property
    def gguf(self) -> str:
        """Full name in GGUF. Raises ValueError if it has none."""
        return self._full_name("gguf", "blk.")

    def _full_name(self, form: str, layers: str) -> str:
        name = getattr(self.row, form)
        if not name:
            raise ValueError(f"{self.name}: has no name in format {form}; add it to its row of PARAMS")
        return f"{name}.weight" if self.layer is None else f"{layers}{self.layer}.{name}.weight"

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape on each of `tp` tensor-parallel ranks."""
        return tuple(size // tp if axis == self.row.tp_axis else size for axis, size in enumerate(self.shape))


def axis_sizes(config: Model, vocab_size: int) -> dict[str, int]:
    """Return the size of every axis by name."""
    return {"vocab": vocab_size, "dim": config.dim, "q_dim": config.dim, "kv_dim": config.kv_dim, "ffn": config.ffn}


@lru_cache(maxsize=256)  # a layout search reads one layer and the ends thousands of times
def param_table(
    config: Model, vocab_size: int, layers: range | None = None, first: bool = True, last: bool = True
) -> tuple[Param, ...]:
    """Return the parameters that `Transformer` has with the same arguments: those of a model, or of a stage."""
    sizes = axis_sizes(config, vocab_size)

    def param(row: ParamRow, layer: int | None = None) -> Param:
        name = f"{row.name}.weight" if layer is None else f"layers.{layer}.{row.name}.weight"
        return Param(row, layer, row.shape(sizes), name)

    present = [row for row in PARAMS if row.present(config)]
    return (
        *(param(row) for row in present if row.stage == "first" and first),
        *(
            param(row, layer)
            for layer in (range(config.layers) if layers is None else layers)
            for row in present
            if row.stage == "layer"
        ),
        *(param(row) for row in present if row.stage == "last" and last),
    )


def layer_params(config: Model) -> tuple[Param, ...]:
    """Return the parameters of one layer; all layers have the same shapes."""
    return param_table(config, 0, range(1), first=False, last=False)


def param_row(name: str) -> ParamRow:
    """Return the row of a parameter by its name in the module, e.g. `layers.3.ffn.up.weight`."""
    return BY_NAME[re.sub(r"^layers\.\d+\.|\.weight$", "", name)]
