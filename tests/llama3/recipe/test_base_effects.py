"""Each field of a recipe changes the artifacts that it says it decides: not only their keys, but what they are.

What a step reads of the recipe is recorded. A field that it reads, and that neither its key nor that of an input has,
must change nothing. A field that it does not read cannot change anything.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from herd.llama3.data.annotate import COUNTS, annotate
from herd.llama3.data.collect import collect
from herd.llama3.data.curate import curate
from herd.llama3.data.filters import outcome_sql
from herd.llama3.data.work_items import run_serial
from herd.llama3.evaluate.evaluate import evaluate
from herd.llama3.evaluate.gate import decide
from herd.llama3.evaluate.long_context_gate import METRICS, score_long_context
from herd.llama3.evaluate.scores import read_scores
from herd.llama3.evaluate.suite import stage_suite_name, with_evaluation_sets, with_suite
from herd.llama3.export.convert import convert, import_weights
from herd.llama3.model.files import read_config
from herd.llama3.recipe import keys
from herd.llama3.recipe.base import Decided
from herd.llama3.recipe.load import load_recipe, to_yaml
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.conversations import HELD_OUT, prepare_conversations
from herd.llama3.tokens.shards import tokenize
from herd.llama3.tokens.tokenizer import Tokenizer, make_tokenizer, train_tokenizer
from herd.llama3.train.job import TrainJob
from herd.tasks.stages.evaluate import _ngram_baseline, write_validation_rows
from herd.tasks.stages.gate import CandidateModel, ChampionModel, Override
from herd.tasks.stages.gate import decide as judge
from tests.dist import run_in_turn
from tests.llama3.export.export_samples import herd_folder, tokenizer
from tests.llama3.recipe.effect_samples import contents, outcome, train_recorded, write_sources, write_suites
from tests.llama3.recipe.field_changes import FIELDS, VARIANTS, changes, rich
from tests.llama3.recipe.recorded import recorded_fields
from tests.llama3.train.train_samples import weights

CHECKOUT = Path(__file__).parents[3]
CODER = tokenizer()
BASE = (
    "sources.general=[{uri: web/*.jsonl}]",
    "sources.code=[{uri: code.jsonl}, {uri: more.jsonl}]",
    "conversations=[{uri: chats/*.jsonl}, {uri: problems, limit: 20}]",
    "curate.validation_fraction=40%",
    "curate.lines.max_copies=2",
    "tokenizer.train.sample=4kB",
    "stages.long.seq_len=[16, 512]",
    "stages.long.batch=512 tokens",
    "stages.anneal.batch=256 tokens",
    "stages.chat.seq_len=128",
    "stages.anneal.select=average",
    "tokens.chunk_tokens=16 tokens",
    "model.layers=1",
    "model.dim=16",
    "model.ffn=16",
    "evaluate.on_missing_data=skip",
    "evaluate.final=null",
    "evaluate.deferred_suite=null",
    "evaluate.questions=4",
    "evaluate.needles=11",
)
"""The rich recipe with fewer files, text to evaluate on, room for needles, and one suite."""
GENERATED = "sources.math=[{uri: installed, limit: 20kB, system: false}, {uri: gsm.jsonl, name: gsm}]"
BROKEN = ("sources.general=[{uri: broken/*.jsonl}]", "curate.max_lost=90%", "curate.on_error=skip")
EFFECTS: dict[str, tuple[str, ...]] = {
    "seed": (GENERATED, "seed=2"),
    "data_seed": (GENERATED, "data_seed=5"),
    "precision": ("precision=bf16",),
    "sources.uri": ("sources.general.0.uri=shop/*.jsonl",),
    "sources.format": ("sources.general.0.format=txt",),
    "sources.ignore": ("sources.general.0.ignore=[b.jsonl]",),
    "sources.text": ("sources.general.0.text=title",),
    "sources.language": ("sources.general.0.language=fr",),
    "sources.license": ("sources.general.0.license=MIT",),
    "sources.limit": ("sources.general.0.limit=2kB",),
    "sources.name": ("sources.code.1.name=more",),
    "sources.weight checkpoint": (
        "sources.general=[{uri: web/*.jsonl, weight: 5}, {uri: shop/*.jsonl, weight: 3}]",
        "sources.general.0.weight=60",
    ),
    "conversations.uri": ("conversations.0.uri=chats/a.jsonl",),
    "conversations.ignore": ("conversations.0.ignore=[b.jsonl]",),
    "conversations.license": ("conversations.0.license=MIT",),
    "conversations.limit": ("conversations.0.limit=3",),
    "curate.on_error": (*BROKEN, "curate.on_error=fail"),
    "curate.max_lost": (*BROKEN, "curate.max_lost=0.1%"),
    "curate.extractor": ("sources.general=[{uri: pages/*.html}]", "curate.extractor=trafilatura"),
    "curate.block": ("curate.block=[blocked.txt]",),
    "curate.lines.bucket_documents": ("curate.lines.bucket_documents=2",),
    "curate.lines.ngram": ("curate.lines.ngram=20",),
    "curate.scores.good": ("curate.scores.0.good=[a.jsonl]",),
    "curate.scores.bad": ("curate.scores.0.bad=[b.jsonl]",),
    "curate.scores.min": ("curate.scores.0.min=0.02",),
    "curate.quality.rules": ("curate.quality.rules=[fineweb]",),
    "curate.quality_for": ("curate.quality_for={general: {min_chars: 500}, code: {max_divergence: 2}}",),
    "curate.topics.caps": ("curate.topics.caps.a=5%",),
    "tokenizer.train.sample": ("tokenizer.train.sample=2kB",),
    "tokenizer.train.mix": ("tokenizer.train.mix=late",),
    "tokenizer.train.pattern": ("tokenizer.train.pattern=gpt2",),
    "tokenizer.use": ("tokenizer={use: t.model}",),
    "tokens.dtype": ("tokens.dtype=uint32",),
    "tokens.chunk_tokens": ("tokens.chunk_tokens=32 tokens",),
    "mix tokenizer": ("mix.base={general: 10%, math: 65%, code: 17%, multilingual: 8%}",),
    "init_from.path": (*VARIANTS["init_from.path"], "init_from.path=v"),
    "stages.kind checkpoint": (
        "stages.anneal={name: anneal, kind: sft, for: 1Ki, seq_len: 128, mix: late, batch: 256 tokens}",
    ),
    "stages.kind conversations": (
        "stages.anneal={name: anneal, kind: sft, for: 1Ki, seq_len: 256, mix: late, batch: 256 tokens}",
    ),
    "stages.seq_len conversations": ("stages.chat.seq_len=256",),
    "stages.select": ("stages.anneal.select=best",),
    "evaluate.val_interval": ("stages.anneal.select=best", "evaluate.val_interval=never"),
    "evaluate.on_missing_data": ("evaluate.final={workspace}/last.yaml", "evaluate.on_missing_data=refuse"),
    "evaluate.documents": ("evaluate.documents=2",),
    "evaluate.limit": ("evaluate.limit=2",),
}
"""Field, or field and kind -> overrides, of which the last is the change, where that of its keys has no effect here."""
REFUSED = {
    "init_from.format": "lacks consolidated",
    "evaluate.on_missing_data": "gone.jsonl",
    "curate.dedup.jaccard": "loosen curate.dedup",
}
"""Field whose change is refused -> part of the message; that of another field names it."""
EXEMPT: dict[tuple[str, Decided], str] = {
    ("sources.system", "collected"): "reads what is installed here: tests/llama3/data/demo/test_installed.py",
    ("sources.contents", "collected"): "is remote: tests/llama3/data/test_collect_s3.py",
    ("sources.name", "checkpoint"): "names the shards: a trainer refuses those of another name",
    ("init_from.after", "checkpoint"): "decides which stages are trained: tests/tasks/stages/test_train_init.py",
    (
        "evaluate.val_documents",
        "checkpoint",
    ): "decides if documents disagree: tests/llama3/train/test_averaging.py",
}
"""Field and kind whose effect is seen elsewhere -> why, and where."""


# The steps


def make_collected(recipe: Recipe, _: list[Path], folder: Path) -> Any:
    return collect(recipe, folder), contents(folder / "text"), pq.read_table(folder / "skipped.parquet").to_pylist()


def make_annotated(recipe: Recipe, inputs: list[Path], folder: Path) -> Any:
    return annotate(recipe, *inputs, folder, run_serial), contents(folder)


def make_curated(recipe: Recipe, inputs: list[Path], folder: Path) -> Any:
    metadata = curate(with_evaluation_sets(recipe), *inputs, folder, folder.with_suffix(".scratch"))
    return metadata, contents(folder)


def make_vocabulary(recipe: Recipe, inputs: list[Path], folder: Path) -> Any:
    return make_tokenizer(recipe, *inputs, folder), contents(folder)


def make_tokens(recipe: Recipe, inputs: list[Path], folder: Path) -> Any:
    return tokenize(recipe, *inputs, folder), contents(folder)


def make_conversations(recipe: Recipe, inputs: list[Path], folder: Path) -> Any:
    return prepare_conversations(recipe, Tokenizer.load(*inputs), folder), contents(folder)


def make_checkpoint(recipe: Recipe, inputs: list[Path], folder: Path) -> Any:
    """Train all stages; or, from the checkpoints of the unchanged recipe, that whose key the change changes.

    If it changes no key, that is the stage with the most settings.
    """
    curated, vocabulary, tokens, conversations = inputs[:4]
    spans, trained = recipe.schedule.trained, folder
    if len(inputs) > 4:
        trained = inputs[4]
        unchanged = load_recipe(trained / "recipe.yaml")
        old = [keys.checkpoint(unchanged, span) for span in unchanged.schedule.trained]
        changed = [span for span in spans if keys.checkpoint(recipe, span) not in old]
        spans = changed[:1] or [recipe.schedule.span("anneal")]
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    names = [span.name for span in recipe.schedule.trained]
    read: set[str] = set()
    for span in spans:
        number, work = names.index(span.name), folder / span.name
        write_validation_rows(recipe, curated, vocabulary, work)
        job = TrainJob(
            recipe=folder / "recipe.yaml",
            stage=span.name,
            tokens=tokens,
            conversations=conversations if span.stage.kind == "sft" else None,
            parent=trained / names[number - 1] / "result/state" if number else None,
            work=work,
            micro_batch=4,
            device="cpu",
        )
        path = folder / f"{span.name}.json"
        path.write_text(job.model_dump_json())
        status, fields = run_in_turn(train_recorded, path)
        assert status == 0, path.with_suffix(".log").read_text()
        read |= fields
        for file in vocabulary.iterdir():
            (work / "result/model" / file.name).write_bytes(file.read_bytes())
    return {names.index(span.name): weights(folder / f"{span.name}.json") for span in spans}, read


def make_evaluation(recipe: Recipe, inputs: list[Path], folder: Path) -> Any:
    """Score the last model by each suite of the recipe."""
    curated, checkpoints, conversations = inputs
    model = checkpoints / "chat/result/model"
    suites = [stage_suite_name(recipe, stage.name) for stage in recipe.stages]
    results = []
    for suite in dict.fromkeys(filter(None, [*suites, recipe.evaluate.deferred_suite])):
        target = folder / str(len(results))
        target.mkdir()
        named = with_suite(recipe, suite)
        metadata = evaluate(named, model, model, curated, target, conversations=conversations / HELD_OUT, threads=1)
        results.append((metadata, _ngram_baseline(named, curated), contents(target)))
    return results


def make_gate(recipe: Recipe, inputs: list[Path], folder: Path) -> Any:
    """Score the checkpoints before and after the stage `long`, and decide."""
    curated, checkpoints = inputs
    schedule, scores = recipe.schedule, []
    span = next(span for span in schedule.trained if span.stage.gates and span.lengths[-1] > 16)
    first = next(number for number, segment in enumerate(schedule.segments) if segment.stage == span.stage.name)
    short = schedule.segments[first - 1].seq_len if "short-context" in span.stage.gates else None
    needle = span.lengths[-1] if "needle" in span.stage.gates else None
    for name in ("main", "long-512"):
        model, target = checkpoints / name / "result/model", folder / name
        score_long_context(recipe, model, curated, target, short=short, needle=needle)
        scores.append(read_scores(target))
    return decide({METRICS[gate]: rule for gate, rule in span.stage.gates.items()}, scores[1], scores[0])


def make_weights(recipe: Recipe, _: list[Path], folder: Path) -> Any:
    assert recipe.init_from is not None
    import_weights(recipe.init_from, folder / "model", recipe.model, CODER.vocab_size)
    return read_config(folder / "model")[0].shape, contents(folder / "model", "*.safetensors")


def make_promotion(recipe: Recipe, inputs: list[Path], _: Path) -> Any:
    candidate = CandidateModel("rich-1", "rich", "checkpoint/rich", "sha256", 1, read_scores(inputs[0] / "0"), [])
    return judge(candidate, ChampionModel("", ()), recipe.promote, Override(), "noon")


STEPS: dict[Decided, tuple[tuple[Decided, ...], Callable[[Recipe, list[Path], Path], Any]]] = {
    "collected": ((), make_collected),
    "annotated": (("collected",), make_annotated),
    "curated": (("collected", "annotated"), make_curated),
    "tokenizer": (("curated",), make_vocabulary),
    "tokens": (("curated", "tokenizer"), make_tokens),
    "conversations": (("tokenizer",), make_conversations),
    "checkpoint": (("curated", "tokenizer", "tokens", "conversations"), make_checkpoint),
    "evaluation": (("curated", "checkpoint", "conversations"), make_evaluation),
    "gate": (("curated", "checkpoint"), make_gate),
    "weights": ((), make_weights),
    "promotion": (("evaluation",), make_promotion),
}
"""Kind of artifact -> the kinds that it is made from, and what makes it."""


@dataclass
class Chain:
    """Makes artifacts in a folder, each from those of the unchanged recipe."""

    folder: Path
    made: dict[tuple[Any, ...], tuple[Path, Any]] = field(default_factory=dict)
    read: dict[Decided, set[str]] = field(default_factory=dict)
    """Fields that the steps of each kind have read so far."""

    def recipe(self, base: tuple[str, ...], changed: tuple[str, ...] = ()) -> Recipe:
        return rich(self.folder, *BASE, *base, *changed)

    def result(self, kind: Decided, base: tuple[str, ...], changed: tuple[str, ...] = ()) -> Any:
        """Return what is in the artifact of the recipe with `base` and `changed`, or its error; made once."""
        if (key := (kind, base, changed)) not in self.made:
            needs, make = STEPS[kind]
            recipe, inputs = self.recipe(base, changed), [self.artifact(each, base) for each in needs]
            if kind == "checkpoint" and changed:
                inputs.append(self.artifact(kind, base))
            target = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=self.folder))
            with recorded_fields() as read:
                result = outcome(lambda: make(recipe, inputs, target))
            if kind == "checkpoint":  # another process trains
                result, read = result
            self.made[key] = target, result
            self.read.setdefault(kind, set()).update(read)
        return self.made[key][1]

    def artifact(self, kind: Decided, base: tuple[str, ...]) -> Path:
        """Return the folder of the artifact of the unchanged recipe."""
        result = self.result(kind, base)
        assert not isinstance(result, str), result
        return self.made[kind, base, ()][0]

    def differs(self, path: str, kind: Decided, base: tuple[str, ...], changed: tuple[str, ...]) -> bool:
        """Return whether the change has an effect on the artifact."""
        self.artifact(kind, base)
        before, after = self.result(kind, base), self.result(kind, base, changed)
        if isinstance(after, str):  # refused, because of this field
            assert REFUSED.get(path, path.rpartition(".")[2]) in after, after
        if kind == "checkpoint":  # one stage of it
            before = {number: before[number] for number in after}
        return bool(after != before)

    def changes(self, path: str, kind: Decided) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Yield overrides without and with another value of the field."""
        if (chosen := EFFECTS.get(f"{path} {kind}", EFFECTS.get(path))) is not None:
            yield chosen[:-1], chosen[-1:]
        else:
            # a model is also the shape of imported weights, which the first stage does not need
            known = VARIANTS if kind != "checkpoint" or not path.startswith("model.") else {}
            base = next((given for lacking, given in known.items() if f"{path}.".startswith(f"{lacking}.")), ())
            for change in changes(path, self.recipe(base)):
                yield base, tuple(change.split(" & "))


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    folder, before = tmp_path_factory.mktemp("effects"), Path.cwd()
    write_sources(folder)
    write_suites(folder)
    train_tokenizer(["another text to learn from"] * 9, 262).save(folder / "other-tokenizer")
    (folder / "other-tokenizer/tokenizer.model").rename(folder / "t.model")
    for name, dtype in (("w", torch.float32), ("v", torch.bfloat16)):
        herd_folder(folder / f"herd-{name}", rich(folder, *BASE).model, dtype, CODER)
        convert(folder / f"herd-{name}", "herd", folder / name, "hf")
    os.chdir(folder)  # the recipe names files there
    yield Chain(folder)
    os.chdir(before)


