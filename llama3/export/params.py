"""Meta's `params.json`: the shape of a model, in numbers that differ from ours in two places.

The hidden size of the feed-forward block is not there but the rule that gives it: int(8 dim / 3), times
`ffn_dim_multiplier`, rounded up to `multiple_of`. The rotary scaling is a switch, `use_scaled_rope`, whose numbers are
built into Meta's code: (factor 8, 1, 4, 8192). Meta's 3.2 models, the only ones with tied embeddings, were trained with
factor 32, which their files do not say (llama-models, issues 166 and 241); we take that for tied models, and write the
factor as `rope_scaling_factor`, a key that Meta's readers of scaled models pass over. What this gives up: a model with
other scaling numbers cannot be written in this form.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llama3.recipe.schema import Model, RopeScaling

PARAMS = "params.json"
MULTIPLES = (4096, 1024, 256, 64, 16, 4, 1)
"""Choices of `multiple_of`; Meta's are 4096 (70B, 405B), 1024 (8B) and 256."""
FACTOR, TIED_FACTOR = 8.0, 32.0
SEQ, SCALED_SEQ = 8192, 131_072
KNOWN = {
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "vocab_size",
    "ffn_dim_multiplier",
    "multiple_of",
    "norm_eps",
    "rope_theta",
    "use_scaled_rope",
    "rope_scaling_factor",
    "max_batch_size",
    "max_seq_len",
}


def hidden_size(dim: int, multiplier: float | None, multiple_of: int) -> int:
    """Return the hidden size of the feed-forward block by Meta's rule."""
    base = int(8 * dim / 3)
    scaled = base if multiplier is None else int(multiplier * base)
    return multiple_of * math.ceil(scaled / multiple_of)


def multiplier_for(dim: int, ffn: int) -> tuple[float, int]:
    """Return the `ffn_dim_multiplier` of fewest decimals, and the `multiple_of`, that give the hidden size `ffn`.

    The published shapes get the published numbers: 1.3 and 1024 for 8B, 1.3 and 4096 for 70B, 1.2 and 4096 for 405B.
    """
    multiple_of = next(multiple for multiple in MULTIPLES if ffn % multiple == 0)
    base = int(8 * dim / 3)
    for decimals in range(1, 18):
        for target in (ffn, ffn + 1 - multiple_of / 2):  # the edge, and the middle, of what rounds up to ffn
            multiplier = round(target / base, decimals)
            if hidden_size(dim, multiplier, multiple_of) == ffn:
                return multiplier, multiple_of
    raise AssertionError(f"no multiplier gives {ffn} from {dim}")


def meta_settings(spec: Model, rows: int) -> dict[str, Any]:
    """Return `params.json` for a model. Raises ValueError if its rotary scaling cannot be written there."""
    multiplier, multiple_of = multiplier_for(spec.dim, spec.ffn)
    settings: dict[str, Any] = {
        "dim": spec.dim,
        "n_layers": spec.layers,
        "n_heads": spec.heads,
        "n_kv_heads": spec.kv_heads,
        "vocab_size": rows,
        "ffn_dim_multiplier": multiplier,
        "multiple_of": multiple_of,
        "norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "use_scaled_rope": spec.rope_scaling is not None,
    }
    if spec.rope_scaling is not None:
        built_in = RopeScaling(factor=spec.rope_scaling.factor)
        if spec.rope_scaling != built_in:
            raise ValueError(
                f"model.rope_scaling is {spec.rope_scaling.model_dump()}, but Meta's format has "
                f"{built_in.model_dump()} built in; export the model as hf"
            )
        settings["rope_scaling_factor"] = spec.rope_scaling.factor
    return settings


def read_params(path: Path, tied: bool) -> tuple[Model, int]:
    """Return shape and embedding rows from `params.json`; `tied` says whether the output is the embedding.

    Raises ValueError, naming key and value, unless it is a Llama 3 text model.
    """
    try:
        params: dict[str, Any] = json.loads(path.read_text())
        other = sorted(params.keys() - KNOWN)
        if other or params["vocab_size"] < 1:
            key = other[0] if other else "vocab_size"
            raise ValueError(
                f"{path}: {key} is {params[key]!r}, which no Llama 3 text model has; name a folder with one"
            )
        return _spec(params, tied), int(params["vocab_size"])
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError, ValidationError) as error:
        raise ValueError(f"{path}: does not describe a Llama 3 ({error!r}); name a folder with one") from error


def _spec(params: dict[str, Any], tied: bool) -> Model:
    scaled = bool(params.get("use_scaled_rope", False))
    factor = params.get("rope_scaling_factor") or (TIED_FACTOR if tied else FACTOR)
    return Model(
        layers=params["n_layers"],
        dim=params["dim"],
        ffn=hidden_size(params["dim"], params.get("ffn_dim_multiplier"), params.get("multiple_of", 256)),
        heads=params["n_heads"],
        kv_heads=params.get("n_kv_heads") or params["n_heads"],
        max_seq=SCALED_SEQ if scaled else SEQ,
        tied_embeddings=tied,
        rope_theta=params["rope_theta"],
        rope_scaling=RopeScaling(factor=factor) if scaled else None,
        norm_eps=params.get("norm_eps", 1e-5),
    )
