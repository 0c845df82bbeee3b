"""Another valid value of each field of a recipe, and a recipe with a value in every section."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from herd.llama3.recipe.base import declared, read_plain
from herd.llama3.recipe.load import parse_recipe
from herd.llama3.recipe.schema import Recipe

FIELDS = declared(Recipe)
RICH = Path(__file__).with_name("rich.yaml")

VARIANTS: dict[str, tuple[str, ...]] = {
    "lr.linear": ("lr.cosine=null", "lr.linear={to: 1e-4, over: 40 steps}"),
    "lr.wsd": ("lr.cosine=null", "lr.wsd={to: 0, decay: 10 steps}"),
    "init_from.after": ("init_from={path: checkpoint/a-main-1a2b3c4d, format: checkpoint, after: long}",),
}
"""Field or section that the rich recipe lacks -> overrides that give it."""
for section in ("init_from.path", "init_from.format", "model", "tokenizer.use"):
    VARIANTS[section] = ("tokenizer={use: t.model}", "init_from={path: w}")
PLACES = {
    "sources": "sources.general.0",
    "sources.name": "sources.math.gsm.name",
    "sources.annealing_verdict": "sources.math.gsm.annealing_verdict",
    "conversations": "conversations.0",
    "curate.scores": "curate.scores.0",
    "studies": "studies.0",
    "stages": "stages.anneal",
}
"""Where a section of a list is changed."""
OTHER: dict[str, tuple[str, ...]] = {
    "data_seed": ("data_seed=5",),
    "mix": ("mix.base={general: 40%, math: 35%, code: 17%, multilingual: 8%}",),
    "tokens.chunk_tokens": ("tokens.chunk_tokens=16 tokens",),
    "curate.lines.max_copies": ("curate.lines.max_copies=null", "curate.lines.max_copies=7"),
    "curate.quality.rules": ("curate.quality.rules=[c4_strict]",),
    "curate.quality.max_divergence": ("curate.quality.max_divergence=2.5",),
    "curate.quality_for": ("curate.quality_for={code: {max_divergence: 2.5}}",),
    "curate.topics.seeds": ("curate.topics.seeds.a=[c.jsonl]",),
    "curate.topics.caps": ("curate.topics.caps.a=40%",),
    "curate.decontaminate": ("curate.decontaminate.own.uri=other.jsonl", "curate.decontaminate=[]"),
    "tokenizer.train.mix": ("tokenizer.train.mix=late",),
    "sources.name": (
        "sources.code.1.name=more",
        "sources.math.gsm.name=apps & stages.anneal.extra_sources={apps: 30%}",
    ),
    "sources.contents": ("sources.general.0.contents=s3://bucket/{}",),
    "sources.annealing_verdict.high": ("sources.math.gsm.annealing_verdict.high=0.017",),
    "curate.quality.max_top_ngram": ("curate.quality.max_top_ngram={2: 0.1}",),
    "curate.quality.max_duplicate_ngrams": ("curate.quality.max_duplicate_ngrams={5: 0.1}",),
    "curate.scores.model": ("curate.scores=[{name: clean, model: folder}]",),
    "curate.topics.domains": ("curate.topics.domains=[code]",),
    "model.preset": ("model.preset=2m",),
    "lr.warmup": ("lr.warmup=5 steps",),
    "sources.weight": ("sources.general.0.weight=6", "sources.general=[{uri: web/*.jsonl}, {uri: shop/*.jsonl}]"),
    "model.dim": ("model.dim=128",),
    "model.heads": ("model.heads=2",),
    "model.kv_heads": ("model.kv_heads=4",),
    "lr.wsd.to": ("lr.wsd.to=1e-5",),
    "init_from.format": ("init_from.format=meta",),
    "init_from.after": ("init_from.after=anneal",),
    "stages.name": ("stages.chat.name=talk",),
    "stages.kind": ("stages.anneal={name: anneal, kind: sft, for: 1Ki, seq_len: 16, mix: late, batch: 256 tokens}",),
    "stages.until": ("stages.main.until=2Ki",),
    "stages.for": ("stages.anneal.for=2Ki",),
    "stages.seq_len": ("stages.main.seq_len=32", "stages.long.seq_len=[16, 64]", "stages.chat.seq_len=16"),
    "stages.batch": ("stages.anneal.batch=512 tokens",),
    "stages.mix": ("stages.main.mix=late",),
    "stages.replay": ("stages.chat.replay=50%",),
    "stages.epochs": ("stages.chat.epochs=2",),
    "stages.extra_sources": ("stages.anneal.extra_sources.gsm=20%",),
    "stages.lr": ("stages.anneal.lr=constant",),
    "stages.weight_averaging": ("stages.anneal.weight_averaging=polyak",),
    "stages.gates": ("stages.long.gates=[needle]",),
    "evaluate.after": ("evaluate.after=[long]",),
    "evaluate.val_interval": ("evaluate.val_interval=1Ki", "evaluate.val_interval=never"),
    "evaluate.every": ("evaluate.every=1Ki",),
    "evaluate.suite": ("evaluate.suite={workspace}/one.yaml",),
    "evaluate.final": ("evaluate.final={workspace}/one.yaml",),
    "evaluate.deferred_suite": ("evaluate.deferred_suite={workspace}/one.yaml",),
    "evaluate.data": ("evaluate.data={workspace}/other",),
    "evaluate.tasks": ("evaluate.tasks=[{workspace}/one-task.yaml]",),
    "promote.when": ("promote.when={eval/bpb: better}",),
    "studies.changed": ("studies.0.changed=[lr.peak]",),
    "sources.annealing_verdict.says": ("sources.math.gsm.annealing_verdict.says=mixed",),
    "sources.annealing_verdict.gain": ("sources.math.gsm.annealing_verdict.gain=0.013",),
}
"""Field -> its changes (` & `: with another field), where the next value of its type changes nothing or is refused."""


def rich(workspace: Path, *overrides: str) -> Recipe:
    text = RICH.read_text().replace("{workspace}", str(workspace))
    return parse_recipe(
        read_plain(text), "rich", [override.replace("{workspace}", str(workspace)) for override in overrides]
    )


def changes(path: str, recipe: Recipe) -> Iterator[str]:
    """Yield overrides that give the field another valid value."""
    if path in OTHER:
        yield from OTHER[path]
        return
    section = max((known for known in PLACES if f"{path}.".startswith(f"{known}.")), key=len, default="")
    place = PLACES[section] + path.removeprefix(section) if section else path
    value: Any = recipe
    for key in place.split("."):
        if isinstance(value, list):
            value = value[int(key)] if key.isdigit() else next(item for item in value if item.name == key)
        elif isinstance(value, dict):
            value = value[key]
        else:
            name = next(name for name, field in type(value).model_fields.items() if key in (name, field.alias))
            annotation, value = type(value).model_fields[name].annotation, getattr(value, name)
    yield f"{place}={json.dumps(another(annotation, value))}"


def another(annotation: Any, value: Any) -> Any:
    """Return another valid value of the type than `value`, as plain data."""
    inner = [each for each in get_args(annotation) if each is not type(None)]
    if example := getattr(annotation, "example", None):
        return example if example != str(value) else f"1{example}"
    if get_origin(annotation) is Literal:
        return next(choice for choice in inner if choice != value)
    if get_origin(annotation) is list:
        return [another(inner[0], (value or [None])[0])]
    if get_origin(annotation) is tuple:
        return [0.8, 0.9]
    match annotation:
        case type() if annotation is bool:
            return not value
        case type() if annotation is int:
            return (value or 20) + 1
        case type() if annotation is float:
            return value / 2 if value else 0.5
        case type() if annotation is str:
            return f"{value or 'x'}1"
    return another(inner[0], value)
