"""The fields of a recipe that a started run cannot change: those that decided the tokens trained so far.

It compares results, not text: data, model, batches and shares of segments, and learning rates before a position. So a
cosine can change during the warm-up, a WSD run can become longer before its decay, a later stage can be split.
The order of the last chunks of a mix depends on its end; also compare `TokenStream.identity`.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import yaml

from herd.llama3.recipe.base import DECISIONS, Decides, chosen_fields
from herd.llama3.recipe.keys import Computed, is_covered
from herd.llama3.recipe.load import RecipeError, resolved
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Share, Tokens, tokens

PAST = {*DECISIONS["data"], *DECISIONS["tokens"], *DECISIONS["training"]}
LENGTH = ("stages.until", "stages.for", "stages.seq_len", "stages.batch")
"""Fields that decide where a stage ends."""
ABSENT = object()
Difference = tuple[tuple[str, ...], Any, Any]


def frozen_fields(recipe: Recipe, position: int) -> dict[str, Any]:
    """Return, as plain data, all that decided the training on the tokens before `position`; nothing at position 0.

    Recipes with equal frozen fields train the same model up to there, bit for bit.
    """
    if position <= 0:
        return {}
    computed = _computed(recipe, position)
    covered = [field for parameter in computed for field in parameter.covers]

    def by_value(path: str, mark: Decides) -> bool:
        if mark.since == "never" or not PAST & set(mark.kinds) or is_covered(path, mark, covered):
            return False
        assert mark.since != "use", (
            f"{path}: no computed parameter of the past covers it; write one, or another `since`"
        )
        return mark.since == "start" or not path.startswith("stages.")  # of stages, `_segments` has those that begun

    return {**chosen_fields(recipe, by_value), **{parameter.name: parameter.value for parameter in computed}}


def _computed(recipe: Recipe, position: int) -> list[Computed]:
    """Return the computed values to compare; the fields that each covers explain a difference, in order."""
    schedule = recipe.schedule
    spans = [span for span in schedule.spans if span.start < position]
    last, average = spans[-1], spans[-1].stage.weight_averaging
    tuned = any(span.stage.kind == "sft" for span in spans)
    chats = chosen_fields(recipe, lambda path, _: path.startswith("conversations.")) if tuned else {}
    in_progress = average is not None and position < last.end  # the next stage continues the last weights
    return [
        Computed("data_seed", ("data_seed",), recipe.documents_seed),
        Computed("tokens.chunk_tokens", ("tokens.chunk_tokens",), str(Tokens(recipe.chunk_tokens))),
        Computed("chats", ("conversations",), chats.get("conversations")),
        Computed("segments", SEGMENT, [values for span in spans for values in _segments(span, position)]),
        Computed(
            "average",
            ("stages.weight_averaging", *LENGTH),
            [str(average), last.start, last.end] if in_progress else None,
        ),
        Computed("rates", ("lr", "stages.lr", *LENGTH), [list(pair) for pair in schedule.rates(0, position)]),
    ]


SEGMENT = ("mix", "stages.mix", "stages.extra_sources", "stages.name", *LENGTH)
"""Fields of a stage that its segments have in another form; the others are in them by value."""


def _segments(span: StageSpan, position: int) -> Iterator[dict[str, Any]]:
    """Yield the parameters that decide the tokens of each segment of a stage before `position`."""
    stage = span.stage
    shared: dict[str, Any] = {
        "extra_sources": {name: str(share) for name, share in stage.extra_sources.items() if share}
    }
    shared |= chosen_fields(stage, lambda path, mark: mark.since == "stage" and path not in SEGMENT, "stages")
    if stage.kind == "sft":  # the order of conversations depends on it
        shared["name"] = stage.name
    if stage.kind == "sft" or stage.data_offset:  # so do replayed sequences; an offset is a multiple of the length
        shared["need"] = span.tokens
    for segment in span.segments:
        if segment.start < position:
            yield {
                **shared,
                "batch": str(Tokens(segment.batch)),
                "seq_len": segment.seq_len,
                "mix": {domain: str(share) for domain, share in sorted(span.shares.items())},
                "end": min(segment.end, position),
            }


def check_frozen_fields(trained: Recipe, now: Recipe, position: int) -> None:
    """Raise RecipeError with the first line of `now` that changes the training on the tokens before `position`.

    `trained` is the recipe of that training. Names, checkpoints, evaluation, gates, promotion, policies, and all after
    the position can differ.
    """
    difference = next(_differences(frozen_fields(trained, position), frozen_fields(now, position)), None)
    if difference is None:
        return
    path, old, new = _as_written(difference, trained, now, position)
    field, remedy = ".".join(path), "write the old line again, or start a new run"
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
            yield path, old, new
        return
    for key in dict.fromkeys([*old, *new]):
        yield from _differences(old.get(key, ABSENT), new.get(key, ABSENT), (*path, str(key)))


def _as_written(difference: Difference, trained: Recipe, now: Recipe, position: int) -> Difference:
    """Return the first difference of the written fields that a parameter covers, for a difference of its results."""
    (name, *rest), old, new = difference
    parameter = next((parameter for parameter in _computed(trained, position) if parameter.name == name), None)
    if parameter is None or parameter.covers == (name,):
        return difference
    stage, fields = "", parameter.covers
    if name == "segments":
        segments, field = trained.schedule.segments, rest[1] if len(rest) > 1 else "end"
        stage = (segments if int(rest[0]) < len(segments) else now.schedule.segments)[int(rest[0])].stage
        if field == "mix":  # with another name, or other shares
            old, new = (value if value is ABSENT else str(Share(Fraction(value))) for value in (old, new))
        if field in ("mix", "extra_sources"):
            return ("stages", stage, *rest[1:]), old, new
        fields = LENGTH if field in ("end", "need") else (f"stages.{field}",)
    plain = [resolved(recipe) for recipe in (trained, now)]
    was, is_now = ({**each, "stages": {written["name"]: written for written in each["stages"]}} for each in plain)
    for path, before, after in _differences(was, is_now):
        place = ".".join(("stages", *path[2:]) if path[0] == "stages" else path) + "."
        if any(place.startswith(f"{field}.") for field in fields) and stage in ("", path[1]):
            return path, before, after
    return difference
