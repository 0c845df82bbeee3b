"""The arms of a scaling-law ladder: every budget spent on every size, with the rate and the batch that fit them.

Tokens follow from budget and size by the FLOP formula that the study names, rounded down to whole batches, so a run
takes a little less than its budget. As published (arXiv 2407.21783, section 3.2.1): a warm-up of 2,000 steps, a cosine
to a tenth of the peak, peaks of 2e-4 to 4e-4 by size, batches of 250K to 4M tokens by budget; how rate and batch move
between those ends is not published, and taken to be a power law. What this gives up: a rate tuned for each run.
"""

from __future__ import annotations

from collections.abc import Iterator

from llama3.model.flops import embedding_rows, flops_per_token, parameter_count
from llama3.recipe.load import RecipeError, resolved
from llama3.recipe.schema import Model, Recipe
from llama3.recipe.units import Tokens
from llama3.scaling.arm import Arm, override
from llama3.scaling.published import batch_tokens, peak_lr
from llama3.scaling.study import Ladder

STAGE = "main"


def ladder_arms(ladder: Ladder, base: Recipe) -> list[Arm]:
    """Return an arm for each budget and size that its tokens per parameter allow, budgets from the least."""
    rows = embedding_rows(base)
    counts = {name: parameter_count(spec, rows) for name, spec in ladder.sizes.items()}
    _refuse_twins(counts)
    return [arm for budget in sorted(ladder.budgets) for arm in _of_budget(ladder, base, budget, counts)]


def per_token(ladder: Ladder, spec: Model, rows: int) -> float:
    """Return training operations per token of a size, by the study's formula."""
    found = flops_per_token(spec, rows, ladder.seq)
    match ladder.formula:
        case "6N":
            return found.six_n
        case "causal":
            return found.causal
        case "full":
            return found.full
        case _:
            raise ValueError(f"ladder.formula: {ladder.formula!r} is none of 6N, causal and full")


def _of_budget(ladder: Ladder, base: Recipe, budget: float, counts: dict[str, int]) -> Iterator[Arm]:
    least, most = ladder.tokens_per_parameter
    batch = batch_of(ladder, budget)
    for name, spec in sorted(ladder.sizes.items(), key=lambda item: counts[item[0]]):
        wanted = budget / per_token(ladder, spec, embedding_rows(base))
        total = int(wanted // batch) * batch
        if total and least <= wanted / counts[name] <= most:
            yield Arm(
                f"{budget:.3g}-{name}".replace("+", ""),
                _overrides(ladder, base, spec, counts, name, batch, total),
                budget,
            )


def _overrides(
    ladder: Ladder, base: Recipe, spec: Model, counts: dict[str, int], name: str, batch: int, total: int
) -> tuple[str, ...]:
    peak = peak_lr(counts[name], (min(counts.values()), max(counts.values())), ladder.peak)
    stage = {"name": STAGE, "until": f"{total} tokens", "seq": ladder.seq, "batch": f"{batch} tokens"}
    shape = {**spec.model_dump(mode="json"), "max_seq": max(spec.max_seq, ladder.seq)}
    rate = {
        "peak": peak,
        "warmup": str(ladder.warmup),
        "cosine": {"to": peak * ladder.decay, "over": f"{total} tokens"},
    }
    return (
        override("model", shape),
        override("lr", rate),
        override("stages", [{**stage, "mix": resolved(base)["stages"][0]["mix"]}]),
        override("evaluate.after", []),
    )


def batch_of(ladder: Ladder, budget: float) -> Tokens:
    """Return the tokens per step of a budget: a power of two of sequences."""
    wanted = batch_tokens(budget, (min(ladder.budgets), max(ladder.budgets)), ladder.batch)
    sequences = 1
    while 2 * sequences * ladder.seq <= wanted * 2**0.5:
        sequences *= 2
    return Tokens(sequences * ladder.seq)


def _refuse_twins(counts: dict[str, int]) -> None:
    by_count: dict[int, str] = {}
    for name, count in counts.items():
        if count in by_count:
            raise RecipeError(
                f"ladder.sizes: {name} and {by_count[count]} both have {count:,} parameters; leave one out"
            )
        by_count[count] = name
