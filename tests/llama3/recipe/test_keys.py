"""Each field of a recipe changes the keys of the artifacts that it says it decides, and no other."""

from __future__ import annotations

import json
from copy import copy
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import numpy as np
import pytest
import yaml
from pydantic import create_model

from herd.llama3.evaluate.suite import suite_inputs, with_evaluation_sets, with_suite
from herd.llama3.recipe import keys
from herd.llama3.recipe.base import Decided, Decides, Section, chosen_fields, decides
from herd.llama3.recipe.frozen import PAST, frozen_fields
from herd.llama3.recipe.load import apply_override, digest, load_recipe
from herd.llama3.recipe.reference import sections
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.conversations import ConversationStream
from herd.llama3.tokens.stream import TokenStream
from tests.llama3.recipe.effect_samples import write_suites
from tests.llama3.recipe.field_changes import FIELDS, PLACES, RICH, VARIANTS, changes, rich
from tests.llama3.train.train_samples import write_tokens

KINDS: tuple[Decided, ...] = get_args(Decided)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suites")
    write_suites(folder)
    return folder


def shards(workspace: Path, recipe: Recipe) -> Path:
    """Return a folder with token shards of the datasets of `recipe`."""
    folder = workspace / f"tokens-{digest(keys.tokens(recipe))[:8]}"
    if not folder.exists():
        folder.mkdir()
        write_tokens(folder, recipe)
    return folder


def chats(workspace: Path, recipe: Recipe) -> Path:
    """Return a folder with packed conversations of the lengths of `recipe`."""
    folder = workspace / f"chats-{digest(recipe.sft_lengths)[:8]}"
    folder.mkdir(exist_ok=True)
    packing = {"sequences": 7, "padding": 0, "cut": 0, "dropped": 0}
    (folder / "conversations.json").write_text(json.dumps({"packing": {str(n): packing for n in recipe.sft_lengths}}))
    for length in recipe.sft_lengths:
        for column in ("tokens", "targets", "segments"):
            np.save(folder / f"{column}-{length}.npy", np.zeros((7, length), np.int32))
    return folder


def run_keys(workspace: Path, recipe: Recipe) -> dict[Decided, Any]:
    """Return what the keys of all artifacts of a run have of its recipe, and the rules of its promotion."""
    schedule, stream = Schedule(recipe), TokenStream(shards(workspace, recipe), recipe)
    checkpoints, gates = [], []
    for span in schedule.trained:
        tuned = span.stage.kind == "sft"
        data = ConversationStream(chats(workspace, recipe), stream, span) if tuned else stream
        checkpoints.append(keys.checkpoint(recipe, span, data.identity(span.start, span.end)))
        if span.stage.gates:
            first = next(at for at, segment in enumerate(schedule.segments) if segment.stage == span.stage.name)
            short = schedule.segments[first - 1].seq_len if "short-context" in span.stage.gates else None
            gates.append(keys.gate(recipe, short, span.lengths[-1] if "needle" in span.stage.gates else None))
    section = recipe.evaluate
    judged = [with_suite(recipe, name) for name in (section.suite, section.final, section.deferred_suite) if name]
    start = recipe.init_from
    return {
        "collected": keys.collected(recipe),
        "annotated": keys.annotated(recipe),
        "curated": keys.curated(with_evaluation_sets(recipe)),
        "tokenizer": keys.tokenizer(recipe),
        "tokens": keys.tokens(recipe),
        "conversations": keys.conversations(recipe),
        "weights": keys.weights(recipe, start.path, 556) if start and not start.is_checkpoint else None,
        "checkpoint": checkpoints,
        "evaluation": [(keys.evaluation(each), suite_inputs(each)) for each in judged],
        "gate": gates,
        "promotion": chosen_fields(recipe, lambda _, mark: "promotion" in mark.kinds),
    }


