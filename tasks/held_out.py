"""The held-out documents of a curated artifact, without bringing all of it to this machine.

Scoring reads the first few documents by id, which stand in the first files of each domain; of an artifact in an object
store only these files are brought.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from llama3.evaluate.held_out import Document, held_out, looked_at
from llama3.recipe.schema import Recipe
from llama3.recipe.section import DOMAINS
from storage.artifact import Artifact

BYTES_PER_TOKEN = 8
"""More than any text has; a document is cut to a row of tokens later."""


def held_out_folder(curated: Artifact, count: int) -> Path:
    """Return the folder of `curated`; it has the files in which the first `count` documents of each domain stand."""
    for domain in DOMAINS:
        wanted, found = looked_at(domain, count), 0
        for name in sorted(name for name in curated.manifest.files if name.startswith(f"documents/{domain}-")):
            if found >= wanted:
                break
            splits = pq.read_table(curated.part(name), columns=["split"])["split"].to_pylist()
            found += splits.count("held_out")
    return curated.folder


def write_held_out(recipe: Recipe, curated: Path, tokenizer: Path, work: Path) -> bool:
    """Write what the trainer scores between steps into its folder; return False if there is nothing to score.

    `curated` is the folder with the documents (see `held_out_folder`).
    """
    from llama3.tokens.tokenizer import Tokenizer
    from llama3.train.held_out_rows import pack

    count, seq = recipe.evaluate.every_documents, min(min(stage.lengths) for stage in recipe.stages)
    try:
        documents: list[Document] = held_out(curated, count, BYTES_PER_TOKEN * seq)
    except ValueError:  # curate.held_out: 0; the evaluation says so
        return False
    work.mkdir(parents=True, exist_ok=True)
    pack(documents, Tokenizer.load(tokenizer), seq).write(work)
    return True
