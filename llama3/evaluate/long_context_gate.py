"""Measure the scores that the gates of a long-context stage judge; `decide` applies the rules.

`eval/short-context`: bits per byte of held-out documents in windows of the sequence length before the stage; compared
with the same score of the checkpoint that the stage started from. `eval/needle`: share of hidden sentences that the
model finds in text of the new length.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from herd.llama3.evaluate.held_out import ValidationDocument, read_validation_documents
from herd.llama3.evaluate.needle import KEY as NEEDLE
from herd.llama3.evaluate.needle import find_needles
from herd.llama3.evaluate.requests import document_requests
from herd.llama3.evaluate.scores import Score, samples, score_samples, write_scores
from herd.llama3.evaluate.suite import BPB, mean_bits_per_byte
from herd.llama3.evaluate.task import Request, RollingKind, Task, requests_digest
from herd.llama3.recipe.schema import Recipe
from herd.llama3.statistics.estimates import Estimate

if TYPE_CHECKING:
    from herd.llama3.evaluate.distributed import EvalRanks
    from herd.llama3.model.transformer import Transformer
    from herd.llama3.tokens.tokenizer import Tokenizer

SHORT_CONTEXT = "eval/short-context"
BYTES_PER_POSITION = 4
"""UTF-8 bytes of a document per position of the window: about one window of English."""
METRICS = {"short-context": SHORT_CONTEXT, "needle": NEEDLE}
"""Gate of a recipe -> the score that its rule judges."""


def score_long_context(
    recipe: Recipe,
    model: Path,
    documents: Path,
    folder: Path,
    *,
    short: int | None,
    needle: int | None,
    device: str = "cpu",
    ranks: EvalRanks | None = None,
) -> dict[str, Any]:
    """Score the model in folder `model`, which also holds its tokenizer, and write `scores.parquet` into `folder`.

    `short` is the window of the short-context score and `needle` the length of the haystacks, in positions; None skips
    the score. Texts are the held-out documents of the curated folder `documents`. Returns {key: value} of the scores,
    and of a haystack `text_tokens`. With `ranks`, several processes share the work; rank 0 writes.
    Raises ValueError if there are no documents, or no room for a needle.
    """
    from herd.llama3.evaluate.distributed import EvalRanks  # imports torch
    from herd.llama3.evaluate.evaluate import DTYPES
    from herd.llama3.tokens.tokenizer import Tokenizer

    ranks = ranks or EvalRanks()
    coder = Tokenizer.load(model)
    network = ranks.load(model, DTYPES[recipe.evaluate.precision], device)
    scores: dict[str, Score] = {}
    facts: dict[str, Any] = {}
    if short is not None:
        chosen = read_validation_documents(documents, recipe.evaluate.documents, BYTES_PER_POSITION * short)
        scores |= _short_context(recipe, network, coder, chosen, short, device, ranks)
    if needle is not None:
        chosen = read_validation_documents(documents, recipe.evaluate.documents, BYTES_PER_POSITION * needle)
        texts = [document.text for document in chosen]
        retrieval = find_needles(network, coder, texts, [needle], recipe.evaluate.needles, device, ranks=ranks)
        scores |= retrieval.scores()
        facts["text_tokens"] = retrieval.text_tokens
    if ranks.is_rank0:
        folder.mkdir(parents=True, exist_ok=True)
        write_scores(scores, folder)
    return {**{key: scores[key].value for key in sorted(scores)}, **facts}


def _short_context(
    recipe: Recipe,
    model: Transformer,
    coder: Tokenizer,
    documents: list[ValidationDocument],
    window: int,
    device: str,
    ranks: EvalRanks,
) -> dict[str, Score]:
    """Return bits per byte by domain and their mean by the first stage's mix, with documents read in windows."""
    from herd.llama3.evaluate.scoring import score_requests  # imports torch

    by_domain: dict[str, Estimate] = {}
    requests: list[Request] = []
    scores: dict[str, Score] = {}
    for domain in sorted({document.domain for document in documents}):
        key = f"{SHORT_CONTEXT}/{domain}"
        task = Task(key, RollingKind.name, tuple(document_requests(key, (d for d in documents if d.domain == domain))))
        likelihoods = score_requests(model, coder, task.requests, window, device, ranks=ranks)
        scores[key] = score_samples(task, samples(task, likelihoods))
        by_domain[f"{BPB}/{domain}"] = scores[key].estimate
        requests += task.requests
    mean = Score.from_estimate(
        SHORT_CONTEXT, mean_bits_per_byte(recipe, by_domain), "bits per byte", "lower", requests_digest(requests), None
    )
    return {**scores, SHORT_CONTEXT: mean}