BOUNDS = [path.rpartition(".")[2] for path in FIELDS if re.search(r"quality\.(min|max)_", path)]
# that of a curated field takes a whole curation, and tests/llama3/data tests the stages one by one
CASES = [
    pytest.param(path, kind, marks=[pytest.mark.slow] if kind == "curated" else [])
    for path, mark in FIELDS.items()
    for kind in mark.kinds
    if (path, kind) not in EXEMPT and not (kind == "curated" and path.rpartition(".")[2] in BOUNDS)
]


@pytest.mark.parametrize(("path", "kind"), CASES)
def test_a_field_changes_what_it_says_it_decides(path: str, kind: Decided, chain: Chain) -> None:
    effects = (chain.differs(path, kind, base, changed) for base, changed in chain.changes(path, kind))
    assert any(effects), f"{path} has no effect on what is {kind}"


def test_exempt_effects_name_tests_that_exist() -> None:
    named = re.findall(r"tests/\S+\.py", " ".join(EXEMPT.values()))
    assert named
    assert not [path for path in named if not (CHECKOUT / path).is_file()]


def test_code_reads_each_field() -> None:
    files = [path for package in ("llama3", "tasks", "flows") for path in (CHECKOUT / package).rglob("*.py")]
    attributes = set(re.findall(r"\.(\w+)", "".join(path.read_text() for path in files)))
    names = {path: path.rpartition(".")[2] for path in FIELDS}
    names["stages.for"] = "length"  # not a word of Python that an attribute can have
    assert not [path for path, name in names.items() if name not in attributes and name not in BOUNDS]


