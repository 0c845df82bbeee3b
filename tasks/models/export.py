"""Write a model as others read it, with its card; the folder appears whole or not at all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from llama3.export.card import write_card
from llama3.export.convert import Number, building, convert
from storage.root import Root
from tasks.models.lookup import model_folder
from tasks.models.serving import MODEL, _answer, write_served
from tasks.report.card import card_of

if __name__ == "__main__":
    _answer(sys.argv[1], Path(sys.argv[2]))


Form = Literal["hf", "meta", "meta-safetensors", "gguf", "mlflow"]


def export_model(
    root: Root, name: str, target: Path, form: Form = "hf", dtype: Number = "bf16", parts: int = 1, licence: str = ""
) -> None:
    """Write the model called `name` (a run, FAMILY@ALIAS or a model folder) as the new folder `target`.

    `parts` are Meta's model-parallel ranks, `licence` what the card says of the weights. Raises ValueError, with what
    to do, if there is no such model, it does not go into that form, or `target` exists or is no place on this machine.
    """
    if "://" in str(target) or ":/" in str(target):
        raise ValueError(f"{target}: is no folder of this machine; export to one, then copy it there (aws s3 cp)")
    model = model_folder(root, name)

    def add(folder: Path) -> None:
        write_card(folder, card_of(root, name, model, folder, form, dtype, licence))

    if form != "mlflow":
        convert(model, "herd", target, form, dtype, parts=parts, add=add)
        return
    with building(target) as folder:
        write_served(folder)
        convert(model, "herd", folder / MODEL, "herd", dtype, parts=parts)
        add(folder)
