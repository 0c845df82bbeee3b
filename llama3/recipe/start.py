"""Where a run's weights come from, if it does not draw them: from elsewhere, or from a stage of another run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from llama3.recipe.section import Name, Section


class Start(Section):
    """What training goes on from.

    Weights (`hf`, `meta`, `herd`) get a fresh optimizer and the recipe's own warm-up, and positions count from 0. What
    they knew is forgotten without *replay*: keep text like their first training's in the mix; half of the tokens kept
    nearly all of it in e-Llama (arXiv 2501.09706). A `checkpoint` brings its optimizer and its position too: it stands
    for the stages of this recipe up to `after`, which are not trained, and training goes on as if they had been. Their
    mixes and lengths still say which tokens of the stream come next.
    """

    origin: str = Field(alias="from", min_length=1)
    """Folder or URI of the weights, or a checkpoint under the root by its label (`checkpoint/quickstart-main-1a2b3c4d`)
    or as run and stage (`quickstart-7/main`); its shape must be that of `model`."""
    format: Literal["hf", "meta", "herd", "checkpoint"] = "hf"
    """`hf`: safetensors and config.json; `meta`: consolidated.*.pth and params.json; `herd`: a model folder of ours;
    `checkpoint`: the state at the end of a stage."""
    after: Name | None = Field(default=None, exclude_if=lambda after: after is None)
    """`checkpoint` only: the stage of this recipe that ends where the checkpoint does."""

    model_config = ConfigDict(populate_by_name=True)

    @property
    def is_checkpoint(self) -> bool:
        return self.format == "checkpoint"

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if self.is_checkpoint and self.after is None:
            raise ValueError(
                f"after is missing: write the stage of this recipe that ends where {self.origin} does, such as "
                "after: main; it and those before it are not trained"
            )
        if self.after is not None and not self.is_checkpoint:
            raise ValueError(f"after: {self.after!r}: only a checkpoint has a position; write format: checkpoint")
        return self
