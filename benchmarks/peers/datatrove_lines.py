"""datatrove's repeated-sentence removal with spans of one line (`split_sentences` off): three stages.

The same unit as our rule's. It keeps the first copy of a repeated line where the paper's rule removes all, so only the
cost is compared. Its follow-up filters, which drop documents that became short, are off: another rule, and expensive.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datatrove.pipeline.dedup import SentenceDedupFilter, SentenceDedupSignature, SentenceFindDedups
from datatrove.pipeline.dedup.sentence_dedup import SentDedupConfig
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig

from benchmarks.peers.steps import reader, run_steps


def work(source: Path, folder: Path) -> dict[str, Any]:
    """Write the documents without repeated lines as jsonl; return how many there are."""
    return remove_repeated(source, folder, sentences=False)


def remove_repeated(source: Path, folder: Path, sentences: bool) -> dict[str, Any]:
    """Run the three stages, on sentences with datatrove's defaults, or on lines."""
    config = SentDedupConfig(
        n_sentences=1,
        split_sentences=sentences,
        only_dedup_in_index=False,
        min_doc_words=50 if sentences else 0,
        min_num_sentences=3 if sentences else 0,
        hash_config=HashConfig(hash_fc="xxhash", precision=64),
    )
    signatures, found, kept = (str(folder / name) for name in ("signatures", "found", "kept"))
    run_steps([reader(source), SentenceDedupSignature(signatures, config=config)], folder, "signatures")
    run_steps([SentenceFindDedups(signatures, found, config=config)], folder, "find")
    steps = [reader(source), SentenceDedupFilter(found, config=config), JsonlWriter(kept, compression=None)]
    run_steps(steps, folder, "filter")
    with (Path(kept) / "00000.jsonl").open("rb") as lines:
        return {"kept": sum(1 for _ in lines)}
