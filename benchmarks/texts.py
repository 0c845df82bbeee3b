"""Rows about filters and tokens: cost beside the peers, equality with a reference, agreement with datatrove."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.measure import ROOT, NotMeasured
from benchmarks.rows import Row, measured
from benchmarks.session import ALPHABETIC, Session, texts_of
from herd.llama3.tokens.vocabulary import PATTERN

SETS = ("gopher", "repetition", "fineweb")
REFERENCE = ROOT / "tests" / "llama3" / "data" / "reference_statistics.py"
"""The statistics in plain Python; a checkout has it, an installed package has not."""
MARKUP, MARKUP_ONE_IN = "`=|{}<>[]#*\\_~^+/", 200
EXACT_DOCUMENTS = 2_000
"""Plain Python does some hundred documents a second."""
ENCODERS = ("ours.tokens", "peers.huggingface_tokens", "peers.tiktoken_tokens")
_FILES: Sequence[tuple[str, Any]] = (("ids.bin", np.uint32), ("counts.bin", np.int64))


def filters_cost(run: Session, name: str) -> Row:
    """All statistics and bounds of three rule sets, on every document."""
    peer = run.cost("peers.datatrove_filters", alphabetic=ALPHABETIC)
    return run.ratio(name, run.cost("ours.filters", alphabetic=ALPHABETIC), peer)


def filters_agreement(run: Session, name: str) -> Row:
    """Of the prose, how much both sides keep or both drop, by rule set; the least counts."""
    peer = run.cost("peers.datatrove_filters", alphabetic=ALPHABETIC).facts
    ours = run.cost("ours.filters", on="peers", alphabetic=ALPHABETIC).facts
    prose = np.array([is_prose(text) for text in texts_of(run.inputs.peers.shard)])
    same = {
        rules: np.array([bool(one) == bool(other) for one, other in zip(*columns, strict=True)])
        for rules in SETS
        for columns in [[side[f"reasons_{rules}"] for side in (ours, peer)]]
    }
    agree = {rules: 100 * float(equal[prose].mean()) for rules, equal in same.items()}
    everything = {f"{rules}_all": 100 * float(equal.mean()) for rules, equal in same.items()}
    note = ", ".join(f"{rules} {share:.1f}" for rules, share in agree.items())
    note = f"least of {note} in {prose.sum():,} documents of prose; in all {min(everything.values()):.1f}"
    return measured(name, min(agree.values()), note, **agree, **everything)


def is_prose(text: str) -> bool:
    """Return whether `text` is prose: at most one character in 200 is one that markup, code and tables are made of."""
    return sum(map(text.count, MARKUP)) * MARKUP_ONE_IN <= len(text)


def filters_exact(run: Session, name: str) -> Row:
    """Of all documents, of how many every statistic is what plain Python makes of them, to the last bit."""
    reference = _reference()
    ours = run.cost("ours.filters", alphabetic=ALPHABETIC).facts
    texts = texts_of(run.inputs.ours.shard)[:EXACT_DOCUMENTS]
    rows = pq.read_table(ours["statistics"]).slice(0, len(texts)).to_pylist()
    equal = [reference(text) == row for text, row in zip(texts, rows, strict=True)]
    return measured(name, 100 * float(np.mean(equal)), f"{len(rows[0])} statistics of {len(texts):,} documents")


def _reference() -> Callable[[str], dict[str, Any]]:
    """Return the plain definition of the statistics. Raises NotMeasured outside a checkout."""
    spec = importlib.util.spec_from_file_location(REFERENCE.stem, REFERENCE)
    if not REFERENCE.exists() or spec is None or spec.loader is None:
        raise NotMeasured(f"{REFERENCE.name} is in the tests of a checkout")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plain: Callable[[str], dict[str, Any]] = module.reference_statistics
    return plain


def tokens_huggingface(run: Session, name: str) -> Row:
    return run.ratio(name, *(run.cost(module, **_options(run, module)) for module in ENCODERS[:2]))


def tokens_tiktoken(run: Session, name: str) -> Row:
    return run.ratio(name, *(run.cost(module, **_options(run, module)) for module in ENCODERS[::2]))


def tokens_pattern(run: Session, name: str) -> Row:
    """A tokenizer in another than the Llama 3 format, by its reference and by the encoder that the gate admits."""
    facts = run.cost("ours.pattern_tokens").facts
    both = ", ".join(f"{facts[kind]} {facts[f'{kind}_rate']:.2f}" for kind in ("reference", "admitted"))
    rates = {kind: facts[f"{kind}_rate"] for kind in ("reference", "admitted")}
    return measured(name, facts["admitted_rate"], f"{both}; {facts['tokens']:,} tokens, pattern of GPT-2", **rates)


def tokens_equal(run: Session, name: str) -> Row:
    """Of all texts (the peers' corpus, hostile strings, all domains), how many have the ids of both libraries."""
    same, texts = [], 0
    for on in ("peers", "parity"):
        folders = [Path(run.cost(module, on=on, **_options(run, module)).facts["folder"]) for module in ENCODERS]
        ours, *others = ([np.fromfile(folder / file, kind) for file, kind in _FILES] for folder in folders)
        same += [equal_documents(*ours, *other) for other in others]
        texts += len(ours[1])
    return measured(name, 100 * float(np.mean(np.concatenate(same))), f"{texts:,} texts, two libraries")


def _options(run: Session, module: str) -> dict[str, str]:
    folder = {"tokenizer": str(run.inputs.tokenizer)}
    return folder | {"pattern": PATTERN} if module == "peers.tiktoken_tokens" else folder


def equal_documents(ids: Any, counts: Any, other_ids: Any, other_counts: Any) -> Any:
    """Return, for each document, whether its ids are the same on both sides: ids in a row, and how many each has."""
    if not np.array_equal(counts, other_counts):
        parts = (np.split(side, np.cumsum(sizes)[:-1]) for side, sizes in ((ids, counts), (other_ids, other_counts)))
        return np.array([np.array_equal(one, other) for one, other in zip(*parts, strict=True)])
    wrong = np.cumsum(np.append(0, ids != other_ids))
    stops = np.cumsum(counts)
    return wrong[stops] == wrong[stops - counts]
