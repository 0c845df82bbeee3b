"""What the key of each artifact has of the recipe: a function for each kind, and the rule for all of them.

A field that decides a kind (`base.decides`) is in its keys by value, unless a computed part covers it: equal results
then have equal keys. So a new field is in the right keys as soon as it says what it decides.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from herd.llama3.recipe.base import Decided, Decides, chosen_fields, declared
from herd.llama3.recipe.load import digest
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Stage


class Part(NamedTuple):
    """A parameter that is computed from several fields."""

    name: str
    covers: tuple[str, ...]
    """Fields that it has in place of their values, such as `stages.lr`; of a section, `lr`, those with since `use`."""
    value: Any
    """Plain data; None: no parameter, because an input has it or it changes nothing here."""


def is_covered(path: str, mark: Decides, fields: Collection[str]) -> bool:
    """Return whether parts that cover `fields` have the field `path`."""
    return path in fields or (mark.since == "use" and any(path.startswith(f"{field}.") for field in fields))


def parameters(recipe: Recipe, kind: Decided, *parts: Part, stage: Stage | None = None) -> dict[str, Any]:
    """Return the parameters of an artifact of `kind`: the values of its fields, then its computed parts.

    Of a `stage` the fields are under `stage`, and those of other stages are left out; without, all stages are in.
    """
    covered = [field for part in parts for field in part.covers]
    assert all(part.name in part.covers or part.name not in type(recipe).model_fields for part in parts)
    declaring = {path: mark for path, mark in declared(type(recipe)).items() if kind in mark.kinds}
    for field in covered:
        known = any(is_covered(path, mark, [field]) for path, mark in declaring.items())
        assert known, f"{field} does not say that it decides {kind}"

    def by_value(path: str, mark: Decides) -> bool:
        return kind in mark.kinds and not is_covered(path, mark, covered)

    values = chosen_fields(recipe, by_value)
    if stage is not None:
        values.pop("stages", None)
        values |= {"stage": own} if (own := chosen_fields(stage, by_value, "stages")) else {}
    return {**values, **{part.name: part.value for part in parts if part.value is not None}}


def collected(recipe: Recipe) -> dict[str, Any]:
    """Return what decides the documents that are read, apart from the files."""
    return parameters(recipe, "collected", Part("seed", ("seed", "data_seed"), recipe.documents_seed))


def annotated(recipe: Recipe) -> dict[str, Any]:
    """Return what decides the attributes of collected documents: no threshold, but whether there is one."""
    curate = recipe.curate
    return parameters(
        recipe,
        "annotated",
        Part("lines", ("curate.lines.max_copies",), curate.lines.max_copies is not None),
        Part("divergence", ("curate.quality.max_divergence", "curate.quality_for"), curate.needs_divergence),
    )


def curated(recipe: Recipe) -> dict[str, Any]:
    """Return what decides which annotated documents are kept.

    The recipe has the evaluation sets of its suites in place of `evaluated` (`evaluate.suite.with_evaluation_sets`).
    """
    suites = ("suite", "final", "deferred_suite", "data", "on_missing_data", "tasks")
    apart = [f"{domain}/{index}" for domain in recipe.sources for index in recipe.places_apart(domain)]
    return parameters(
        recipe,
        "curated",
        Part("apart", ("sources.name",), apart or None),
        Part("evaluated", tuple(f"evaluate.{field}" for field in suites), None),
    )


def tokenizer(recipe: Recipe) -> dict[str, Any]:
    """Return what decides the tokenizer: the shares of its mix, not their name."""
    shares = {domain: str(share) for domain, share in recipe.tokenizer_mix.items()}
    covers = ("mix", "stages.mix", "tokenizer.train.mix")
    return parameters(recipe, "tokenizer", Part("mix", covers, shares if recipe.tokenizer.train else None))


def tokens(recipe: Recipe) -> dict[str, Any]:
    """Return what decides the token shards: number type, and the sources with shards of their own."""
    separate = {
        domain: {str(index): source.name or "" for index, source in enumerate(sources) if source.weight or source.name}
        for domain, sources in recipe.sources.items()
    }
    datasets = {domain: names for domain, names in separate.items() if names}
    return parameters(recipe, "tokens", Part("datasets", ("sources.name", "sources.weight"), datasets or None))


def conversations(recipe: Recipe) -> dict[str, Any]:
    """Return what decides the packed conversations, apart from the files."""
    generated = any(source.uri == "problems" for source in recipe.conversations)
    return parameters(
        recipe,
        "conversations",
        Part("seq_len", ("stages.kind", "stages.seq_len"), recipe.sft_lengths),
        Part("seed", ("seed", "data_seed"), recipe.documents_seed if generated else None),
    )


def weights(recipe: Recipe, files: object, rows: int) -> dict[str, Any]:
    """Return what decides imported weights: the state of their `files`, and the shape with `rows` of embeddings."""
    return parameters(recipe, "weights", Part("files", ("init_from.path",), files), Part("rows", (), rows))


def checkpoint(recipe: Recipe, span: StageSpan, stream: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what decides the result of the training in `span`, apart from the artifacts that it reads.

    `stream` is the identity of its tokens; without, the fields that decide the stream are in by value.
    """
    schedule, stage, evaluate = recipe.schedule, span.stage, recipe.evaluate
    rates = schedule.rates(span.start, span.end)
    values = [rate for _, rate in rates]
    scored = {
        "select": stage.select,
        "documents": evaluate.val_documents if evaluate.val_interval != "never" else 0,
        "seq_len": min(min(other.lengths) for other in recipe.stages),
        "weights": {domain: str(share) for domain, share in recipe.first_mix.items()},
    }
    parts = [
        Part("rate", ("lr", "stages.lr"), f"{values[0]:.3g} to {values[-1]:.3g}, peak {max(values):.3g}"),
        Part("rates", (), digest(rates)[:16]),
        Part(
            "mix",
            ("mix", "stages.mix", "stages.extra_sources", "stages.replay"),
            {domain: str(share) for domain, share in span.shares.items()},
        ),
        Part(
            "shape",
            ("init_from.after", "stages.until", "stages.for", "stages.seq_len", "stages.batch"),
            [[part.start, part.seq_len, part.batch, part.steps] for part in span.segments],
        ),
        Part("average", ("stages.weight_averaging",), str(stage.weight_averaging) if stage.weight_averaging else None),
        Part(
            "select",
            ("stages.select", "evaluate.val_documents", "evaluate.val_interval"),
            scored if stage.select == "best" else None,
        ),
    ]
    if stream is not None:
        parts.append(Part("stream", STREAM, stream))
    else:
        parts.append(Part("chunk_tokens", ("tokens.chunk_tokens",), recipe.chunk_tokens))
    return parameters(recipe, "checkpoint", *parts, stage=stage)


