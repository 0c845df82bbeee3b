"""Preflight checks: report every error that can be found before the run starts, with field, value and remedy."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from herd.llama3.evaluate.checks import check_evaluation
from herd.llama3.evaluate.held_out import nothing_held_out
from herd.llama3.recipe.data_schema import Curate
from herd.llama3.recipe.lint import placeholders
from herd.llama3.recipe.load import RecipeError
from herd.llama3.recipe.schema import Recipe, check_batches
from herd.storage.digests import sign
from herd.storage.fetch import use_fetched
from herd.storage.filesystem import is_local, local_path
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster, unused_launchers
from herd.tasks.launch.devices import device_memory, place_evaluation, processes_per_node
from herd.tasks.launch.hosts import Hosts
from herd.tasks.launch.local import excluded_here
from herd.tasks.models.start import init_from_faults, known_tokenizer, known_vocab_size, with_local_models
from herd.tasks.operate.environment import CHECKS as ENVIRONMENT
from herd.tasks.operate.environment import TRAINING, Surroundings
from herd.tasks.pipeline_steps import pipeline_steps
from herd.tasks.plan.predict import memory_faults
from herd.tasks.plan.recipe import (
    MOST_TOKENS_PER_BYTE,
    SURELY,
    conversation_shortage,
    data_shortage,
    survey_chats,
    survey_evaluation,
)
from herd.tasks.runs.records import Runs
from herd.tasks.step import reaches
from herd.tasks.tracking.prometheus import folder_faults
from herd.tasks.tracking.tensorboard import package_faults

if TYPE_CHECKING:
    from herd.llama3.data.readers.conversations import ConversationSurvey
    from herd.llama3.data.readers.sources import DomainSurvey
    from herd.llama3.tokens.tokenizer import Tokenizer

SYSTEMS = {"darwin": "macOS"}
_last_survey: dict[str, Any] = {}
"""The sources that this process surveyed last, and the result."""


class Surveyed(NamedTuple):
    """Result of the checks."""

    sources: list[DomainSurvey]
    left_out: list[str]
    """A line for each evaluation task without data."""
    conversations: list[ConversationSurvey]
    tokenizer: Tokenizer | None
    """That of a recipe with conversations, if it exists already."""
    warnings: list[str]
    """What the place of the trainer, which is another machine, seems to lack."""


def preflight(recipe: Recipe, cluster: Cluster, root: Root, until: str = "") -> Surveyed:
    """Check that the run can execute here, up to the step `until`, and survey its sources.

    Raises RecipeError, one line per fault.
    """
    run = CheckedRun(recipe, cluster, root, thorough=True, until=until)
    run_checks(run)
    faults, domains = _sources(recipe)
    conversations: list[ConversationSurvey] = []
    tokenizer, steps = known_tokenizer(root, recipe), pipeline_steps(recipe)
    try:
        conversations = survey_chats(recipe, tokenizer) if recipe.conversations else []
    except ValueError as error:
        faults = [*faults, *str(error).splitlines()]
    if not faults and reaches(steps, until, "pretrain"):
        faults = [fault for domain in domains if (fault := data_shortage(recipe, domain, MOST_TOKENS_PER_BYTE))]
        faults += conversation_shortage(recipe, conversations, SURELY)
    if not recipe.curate.validation_fraction and reaches(steps, until, "gate", "evaluate"):
        faults.append(nothing_held_out(recipe))
    if faults:
        raise RecipeError("\n".join(faults))
    return Surveyed(domains, run.left_out, conversations, tokenizer, run.warnings)


def _sources(recipe: Recipe) -> tuple[list[str], list[DomainSurvey]]:
    """Return the faults of the sources, or their survey; it is cached for the next variant of a study.

    A later change of the sources is noticed by `collect`, which compares their fingerprint.
    """
    from herd.llama3.data.readers.sources import check_sources, survey
    from herd.llama3.evaluate.suite import with_evaluation_sets

    recipe = with_evaluation_sets(recipe)
    key = (recipe.sources, recipe.curate, recipe.documents_seed)
    if _last_survey.get("key") != key:
        faults = [*check_sources(recipe), *_curation_faults(recipe.curate)]
        _last_survey.update(key=key, result=(faults, [] if faults else survey(recipe)))
    faults, domains = _last_survey["result"]
    if faults:
        _last_survey.clear()  # the user may repair it
    return faults, domains


@dataclass(frozen=True)
class CheckedRun:
    """What the checks look at."""

    recipe: Recipe
    cluster: Cluster
    root: Root
    thorough: bool
    """Whether all rows of evaluation data are checked, remote ones too, and not the first local rows only."""
    until: str = ""
    """The last step to do; empty: all."""
    left_out: list[str] = field(default_factory=list)
    """A line for each evaluation task without data; filled by its check."""
    warnings: list[str] = field(default_factory=list)
    """What lacks where it may be mended before it is needed; filled by its check."""

    @cached_property
    def local_recipe(self) -> Recipe:
        """The recipe with models of the root by their folders."""
        return with_local_models(self.root, self.recipe)


class PreflightCheck(NamedTuple):
    """Finds one kind of fault. A check whose feature a run does not use is not called, so it imports nothing."""

    faults: Callable[[CheckedRun], list[str]]
    used: Callable[[CheckedRun], object] = lambda run: True


def check_run(recipe: Recipe, cluster: Cluster, root: Root, thorough: bool = False, until: str = "") -> list[str]:
    """Return a line for each evaluation task without data. From here on fetched copies of remote files are read.

    Raises RecipeError for faults that show without reading the sources, of a run that stops after the step `until`.
    With `thorough` all rows of evaluation data are read: a row without gold must not be found after days of training.
    """
    run = CheckedRun(recipe, cluster, root, thorough, until)
    run_checks(run)
    return run.left_out


def run_checks(run: CheckedRun) -> None:
    """Do all checks of `run`, which keeps what they say; raises RecipeError as `check_run` does."""
    use_fetched(run.root)
    for checks in CHECKS:
        if faults := [fault for check in checks if check.used(run) for fault in check.faults(run)]:
            raise RecipeError("\n".join(faults))


def _environment_faults(run: CheckedRun) -> list[str]:
    """Return what the surroundings lack for the steps of the run; what is another machine's is a warning."""
    place, steps = Surroundings(run.cluster, run.root, run.recipe), pipeline_steps(run.recipe)
    faults: list[str] = []
    run.warnings.extend(unused_launchers(run.cluster))
    for check in ENVIRONMENT:
        if check.since and not reaches(steps, run.until, check.since):
            continue
        for row in check.rows(place):
            slower = row.check in ("gpu", "driver") and not place.promises_gpus
            lines = run.warnings if slower or (check.since == TRAINING and not place.here) else faults
            if row.state == "fail":
                lines.append("; ".join(filter(None, (f"{row.check}: {row.what}", row.todo))))
    return faults


