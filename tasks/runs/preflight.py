"""Everything that can be known to go wrong is refused here, before any work starts: field, value, remedy."""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llama3.evaluate.policy import check_evaluation
from llama3.model.flops import embedding_rows
from llama3.recipe.data_schema import Curate
from llama3.recipe.lint import placeholders
from llama3.recipe.load import RecipeError
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe, check_batches
from storage.filesystem import is_local, local_path
from storage.object_artifact import open_store
from storage.root import Root
from storage.signing import signed
from tasks.cluster import Cluster
from tasks.models.start import start_faults
from tasks.plan.predict import memory_faults
from tasks.plan.recipe import MOST_TOKENS_PER_BYTE, shortage, survey_evaluation
from tasks.runs.records import Runs

if TYPE_CHECKING:
    from llama3.data.readers.sources import DomainSurvey

SYSTEMS = {"darwin": "macOS"}


class Surveyed(NamedTuple):
    """What a run will find."""

    sources: list[DomainSurvey]
    left_out: list[str]
    """A line for each task of an evaluation that lacks its data."""


def preflight(recipe: Recipe, cluster: Cluster, root: Root) -> Surveyed:
    """Return what the run will find. Raises RecipeError, one line per fault, if it cannot work here."""
    left_out = check_place(recipe, cluster, root, thorough=True)
    faults, found = _sources(recipe)
    if not faults:
        faults = [fault for domain in found if (fault := shortage(recipe, domain, MOST_TOKENS_PER_BYTE))]
    if faults:
        raise RecipeError("\n".join(faults))
    return Surveyed(found, left_out)


def _sources(recipe: Recipe) -> tuple[list[str], list[DomainSurvey]]:
    """Return what is wrong with the sources, or how much is there; of the arms of a study the first one looks.

    What changes before the next arm begins, `collect` notices by the sources' fingerprint.
    """
    from llama3.data.readers.sources import check_sources, survey

    looked_at = recipe.model_dump_json(include={"sources", "curate", "data_seed"}) + str(recipe.documents_seed)
    if _looked.get("at") != looked_at:
        faults = [*check_sources(recipe), *_curation_faults(recipe.curate)]
        _looked.update(at=looked_at, found=(faults, [] if faults else survey(recipe)))
    faults, found = _looked["found"]
    if faults:
        _looked.clear()  # somebody may mend it
    return faults, found


_looked: dict[str, Any] = {}
"""What this process looked at last, and found."""


def check_place(recipe: Recipe, cluster: Cluster, root: Root, thorough: bool = False) -> list[str]:
    """Return a line for each task of an evaluation that lacks its data.

    Raises RecipeError for what shows without reading the sources: root, batches, named files. Of evaluation data the
    first rows on this machine are looked at, or with `thorough` all, wherever they lie: a row without gold must not be
    found after days of training.
    """
    if faults := [*_system_faults(), *placeholders(recipe)]:
        raise RecipeError("\n".join(faults))
    left_out, wrong = [], []
    try:
        left_out = check_evaluation(recipe, rows=None) if thorough else survey_evaluation(recipe)
    except ValueError as error:
        wrong = str(error).splitlines()
    named = [*_tokenizer_faults(recipe), *wrong, *_start_faults(recipe, root)]
    if faults := [*_root_faults(root), *_layout_faults(recipe, cluster), *named]:
        raise RecipeError("\n".join(faults))
    return left_out


def _system_faults() -> list[str]:
    """Return why no run works on this operating system: the trainer's signals and the locks of pages are Linux's."""
    if sys.platform == "linux":
        return []
    system = SYSTEMS.get(sys.platform, sys.platform)
    return [f"machine: it runs {system}, and a run needs Linux; use a container, a virtual machine or WSL 2"]


def _root_faults(root: Root) -> list[str]:
    """Return why the root, or the folder in which it is worked on, cannot be written."""
    faults = []
    try:
        signed("trial", "")
    except ValueError as error:
        faults.append(str(error))
    try:
        root.local.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root.local):
            pass
    except OSError as error:
        remedy = "choose another with --root" if root.is_local else "set HERD_SCRATCH to a folder of this machine"
        faults.append(f"root: {root.local} cannot be written ({os.strerror(error.errno or 0)}); {remedy}")
    return faults or _bucket_faults(root)


def _bucket_faults(root: Root) -> list[str]:
    """Return why an object store cannot be used: found out by writing a word and reading it back."""
    if root.is_local:
        return []
    try:
        root.write(b"herd was here\n", "reachable")
    except (OSError, ValueError, ImportError) as error:
        return [
            f"root: {root.uri} cannot be written ({type(error).__name__}: {error}); check the bucket, AWS_ENDPOINT_URL "
            "and the keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ]
    return []


def _layout_faults(recipe: Recipe, cluster: Cluster) -> list[str]:
    """Return how model, batches and sequences do not split over the processes of each stage."""
    rows = embedding_rows(recipe)
    faults: dict[str, None] = {}  # stages that share a layout share its faults
    for span in Schedule(recipe).trained:
        place = cluster.at(span.stage.name, span.name)
        for check in (
            partial(check_batches, span, place.data_parallel),
            partial(place.layout.check, recipe.model, rows, place.processes),
            *(partial(place.layout.check_sequence, seq) for seq in span.lengths),
        ):
            try:
                check()
            except ValueError as error:
                faults |= dict.fromkeys(str(error).splitlines())
    wrong = [*_unknown_stages(recipe, cluster), *faults]
    return wrong or memory_faults(recipe, cluster)


def _unknown_stages(recipe: Recipe, cluster: Cluster) -> list[str]:
    known = Schedule(recipe).names
    odd = sorted(set(cluster.stages) - known)
    return [f"cluster.stages: {name} is no stage; there are {', '.join(sorted(known))}" for name in odd]


def _curation_faults(curate: Curate) -> list[str]:
    """Return what is wrong with the files that curation names: seeds, block lists, dirty words, evaluation sets."""
    from llama3.data.classifiers import check_seeds
    from llama3.data.decontam.ngrams import check_benchmarks
    from llama3.data.filters import read_blocked
    from llama3.data.wordlists import read_words

    faults = check_seeds(curate)
    for check in (
        lambda: read_blocked(curate),
        lambda: read_words(curate.dirty_words),
        lambda: check_benchmarks(curate.decontaminate),
    ):
        try:
            check()
        except ValueError as error:
            faults += str(error).splitlines()
    return faults


def _tokenizer_faults(recipe: Recipe) -> list[str]:
    if not recipe.tokenizer.use or Path(recipe.tokenizer.use).is_file():
        return []
    return [f"tokenizer.use: {recipe.tokenizer.use!r} is not a file; give a tiktoken tokenizer.model, or train one"]


def _start_faults(recipe: Recipe, root: Root) -> list[str]:
    """Return what is wrong with what `start` names: a checkpoint, or weights as far as those on this machine tell."""
    if recipe.start is None:
        return []
    if recipe.start.format == "checkpoint":
        return start_faults(open_store(root), Runs(root), recipe)
    if not is_local(recipe.start.origin):
        return []
    from llama3.export.convert import (
        compare_shapes,
        open_source,  # imports torch, which most recipes need not wait for here
    )

    try:
        compare_shapes(recipe.start, open_source(local_path(recipe.start.origin), recipe.start.format), recipe.model)
    except ValueError as error:
        return [text if text.startswith("start.") else f"start.from: {text}" for text in str(error).splitlines()]
    return []
