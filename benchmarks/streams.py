"""Rows about what has no peer: the mix of a token budget, the training stream, and memory."""

from __future__ import annotations

from typing import Any

from benchmarks.inputs import make_large
from benchmarks.measure import Cost, NotMeasured
from benchmarks.ours.token_shards import make_shards
from benchmarks.rows import Row, failed, measured
from benchmarks.session import Session
from herd.llama3.recipe.units import Bytes

MIX = {"small": (200_000, 80_000_000), "full": (10_000_000, 4_000_000_000)}
"""Documents to choose from, and the budget in tokens."""
STREAM = {"small": (20_000, 40_000_000), "full": (100_000, 400_000_000)}
"""Documents in the shards, and the tokens to read."""
WARM_UP = 4_000
"""Documents in the shards of the warm-up."""
LIMIT = Bytes.parse("1.25GiB")
"""Memory that the process of the memory row may take; its corpus is four times as large."""
DUCKDB_SHARE = 10
"""DuckDB gets so much less than the whole process: libraries take 350 MB, the tokenizer 300, a shard some 400."""


def mix(run: Session, name: str) -> Row:
    """CPU time to say what every domain and source gives to a budget, from cold shards."""
    documents, budget = MIX[run.settings.size]
    cost = _on_shards(run, "ours.mix", documents, True, budget=budget)
    note = f"{documents:,} documents, {budget:,} tokens"
    if cost.facts["planned"] != cost.facts["realized"]:
        return failed(name, f"{note}: planned {cost.facts['planned']}, realized {cost.facts['realized']}")
    return measured(name, cost.cpu_s, f"{note}, exact to the token", **cost.facts)


def stream(run: Session, name: str) -> Row:
    """Tokens a second with the boundaries of their documents."""
    documents, tokens = STREAM[run.settings.size]
    cost = _on_shards(run, "ours.stream", documents, False, tokens=tokens)
    return measured(name, cost.facts["tokens"] / 1e6 / cost.cpu_s, f"{cost.facts['segments']:,} segments", **cost.facts)


def memory(run: Session, name: str) -> Row:
    """Largest size of one process that takes a corpus of four times the limit from jsonl to tokens."""
    if run.settings.size != "full":
        raise NotMeasured("needs --size full, some 15 minutes and 15 GB of disk")
    folder = run.settings.folder / "large"
    size = make_large(folder, run.inputs.ours.jsonl, 4 * LIMIT)
    options = {"tokenizer": str(run.inputs.tokenizer), "memory": f"{LIMIT // DUCKDB_SHARE}B"}
    cost = run.bench.cost("ours.large", folder, run.inputs.warm_up.jsonl, **options)
    note = f"{cost.peak_bytes / 2**20:,.0f} of {LIMIT // 2**20} MiB for {size / 2**20:,.0f} MiB of text"
    return measured(name, 100 * cost.peak_bytes / LIMIT, note, cpu_s=cost.cpu_s, **cost.facts)


def _on_shards(run: Session, module: str, documents: int, empty: bool, **options: Any) -> Cost:
    """Return the cost of `module` on made-up token shards of so many documents."""
    large, small = (run.settings.folder / f"{module}-{count}" for count in (documents, WARM_UP))
    for folder, count in ((large, documents), (small, WARM_UP)):
        make_shards(folder, count, empty)
    return run.bench.cost(module, large, small, **options)