def _machine_faults(run: CheckedRun) -> list[str]:
    system = SYSTEMS.get(sys.platform, sys.platform)  # the trainer needs the signals and page locks of Linux
    return [f"machine: it runs {system}, and a run needs Linux; use a container, a virtual machine or WSL 2"]


def _fit_faults(run: CheckedRun) -> list[str]:
    vocab_size = known_vocab_size(run.root, run.recipe)
    return layout_faults(run.recipe, run.cluster, vocab_size) or _device_faults(run.recipe, run.cluster)


def _host_faults(run: CheckedRun) -> list[str]:
    excluded = excluded_here(Hosts(run.root).excluded())
    return [excluded] if excluded else []


def _tokenizer_faults(run: CheckedRun) -> list[str]:
    tokenizer = run.local_recipe.tokenizer.use
    if tokenizer is None or Path(tokenizer).is_file():
        return []
    return [f"tokenizer.use: {tokenizer!r} is not a file; give a tiktoken tokenizer.model, or train one"]


def _evaluation_faults(run: CheckedRun) -> list[str]:
    try:
        run.left_out.extend(check_evaluation(run.recipe, rows=None) if run.thorough else survey_evaluation(run.recipe))
    except ValueError as error:
        return str(error).splitlines()
    return []


def _root_faults(run: CheckedRun) -> list[str]:
    """Return why the root or its working folder cannot be written."""
    root, faults = run.root, []
    try:
        sign("trial", "")
    except ValueError as error:
        faults.append(str(error))
    try:
        root.local.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root.local):
            pass
    except OSError as error:
        remedy = "choose another with --root" if root.is_local else "set HERD_SCRATCH to a folder of this machine"
        faults.append(f"root: {root.local} cannot be written ({os.strerror(error.errno or 0)}); {remedy}")
    if not faults and not root.is_local:
        try:
            root.write(b"herd was here\n", "reachable")
        except (OSError, ValueError, ImportError) as error:
            faults.append(
                f"root: {root.uri} cannot be written ({type(error).__name__}: {error}); check the bucket, "
                "AWS_ENDPOINT_URL and the keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
    return faults


def layout_faults(recipe: Recipe, cluster: Cluster, vocab_size: int) -> list[str]:
    """Return unknown stages, and model, batches, sequences and nodes that do not divide as each stage's layout says."""
    faults: dict[str, None] = {}  # stages that share a layout share its faults
    for span in recipe.schedule.trained:
        stage_cluster = cluster.for_stage(span.stage.name, span.name)
        if recipe.precision == "fp8" and not stage_cluster.layout.compile:
            # By arithmetic for the 8B: 390 operations and 40 ms a layer, where bf16 takes 26 ms.
            fault = "cluster.layout.compile: false makes precision: fp8 slower than bf16; write compile: true, or bf16"
            faults[fault] = None
        for check in (
            partial(check_batches, span, stage_cluster.data_parallel),
            partial(stage_cluster.layout.check, recipe.model, vocab_size, stage_cluster.processes),
            *(partial(stage_cluster.layout.check_sequence, seq_len) for seq_len in span.lengths),
        ):
            try:
                check()
            except ValueError as error:
                faults |= dict.fromkeys(str(error).splitlines())
        for launcher, per_node in processes_per_node(stage_cluster).items():
            tp, count = stage_cluster.layout.tp, min(per_node, stage_cluster.processes)
            if count % tp:
                fault = (
                    f"cluster.layout.tp: {tp} does not divide {launcher}.processes_per_node {count}, so tensor "
                    f"parallelism would leave the node; write tp: {gcd(tp, count)}, or a multiple of {tp} as "
                    "processes_per_node"
                )
                faults[fault] = None
    known = recipe.schedule.names
    names = ", ".join(sorted(known))
    unknown = [
        f"cluster.stages: {name} is not a stage of the recipe; write one of {names}"
        for name in sorted(set(cluster.stages) - known)
    ]
    return [*unknown, *faults]


def _device_faults(recipe: Recipe, cluster: Cluster) -> list[str]:
    """Return the faults of models that do not fit the devices, if these are known."""
    faults = dict.fromkeys(memory_faults(recipe, cluster))
    device = device_memory(cluster)
    if recipe.evaluate.next_stage == "overlap" and cluster.launcher == "local" and device is not None and device.cuda:
        fault = "evaluate.next_stage: overlap needs other GPUs than the trainer's; take launcher: slurm, or write wait"
        faults[fault] = None
    try:
        place_evaluation(recipe, cluster)
    except ValueError as error:
        faults |= dict.fromkeys(str(error).splitlines())
    return [*faults]


def _curation_faults(curate: Curate) -> list[str]:
    """Return faults of the files that curation names: seeds, block lists, dirty words, evaluation sets."""
    from herd.llama3.data.classifiers import check_seeds
    from herd.llama3.data.filters import read_blocked
    from herd.llama3.data.wordlists import read_words

    faults = check_seeds(curate)
    checks: list[Callable[[], object]] = [lambda: read_blocked(curate), lambda: read_words(curate.dirty_words)]
    if curate.benchmarks:
        from herd.llama3.data.decontam.ngrams import check_benchmarks

        checks.append(lambda: check_benchmarks(curate.benchmarks))
    for check in checks:
        try:
            check()
        except ValueError as error:
            faults += str(error).splitlines()
    return faults


def _start_faults(run: CheckedRun) -> list[str]:
    """Return the faults of `init_from`: a checkpoint, or weights on this machine."""
    recipe, root, start = run.local_recipe, run.root, run.local_recipe.init_from
    assert start is not None
    if start.format == "checkpoint":
        return init_from_faults(open_store(root), Runs(root), recipe)
    if not is_local(start.path):
        return []
    from herd.llama3.export.convert import compare_shapes, open_source  # torch, which most recipes do not need here

    try:
        source, tokenizer = open_source(local_path(start.path), start.format), known_tokenizer(root, recipe)
        due = tokenizer.vocab_size if tokenizer else None
        compare_shapes(start, source.config, source.vocab_size, recipe.model, due)
    except ValueError as error:
        return [
            text if text.startswith("init_from.") else f"init_from.path: {text}" for text in str(error).splitlines()
        ]
    return []


CHECKS: tuple[tuple[PreflightCheck, ...], ...] = (
    (
        PreflightCheck(_machine_faults, lambda run: sys.platform != "linux"),
        PreflightCheck(lambda run: placeholders(run.recipe)),
    ),
    (
        PreflightCheck(_root_faults),
        PreflightCheck(_fit_faults),
        PreflightCheck(lambda run: folder_faults()),
        PreflightCheck(lambda run: package_faults(), lambda run: run.recipe.tracking.tensorboard),
        PreflightCheck(_tokenizer_faults, lambda run: run.recipe.tokenizer.use),
        PreflightCheck(_evaluation_faults),
        PreflightCheck(_start_faults, lambda run: run.recipe.init_from),
    ),
    (
        PreflightCheck(_environment_faults),
        PreflightCheck(_host_faults, lambda run: run.cluster.launcher == "local"),
    ),
)
"""All checks in groups; each group needs what those before it have checked, such as a root that can be read."""
