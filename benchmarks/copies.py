"""Rows about the whole pipeline, near-duplicates and lines: cost beside the peers, and whether the result is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.measure import Cost
from benchmarks.pairs import near_pairs, precision, recall
from benchmarks.plain import without_common_lines
from benchmarks.rows import Row, measured, number
from benchmarks.session import ALPHABETIC, SHINGLE, Session, texts_of
from herd.llama3.recipe.data_schema import Dedup

MAX_COPIES, MIN_CHARS = 6, 8
DEFAULT = Dedup()


def pipeline(run: Session, name: str) -> Row:
    """Jsonl, filters, MinHash, tokens."""
    folder = str(run.inputs.tokenizer)
    ours = run.cost("ours.pipeline", "jsonl", tokenizer=folder, alphabetic=ALPHABETIC)
    whole = f"{folder}/tokenizer.json"
    peer = run.cost("peers.datatrove_pipeline", "jsonl", tokenizer=whole, alphabetic=ALPHABETIC)
    return run.ratio(name, ours, peer)


def minhash_datatrove(run: Session, name: str) -> Row:
    """Signatures and candidates: what both sides do; ours verifies after that."""
    return run.ratio(name, run.cost("ours.candidates"), run.cost("peers.datatrove_candidates"))


def minhash_datasketch(run: Session, name: str) -> Row:
    return run.ratio(name, run.cost("ours.candidates"), run.cost("peers.datasketch_near"))


def near_recall(run: Session, name: str) -> Row:
    """Of all pairs that are alike, how many end in one cluster; and how many would share a band, by expectation."""
    texts = texts_of(run.inputs.near.shard)
    clusters = run.cost("ours.near_quality", on="near").facts["clusters"]
    true = near_pairs(texts, SHINGLE)
    share, pairs = recall(true, clusters, 0.8)
    unlike, others = recall({pair: score for pair, score in true.items() if score < 1}, clusters, 0.8)
    expected = float(
        np.mean([1 - (1 - score**DEFAULT.rows) ** DEFAULT.bands for score in true.values() if score >= 0.8] or [1])
    )
    note = f"{pairs:,} pairs in {len(texts):,} documents; of {others:,} with J < 1 {number(unlike)}"
    note += f"; {DEFAULT.bands} bands of {DEFAULT.rows} alone would find {number(expected)}"
    return measured(name, share, note, pairs=pairs, recall_below_1=unlike, pairs_below_1=others, bands_alone=expected)


def near_precision(run: Session, name: str) -> Row:
    """Of the pairs that verification let through, how many are alike."""
    texts = texts_of(run.inputs.near.shard)
    found = [(one, other) for one, other in run.cost("ours.near_quality", on="near").facts["pairs"]]
    share, pairs = precision(texts, found, SHINGLE, 0.7)
    return measured(name, share, f"{pairs:,} verified pairs", pairs=pairs)


def _our_lines(run: Session) -> Cost:
    return run.cost("ours.lines", max_copies=MAX_COPIES, min_chars=MIN_CHARS)


def lines_by_sentence(run: Session, name: str) -> Row:
    return run.ratio(name, _our_lines(run), run.cost("peers.datatrove_sentences"))


def lines_by_line(run: Session, name: str) -> Row:
    return run.ratio(name, _our_lines(run), run.cost("peers.datatrove_lines"))


def lines_exact(run: Session, name: str) -> Row:
    """Of all documents, how many are what plain Python makes of them."""
    ours = _our_lines(run)
    wanted = without_common_lines(texts_of(run.inputs.ours.shard), MAX_COPIES, MIN_CHARS)
    found = texts_of(Path(ours.facts["documents"]))
    equal = [one == other for one, other in zip(found, wanted, strict=True)]
    return measured(name, 100 * float(np.mean(equal)), f"{ours.facts['lines']:,} lines removed")