MEASURED = ("curate.quality.max_divergence=1000", "curate.dirty_words=[dirty.txt]", "curate.quality_for={}")
NGRAMS = {"max_top_ngram": ("top_gram", range(2, 5)), "max_duplicate_ngrams": ("duplicate_gram", range(5, 11))}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_drops_the_documents_beyond_it(name: str, chain: Chain) -> None:
    folder = chain.artifact("annotated", MEASURED) / "attributes"
    documents = pa.concat_tables([pq.read_table(path) for path in folder.iterdir()], promote_options="default")
    measured = {column: documents[column].to_numpy() for column in documents.column_names}
    measured["divergence"] = np.arange(documents.num_rows) / 8  # all 0: too few words for a reference
    documents = documents.set_column(
        documents.column_names.index("divergence"), "divergence", pa.array(measured["divergence"])
    )
    measured["dirty_words"] = measured["dirty_words"] / measured["words"]
    prefix, sizes = NGRAMS.get(name, (name.partition("_")[2], [0]))
    for size in sizes:
        column = f"{prefix}_{size}" if size else prefix
        values = measured[column]
        middle = (values.min() + values.max()) / 2
        bound = int(middle) if column in COUNTS else float(middle)
        beyond = values < bound if name.startswith("min_") else values > bound
        assert 0 < beyond.sum() < len(values), f"{column}: no document is beyond {bound}, or each; write another one"
        change = f"curate.quality.{name}={f'{{{size}: {bound}}}' if size else bound}"
        with duckdb.connect() as connection:
            connection.register("documents", documents)
            query = f"SELECT {outcome_sql(chain.recipe(MEASURED, (change,)).curate)} AS outcome FROM documents"
            outcomes = [outcome for (outcome,) in connection.execute(query).fetchall()]
        assert [outcome is not None for outcome in outcomes] == beyond.tolist()
        assert len(set(outcomes)) == 2


def in_key(path: str, kind: Decided) -> bool:
    """Return whether the key of `kind` has the field, itself or in an input; other stages are not in an input."""
    if kind in FIELDS[path].kinds:
        return True
    return not path.startswith("stages.") and any(in_key(path, needed) for needed in STEPS[kind][0])


@pytest.mark.parametrize("kind", STEPS)
def test_what_a_step_reads_is_in_its_key_or_changes_nothing(kind: Decided, chain: Chain) -> None:
    chain.artifact(kind, VARIANTS["init_from.path"] if kind == "weights" else ())
    for path in sorted(path for path in chain.read[kind] if not in_key(path, kind)):
        for base, changed in chain.changes(path, kind):
            assert not chain.differs(path, kind, base, changed), f"{kind}: {path} has an effect, and is in no key"
