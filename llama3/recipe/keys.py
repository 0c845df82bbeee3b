"""What the key of each artifact has of the recipe: a function for each kind, and the rule for all of them.

A field that decides a kind (`base.decides`) is in its keys by value, unless a computed parameter covers it. Equal
results then have equal keys. So a new field is in the right keys as soon as it says what it decides.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from herd.llama3.recipe.base import Decided, Decides, chosen_fields, declared
from herd.llama3.recipe.load import digest
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Stage


class Computed(NamedTuple):
    """A parameter that is computed from several fields."""

    name: str
    covers: tuple[str, ...]
    """Fields that it has in place of their values, such as `stages.lr`; of a section, `lr`, those with since `use`."""
    value: Any
    """Plain data; None: no parameter, because an input has it or it changes nothing here."""


def is_covered(path: str, mark: Decides, fields: Collection[str]) -> bool:
    """Return whether computed parameters that cover `fields` have the field `path`."""
    return path in fields or (mark.since == "use" and any(path.startswith(f"{field}.") for field in fields))


def parameters(recipe: Recipe, kind: Decided, *computed: Computed, stage: Stage | None = None) -> dict[str, Any]:
    """Return the parameters of an artifact of `kind`: the values of its fields, then the computed ones.

    Of a `stage` the fields are under `stage`, and those of other stages are left out; without, all stages are in.
    """
    covered = [field for parameter in computed for field in parameter.covers]
    assert all(
        parameter.name in parameter.covers or parameter.name not in type(recipe).model_fields for parameter in computed
    )
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
    return {**values, **{parameter.name: parameter.value for parameter in computed if parameter.value is not None}}


def collected(recipe: Recipe) -> dict[str, Any]:
    """Return the parameters, files aside, that decide which documents are read."""
    return parameters(recipe, "collected", Computed("seed", ("seed", "data_seed"), recipe.documents_seed))


def annotated(recipe: Recipe) -> dict[str, Any]:
    """Return the parameters that decide the attributes of documents: not a threshold, only whether it is set."""
    curate = recipe.curate
    return parameters(
        recipe,
        "annotated",
        Computed("lines", ("curate.lines.max_copies",), curate.lines.max_copies is not None),
        Computed("divergence", ("curate.quality.max_divergence", "curate.quality_for"), curate.needs_divergence),
    )


def curated(recipe: Recipe) -> dict[str, Any]:
    """Return the parameters that decide which annotated documents are kept.

    The recipe has the evaluation sets of its suites in place of `evaluated` (`evaluate.suite.with_evaluation_sets`).
    """
    suites = ("suite", "final", "deferred_suite", "data", "on_missing_data", "tasks")
    apart = [f"{domain}/{index}" for domain in recipe.sources for index in recipe.places_apart(domain)]
    return parameters(
        recipe,
        "curated",
        Computed("apart", ("sources.name",), apart or None),
        Computed("evaluated", tuple(f"evaluate.{field}" for field in suites), None),
    )


def tokenizer(recipe: Recipe) -> dict[str, Any]:
    """Return the parameters that decide the tokenizer: the shares of its mix, not their name."""
    shares = {domain: str(share) for domain, share in recipe.tokenizer_mix.items()}
    covers = ("mix", "stages.mix", "tokenizer.train.mix")
    return parameters(recipe, "tokenizer", Computed("mix", covers, shares if recipe.tokenizer.train else None))


def tokens(recipe: Recipe) -> dict[str, Any]:
    """Return the parameters that decide the token shards: number type, and the sources with separate shards."""
    separate = {
        domain: {str(index): source.name or "" for index, source in enumerate(sources) if source.weight or source.name}
        for domain, sources in recipe.sources.items()
    }
    datasets = {domain: names for domain, names in separate.items() if names}
    return parameters(recipe, "tokens", Computed("datasets", ("sources.name", "sources.weight"), datasets or None))


def conversations(recipe: Recipe) -> dict[str, Any]:
    """Return the parameters, files aside, that decide the packed conversations."""
    generated = any(source.uri == "problems" for source in recipe.conversations)
    return parameters(
        recipe,
        "conversations",
        Computed("seq_len", ("stages.kind", "stages.seq_len"), recipe.sft_lengths),
        Computed("seed", ("seed", "data_seed"), recipe.documents_seed if generated else None),
    )


def weights(recipe: Recipe, files: object, vocab_size: int) -> dict[str, Any]:
    """Return the parameters that decide imported weights: state of their `files`, shape and `vocab_size`."""
    return parameters(
        recipe, "weights", Computed("files", ("init_from.path",), files), Computed("vocab_size", (), vocab_size)
    )


def checkpoint(recipe: Recipe, span: StageSpan, stream: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the parameters, input artifacts aside, that decide the result of the training in `span`.

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
    computed = [
        Computed("rate", ("lr", "stages.lr"), f"{values[0]:.3g} to {values[-1]:.3g}, peak {max(values):.3g}"),
        Computed("rates", (), digest(rates)[:16]),
        Computed(
            "mix",
            ("mix", "stages.mix", "stages.extra_sources", "stages.replay"),
            {domain: str(share) for domain, share in span.shares.items()},
        ),
        Computed(
            "shape",
            ("init_from.after", "stages.until", "stages.for", "stages.seq_len", "stages.batch"),
            [[segment.start, segment.seq_len, segment.batch, segment.steps] for segment in span.segments],
        ),
        Computed(
            "average", ("stages.weight_averaging",), str(stage.weight_averaging) if stage.weight_averaging else None
        ),
        Computed(
            "select",
            ("stages.select", "evaluate.val_documents", "evaluate.val_interval"),
            scored if stage.select == "best" else None,
        ),
    ]
    if stream is not None:
        computed.append(Computed("stream", STREAM, stream))
    else:
        computed.append(Computed("chunk_tokens", ("tokens.chunk_tokens",), recipe.chunk_tokens))
    return parameters(recipe, "checkpoint", *computed, stage=stage)


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
    """Return the parameters that decide the scores of a model by `evaluate.suite`; `suite_inputs` has the others."""
    return parameters(
        recipe,
        "evaluation",
        Computed("suite", ("evaluate.suite", "evaluate.final", "evaluate.deferred_suite"), recipe.evaluate.suite),
        _weights(recipe),
        Computed("longest", ("stages.seq_len",), recipe.longest_sequence),
        Computed("tasks", ("evaluate.data", "evaluate.tasks", "evaluate.needles"), None),
    )


def gate(recipe: Recipe, short: int | None, needle: int | None) -> dict[str, Any]:
    """Return the parameters of the scores of a gate with a window of `short` and haystacks of `needle` tokens."""
    return parameters(
        recipe,
        "gate",
        Computed("short", ("stages.gates", "stages.seq_len"), short),
        Computed("needle", (), needle),
        Computed("needles", ("evaluate.needles",), recipe.evaluate.needles if needle else None),
        _weights(recipe),
    )


def _weights(recipe: Recipe) -> Computed:
    """Return the weights of means over domains."""
    return Computed(
        "weights", ("mix", "stages.mix"), {domain: str(share) for domain, share in recipe.first_mix.items()}
    )