STREAM = (
    "sources.name",
    "sources.weight",
    "stages.name",
    "stages.kind",
    "stages.data_offset",
    "tokens.chunk_tokens",
    "tokens.shuffle",
)
"""Fields that the identity of a stream of tokens has; also those of the mixes, and the seed."""


def evaluation(recipe: Recipe) -> dict[str, Any]:
    """Return what decides the scores of a model by `evaluate.suite`, apart from the tasks and their data."""
    return parameters(
        recipe,
        "evaluation",
        Part("suite", ("evaluate.suite", "evaluate.final", "evaluate.deferred_suite"), recipe.evaluate.suite),
        _weights(recipe),
        Part("longest", ("stages.seq_len",), recipe.longest_sequence),
        Part("tasks", ("evaluate.data", "evaluate.tasks"), None),
    )


def gate(recipe: Recipe, short: int | None, needle: int | None) -> dict[str, Any]:
    """Return what decides the scores of a gate with a window of `short` and haystacks of `needle` tokens."""
    return parameters(
        recipe,
        "gate",
        Part("short", ("stages.gates", "stages.seq_len"), short),
        Part("needle", (), needle),
        Part("needles", ("evaluate.needles",), recipe.evaluate.needles if needle else None),
        _weights(recipe),
    )


def _weights(recipe: Recipe) -> Part:
    """Return the weights of means over domains."""
    return Part("weights", ("mix", "stages.mix"), {domain: str(share) for domain, share in recipe.first_mix.items()})
