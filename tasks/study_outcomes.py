"""From the runs of a study to what its analysis reads: scores, samples, tokens and operations of every arm.

All of it is read from records and artifacts. The operations are those of the model as it was trained (its own
embedding rows), not of the plan. What this gives up: an evaluation made by hand beside the run is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from llama3.evaluate.scores import SAMPLES_FILE, SCORES_FILE, Score, read_scores
from llama3.model.files import CONFIG, read_config
from llama3.model.flops import parameter_count
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from llama3.scaling.outcome import Outcome, Samples
from llama3.scaling.posed import ArmRun, Posed
from storage.artifact import Artifact, Store
from tasks.runs import RunRecord
from tasks.study_cost import training_flops


def outcomes(posed: Posed, store: Store, answers: Mapping[str, RunRecord]) -> list[Outcome]:
    """Return what the finished runs of a study came to, in the order of its arms. Raises ValueError."""
    return [outcome(posed, store, arm, answers[arm.name]) for arm in posed.runs if arm.name in answers]


def outcome(posed: Posed, store: Store, arm: ArmRun, record: RunRecord) -> Outcome:
    """Return what one run came to."""
    checkpoint, evaluation = last_artifacts(store, record, arm.recipe)
    spec, rows = read_config(checkpoint.part(f"model/{CONFIG}").parent)
    folder = evaluation.part(SCORES_FILE).parent
    scores = read_scores(folder)
    return Outcome(
        arm=arm.arm.name,
        repeat=arm.repeat,
        run=record.name,
        parameters=parameter_count(spec, rows),
        tokens=int(checkpoint.facts["end"]),
        flops=training_flops(posed, Schedule(arm.recipe).segments, spec, rows),
        scores=scores,
        samples=dict(_samples(evaluation.part(SAMPLES_FILE), scores)),
    )


def last_artifacts(store: Store, record: RunRecord, recipe: Recipe) -> tuple[Artifact, Artifact]:
    """Return checkpoint and evaluation of the run's last stage. Raises ValueError where one was deleted."""
    span, stage = Schedule(recipe).trained[-1], recipe.stages[-1].name
    return store.at(record.steps[span.name].artifact), store.at(record.steps[f"evaluate-{stage}"].artifact)


def _samples(path: Path, scores: Mapping[str, Score]) -> Iterator[tuple[str, Samples]]:
    """Yield the samples of each score that has some, in the order of their ids."""
    table = pq.read_table(path, columns=["key", "id", "numerator", "denominator", "group"])
    keys = np.array(table["key"].to_pylist())
    for key in sorted(set(keys.tolist()) & set(scores)):
        own = table.filter(keys == key).sort_by("id")
        groups = tuple(own["group"].to_pylist())
        yield (
            key,
            Samples(
                tuple(own["id"].to_pylist()),
                own["numerator"].to_numpy().astype(np.float64),
                own["denominator"].to_numpy().astype(np.float64),
                groups if len(set(groups)) > 1 and not key.startswith("eval/bpb") else (),
            ),
        )


def shared(posed: Posed, store: Store, answers: Mapping[str, RunRecord]) -> list[tuple[str, str, str, int]]:
    """Return the artifacts behind the answers, as (step, artifact, run that made it, runs that stand on it).

    Those that several runs stand on were made once: this is the proof that arms share them.
    """
    uses: dict[tuple[str, str], set[str]] = {}
    for record in {record.name: record for record in answers.values()}.values():
        for step, made in record.steps.items():
            uses.setdefault((step, made.artifact), set()).add(record.name)
    return [(step, label, _maker(store, label), len(runs)) for (step, label), runs in uses.items()]


def _maker(store: Store, label: str) -> str:
    try:
        return store.at(label).manifest.made_by
    except ValueError:  # deleted by retention
        return ""


def other_data(store: Store, answers: Mapping[str, RunRecord], arms: Sequence[ArmRun]) -> list[str]:
    """Return a line for each arm that trained on other token shards than the first, though its recipe asks the same.

    Then the sources changed between the runs, and the arms differ in more than the study says.
    """
    first: dict[str, tuple[str, str]] = {}
    lines = []
    for arm in arms:
        record = answers.get(arm.name)
        if record is None or "tokenise" not in record.steps:
            continue
        label, asked = record.steps["tokenise"].artifact, _data_asked(arm.recipe)
        name, other = first.setdefault(asked, (arm.name, label))
        if other != label:
            lines.append(
                f"{arm.name}: was trained on {label}, {name} on {other}, from equal recipes: the sources changed "
                f"between them; run it again with herd rerun {record.name} --from collect"
            )
    return lines


def _data_asked(recipe: Recipe) -> str:
    fields = recipe.model_dump_json(include={"sources", "curate", "tokenizer", "tokens", "data_seed"})
    return f"{fields} {recipe.model_dump_json(include={'mix'}) if recipe.tokenizer.train is None else ''}"
