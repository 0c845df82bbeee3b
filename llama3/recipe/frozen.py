"""The fields of a recipe that a started run cannot change: those that decided the tokens trained so far.

It compares results, not text: data, model, batches and shares of segments, and learning rates before a position. So a
cosine can change during the warm-up, a WSD run can become longer before its decay, a later stage can be split.
The order of the last chunks of a mix depends on its end; also compare `TokenStream.identity`.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import reduce
from typing import Any

import yaml

from herd.llama3.recipe.load import RecipeError, resolved
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Share, Tokens, tokens

WHOLE = ("seed", "precision", "sources", "curate", "tokenizer", "tokens", "model", "optimizer", "z_loss", "init_from")
"""Fields that decide all tokens of a run, in order of comparison."""
FREE = {"model": ("preset", "max_seq_len"), "sources": ("annealing_verdict",)}
"""Fields of these sections that decide no token. Of `tokens`, `chunk_tokens` and `shuffle` decide."""
LENGTH = ("until", "for", "seq_len", "batch")
"""Fields of a stage that decide its end."""
ABSENT = object()
Difference = tuple[str, Any, Any]


def frozen_fields(recipe: Recipe, position: int) -> dict[str, Any]:
    """Return, as plain data, all that decided the training on the tokens before `position`; nothing at position 0.

    Recipes with equal frozen fields train the same model up to there, bit for bit.
    """
    if position <= 0:
        return {}
    plain, schedule = resolved(recipe), Schedule(recipe)
    frozen: dict[str, Any] = {}
    for key in WHOLE:
        free = FREE.get(key, ())
        frozen[key] = plain[key]
        if key == "sources":
            frozen[key] = {
                domain: [{name: value for name, value in source.items() if name not in free} for source in sources]
                for domain, sources in plain[key].items()
            }
        elif isinstance(plain[key], dict):
            frozen[key] = {name: value for name, value in plain[key].items() if name not in free}
    frozen["data_seed"] = recipe.documents_seed
    shuffle = recipe.tokens.model_dump(include={"shuffle"})  # empty by default
    frozen["tokens"] = {"chunk_tokens": str(Tokens(recipe.chunk_tokens)), **shuffle}
    frozen["segments"], frozen["average"] = [], None
    for span in schedule.spans:
        stage = span.stage
        shared: dict[str, Any] = {}
        extra = {name: str(share) for name, share in stage.extra_sources.items() if share}
        if extra:
            shared["extra_sources"] = extra
        if stage.kind == "sft":  # the order of conversations and replayed sequences depends on the number of both
            shared |= {"kind": stage.kind, "replay": str(stage.replay), "need": span.tokens}
            if span.start < position:
                frozen["conversations"] = plain["conversations"]
        if stage.data_offset:  # the offset in the data is a multiple of the stage's length
            shared |= {"data_offset": stage.data_offset, "need": span.tokens}
        for segment in span.segments:
            if segment.start < position:
                frozen["segments"].append(
                    shared
                    | {
                        "batch": str(Tokens(segment.batch)),
                        "seq_len": segment.seq_len,
                        "mix": {domain: str(share) for domain, share in sorted(span.shares.items())},
                        "end": min(segment.end, position),
                    }
                )
        if stage.weight_averaging is not None and span.start < position < span.end:
            frozen["average"] = [str(stage.weight_averaging), span.start, span.end]
    frozen["rates"] = [list(pair) for pair in schedule.rates(0, position)]
    return frozen


def check_frozen_fields(trained: Recipe, now: Recipe, position: int) -> None:
    """Raise RecipeError with the first line of `now` that changes the training on the tokens before `position`.

    `trained` is the recipe of that training. Names, checkpoints, evaluation, gates, promotion, policies, and all after
    the position can differ.
    """
    difference = next(_differences(frozen_fields(trained, position), frozen_fields(now, position)), None)
    if difference is None:
        return
    field, old, new = _as_written(difference, trained, now)
    remedy = "write the old line again, or start a new run"
    if field == "tokens.chunk_tokens":
        remedy = f"its default is the longest sequence of all stages: write tokens: {{chunk_tokens: {old}}}"
    before, after = (
        "(missing)"
        if value is ABSENT
        else yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
        for value in (old, new)
    )
    raise RecipeError(
        f"{field}: decided the first {tokens(position)} tokens of this run, and the past of a run cannot change; "
        f"{remedy}\n- {field}: {before}\n+ {field}: {after}"
    )


def _differences(old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Yield (path, old, new) of each different value, in the order of `old`; a missing value is ABSENT."""
    if isinstance(old, list) and isinstance(new, list):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield ".".join(path), old, new
        return
    for key in dict.fromkeys([*old, *new]):
        yield from _differences(old.get(key, ABSENT), new.get(key, ABSENT), (*path, str(key)))


def _as_written(difference: Difference, trained: Recipe, now: Recipe) -> Difference:
    """Return the difference in the resolved recipes that explains a difference of their frozen fields."""
    path, old, new = difference
    kind, _, rest = path.partition(".")
    if kind in (*WHOLE, "data_seed", "conversations"):
        return difference
    names = [stage.name for stage in trained.stages]
    if kind == "segments":
        number, _, field = rest.partition(".")
        segments = Schedule(trained).segments
        stage = (segments if int(number) < len(segments) else Schedule(now).segments)[int(number)].stage
        if field.startswith("extra_sources."):
            return f"stages.{stage}.{field}", old, new
        if field.startswith("mix."):
            old, new = (value if value is ABSENT else str(Share(Fraction(value))) for value in (old, new))
            return f"stages.{stage}.{field}", old, new
        own = ("extra_sources", "data_offset", "batch", "seq_len", "kind", "replay")
        fields = (field,) if field in own else LENGTH
        paths: list[tuple[str, ...]] = [("stages", stage, name) for name in fields]
    else:
        rule = "lr" if kind == "rates" else "weight_averaging"
        paths = [("lr",), *(("stages", name, field) for field in (rule, *LENGTH) for name in names)]
    values = [resolved(recipe) for recipe in (trained, now)]
    for value in values:
        value["stages"] = {stage["name"]: stage for stage in value["stages"]}
    for keys in paths:
        before, after = (
            reduce(lambda plain, key: plain.get(key, ABSENT) if isinstance(plain, dict) else ABSENT, keys, value)
            for value in values
        )
        for path, old, new in _differences(before, after):
            return ".".join((*keys, *([path] if path else []))), old, new
    return difference
