"""The past of a run, which cannot change, told apart from its future, which can.

What is compared is not how a recipe is written but what it made of the tokens before a position: the data, the model,
the batches and shares of the segments up to there, and the learning rate at the steps up to there. So a cosine may be
bent during the warm-up, a WSD run lengthened before its decay, a stage split or renamed behind the position. What
this gives up: the last units of a mix are dealt by where the mix ends, and only the token stream knows which; compare
`TokenStream.identity` as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import yaml

from llama3.recipe.load import RecipeError, resolved
from llama3.recipe.schedule import Schedule, Segment, StageSpan
from llama3.recipe.schema import Recipe
from llama3.recipe.units import Share, Tokens, tokens

WHOLE = ("seed", "compute", "sources", "curate", "tokenizer", "tokens", "model", "optimizer", "z_loss", "start")
"""Sections that decide every token of a run, in the order in which they are compared."""
LABELS = {"model": ("preset", "max_seq")}
"""Fields of them that decide none: a name, a limit. Of `tokens` only the unit decides."""
REMARKS = ("judged",)
"""Fields of a source that decide none."""
LENGTH = ("until", "for", "seq", "batch")
"""Fields of a stage that decide where it ends."""
ABSENT = object()
Difference = tuple[str, Any, Any]


def past(recipe: Recipe, position: int) -> dict[str, Any]:
    """Return, as plain data, everything that decided the training on the tokens before `position`.

    Two recipes with equal pasts have trained the same model there, bit for bit. At position 0 it is empty.
    """
    if position <= 0:
        return {}
    plain, schedule = resolved(recipe), Schedule(recipe)
    found = {key: _decisive(key, plain[key]) for key in WHOLE} | {"data_seed": recipe.documents_seed}
    longest = max(max(stage.lengths) for stage in recipe.stages)
    found["tokens"] = {"unit": str(Tokens(recipe.tokens.unit or longest))}
    begun = [segment for segment in schedule.segments if segment.start < position]
    found["segments"] = [_segment(schedule, segment, position) for segment in begun]
    found["average"] = _average(schedule, position)
    found["rates"] = [list(pair) for pair in schedule.rates(0, position)]
    return found


def check_past(trained: Recipe, now: Recipe, position: int) -> None:
    """Raise RecipeError with the first differing line if `now` changes what decided the tokens before `position`.

    `trained` is the recipe under which they were trained. Names, checkpoints, evaluation, gates, promotion, policies,
    and everything behind the position may differ.
    """
    difference = next(_differences(past(trained, position), past(now, position)), None)
    if difference is None:
        return
    field, old, new = _as_written(difference, trained, now)
    remedy = "write the old line again, or begin a new run"
    if field == "tokens.unit":
        remedy = f"the longest sequence of all stages decides it where it is left out: write tokens: {{unit: {old}}}"
    raise RecipeError(
        f"{field}: decided the first {tokens(position)} tokens of this run, and the past of a run cannot change; "
        f"{remedy}\n- {field}: {_line(old)}\n+ {field}: {_line(new)}"
    )


def _decisive(key: str, section: Any) -> Any:
    if not isinstance(section, dict):
        return section
    if key == "sources":
        return {
            domain: [{name: value for name, value in source.items() if name not in REMARKS} for source in sources]
            for domain, sources in section.items()
        }
    return {name: value for name, value in section.items() if name not in LABELS.get(key, ())}


def _segment(schedule: Schedule, segment: Segment, position: int) -> dict[str, Any]:
    """Return the segment as far as it is trained: where it will end is the future."""
    span = next(span for span in schedule.spans if span.start <= segment.start < span.end)
    return {
        **_special(span),
        "batch": str(Tokens(segment.batch)),
        "seq": segment.seq,
        "mix": {domain: str(share) for domain, share in sorted(span.shares.items())},
        "end": min(segment.end, position),
    }


def _special(span: StageSpan) -> dict[str, Any]:
    """Return what a stage reads beside its mix, or elsewhere; where a later helping begins follows from its length."""
    added = {name: str(share) for name, share in span.stage.add.items() if share}
    later = {"draw": span.stage.draw, "need": span.tokens} if span.stage.draw else {}
    return {**({"add": added} if added else {}), **later}


def _average(schedule: Schedule, position: int) -> list[str | int] | None:
    """Return what decides the weights averaged so far: the length of a stage in progress, if it averages."""
    for span in schedule.spans:
        if span.stage.average is not None and span.start < position < span.end:
            return [str(span.stage.average), span.start, span.end]
    return None


def _differences(old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Yield (path, old, new) of each leaf that differs, in the order of `old`; what one lacks is ABSENT."""
    if isinstance(old, list) and isinstance(new, list):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield ".".join(path), old, new
        return
    for key in dict.fromkeys([*old, *new]):
        yield from _differences(old.get(key, ABSENT), new.get(key, ABSENT), (*path, str(key)))


def _as_written(difference: Difference, trained: Recipe, now: Recipe) -> Difference:
    """Return the line of the resolved recipes behind a difference of their pasts."""
    path, old, new = difference
    kind, _, rest = path.partition(".")
    if kind in (*WHOLE, "data_seed"):
        return difference
    if kind == "segments":
        stage, field = _stage_behind(trained, now, rest)
        if field.startswith("add."):
            return f"stages.{stage}.{field}", old, new
        if field.startswith("mix."):
            return f"stages.{stage}.{field}", _percent(old), _percent(new)
        places: list[tuple[str, ...]] = [
            ("stages", stage, name) for name in ([field] if field in ("add", "draw", "batch", "seq") else LENGTH)
        ]
    else:
        names = [stage.name for stage in trained.stages]
        own = ["lr"] if kind == "rates" else ["average"]
        places = [("lr",), *(("stages", name, field) for field in (*own, *LENGTH) for name in names)]
    before, after = _by_name(resolved(trained)), _by_name(resolved(now))
    written = (
        (".".join((*place, *([line[0]] if line[0] else []))), line[1], line[2])
        for place in places
        for line in _differences(_at(before, place), _at(after, place))
    )
    return next(written, difference)


def _by_name(plain: dict[str, Any]) -> dict[str, Any]:
    return {**plain, "stages": {stage["name"]: stage for stage in plain["stages"]}}


def _stage_behind(trained: Recipe, now: Recipe, place: str) -> tuple[str, str]:
    """Return the stage of the segment at `place` (number, then field), and the field."""
    number, _, field = place.partition(".")
    segments = Schedule(trained).segments
    if int(number) >= len(segments):
        segments = Schedule(now).segments
    return segments[int(number)].stage, field


def _at(plain: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        plain = plain.get(key, ABSENT) if isinstance(plain, dict) else ABSENT
    return plain


def _percent(share: Any) -> Any:
    return share if share is ABSENT else str(Share(Fraction(share)))


def _line(value: Any) -> str:
    if value is ABSENT:
        return "(not there)"
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