def past(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the frozen fields inside each stage."""
    return [frozen_fields(recipe, span.end - span.segments[-1].batch) for span in Schedule(recipe).spans]


@lru_cache
def described(workspace: Path, overrides: tuple[str, ...]) -> tuple[Recipe, dict[Decided, Any], list[dict[str, Any]]]:
    recipe = rich(workspace, *overrides)
    return recipe, run_keys(workspace, recipe), past(recipe)


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_changes_the_keys_that_it_says_and_no_other(path: str, workspace: Path) -> None:
    base = next((given for lacking, given in VARIANTS.items() if f"{path}.".startswith(f"{lacking}.")), ())
    mark, changed, moved = FIELDS[path], set[str](), False
    before, keys_before, past_before = described(workspace, base)
    for change in changes(path, before):
        after = rich(workspace, *base, *change.split(" & "))
        assert after != before, change
        keys_after = run_keys(workspace, after)
        changed |= {kind for kind in KINDS if keys_after[kind] != keys_before[kind]}
        moved |= past(after) != past_before
    assert changed == set(mark.kinds)
    assert moved == decides_tokens(mark)


def decides_tokens(mark: Decides) -> bool:
    return bool(PAST & set(mark.kinds)) and mark.since != "never"


@pytest.mark.parametrize("section", sections(Recipe), ids=lambda section: section.__name__)
def test_a_field_that_does_not_say_what_it_decides_is_refused(section: type[Section]) -> None:
    with pytest.raises(TypeError, match=r"^Forgotten\.label_smoothing: does not say .* write label_smoothing: Annot"):
        create_model("Forgotten", __base__=section, label_smoothing=(float, 0.0))


PLANTED: dict[str, tuple[Decides, ...]] = {
    "": (decides("checkpoint"), decides("collected"), decides("promotion"), decides("nothing")),
    "sources": (decides("collected"), decides("curated", "tokens")),
    "conversations": (decides("conversations"),),
    "curate": (decides("collected"), decides("curated")),
    "curate.lines": (decides("annotated"),),
    "curate.quality": (decides("curated"),),
    "curate.scores": (decides("annotated"),),
    "tokenizer.train": (decides("tokenizer"),),
    "tokens": (decides("tokens"), decides("checkpoint")),
    "model": (decides("checkpoint"),),
    "model.rope_scaling": (decides("checkpoint"),),
    "lr": (decides("checkpoint"),),
    "lr.cosine": (decides("checkpoint"),),
    "optimizer": (decides("checkpoint"),),
    "stages": (decides("checkpoint", since="stage"), decides("checkpoint", since="never"), decides("evaluation")),
    "spikes": (decides("checkpoint"), decides("nothing")),
    "evaluate": (decides("evaluation"), decides("gate"), decides("checkpoint", since="never")),
    "promote": (decides("promotion"),),
}
"""Section -> what new fields in it decide, of which no other code knows."""


def with_field(model: type[Section], path: str, mark: Decides) -> type[Section]:
    """Return the model with a field `planted` in the section `path`."""
    if not path:
        return create_model(model.__name__, __base__=model, planted=(Annotated[float, mark], 0.0))
    name, _, rest = path.partition(".")
    field = model.model_fields[name]

    def planted(annotation: Any) -> Any:
        if isinstance(annotation, type) and issubclass(annotation, Section):
            return with_field(annotation, rest, mark)
        inner = tuple(planted(each) for each in get_args(annotation))
        origin = get_origin(annotation)
        return annotation if not inner else Union[inner] if origin in (Union, UnionType) else origin[inner]  # noqa: UP007

    return create_model(model.__name__, __base__=model, **{name: (planted(field.annotation), copy(field))})  # type: ignore[call-overload]


@pytest.mark.parametrize(("path", "mark"), [(path, mark) for path, marks in PLANTED.items() for mark in marks])
def test_a_new_field_is_in_the_keys_and_the_past_as_it_says(path: str, mark: Decides, workspace: Path) -> None:
    model, place = with_field(Recipe, path, mark), f"{PLACES.get(path, path)}.planted".lstrip(".")
    without, planted = (yaml.safe_load(RICH.read_text().replace("{workspace}", str(workspace))) for _ in range(2))
    apply_override(planted, f"{place}=0.5")
    before, after = model.model_validate(without), model.model_validate(planted)
    old, new = run_keys(workspace, before), run_keys(workspace, after)
    assert {kind for kind in KINDS if old[kind] != new[kind]} == set(mark.kinds)
    assert (past(before) != past(after)) == decides_tokens(mark)


TINY = Path("tests/e2e/tiny.yaml")
NEW = "sources.math=[{uri: installed, limit: 500kB, system: false}, {uri: installed, limit: 1MB%s}]"
BUCKET = [
    f'sources.{domain}=[{{uri: "s3://<your-bucket>/{folder}/*.parquet"}}]'
    for domain, folder in {"general": "web", "math": "math", "code": "code", "multilingual": "multilingual"}.items()
]
SHOP = {
    "general": '{uri: "s3://<your-bucket>/shop/english/*.parquet", weight: 5}, '
    '{uri: "s3://<your-bucket>/web/*.parquet", weight: 3}',
    "multilingual": '{uri: "s3://<your-bucket>/shop/multilingual/*.parquet", weight: 5}, '
    '{uri: "s3://<your-bucket>/multilingual/*.parquet", weight: 3}',
}
WORDS = {
    "domain-adaptation": [*BUCKET, *(f"sources.{domain}=[{sources}]" for domain, sources in SHOP.items())],
    "llama3-405b": [*BUCKET, "curate.decontaminate=[]", "evaluate.final=full"],
}
"""Recipe -> the sources that it had when its digests were written down."""
KNOWN = {
    TINY: "bff290 fd0443 da85cc aa860c ed8fef a5d9fe 61f13c",
    Path("recipes/domain-adaptation.yaml"): "75abe0 b0155e 2ac8a4 d541ef 777c31 49843d e9aa7a",
    Path("recipes/quickstart.yaml"): "8e44c6 a30380 712a43 3d277f ed8fef 5b6301 c6fbe1",
    Path("recipes/llama3-405b.yaml"): "b5818f b0155e 2ac8a4 cf5d19 ed8fef 5c3cd8 7cd715",
}
"""Recipe -> collected, annotated, curated, tokenizer, tokens, evaluation, first stage.

Other digests would make every artifact there is again. Last changed when math got no rule that drops LaTeX for its
repeated lines.
"""


@pytest.mark.parametrize("path", KNOWN, ids=lambda path: path.stem)
def test_the_keys_of_shipped_recipes_are_what_they_always_were(path: Path) -> None:
    recipe = load_recipe(path, WORDS.get(path.stem, []))
    steps = (keys.collected, keys.annotated, keys.curated, keys.tokenizer, keys.tokens, keys.evaluation)
    made = [*(parameters(recipe) for parameters in steps), keys.checkpoint(recipe, Schedule(recipe).spans[0])]
    assert " ".join(digest(parameters)[:6] for parameters in made) == KNOWN[path]


def test_a_name_decides_the_shards_and_not_what_is_read() -> None:
    without, gsm, apps = (load_recipe(TINY, [NEW % name]) for name in ("", ", name: gsm", ", name: apps"))
    assert keys.collected(without) == keys.collected(gsm) == keys.collected(apps)
    assert len({digest(keys.tokens(recipe)) for recipe in (without, gsm, apps)}) == 3


def test_equal_shares_learn_one_tokenizer_whatever_their_mix_is_called() -> None:
    changed = ["mix.base={general: 40%, math: 35%, code: 17%, multilingual: 8%}"]
    first = ["mix.first={general: 50%, math: 25%, code: 17%, multilingual: 8%}", "tokenizer.train.mix=first"]
    plain, other, same = (load_recipe(TINY, words) for words in ([], changed, [*changed, *first]))
    assert keys.tokenizer(plain) == keys.tokenizer(same) != keys.tokenizer(other)
