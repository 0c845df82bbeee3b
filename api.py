"""What `import herd` offers: plans, runs and models from a program or a notebook, as the command `herd` has them.

A function imports what it needs when it is called. `root` is the folder or bucket of the runs; by default HERD_ROOT, or
`herd-data` in the current folder. Wrong input raises ValueError that names the field, the value and the remedy.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from herd.llama3.recipe.load import did_you_mean, to_yaml
from herd.llama3.recipe.load import load_recipe as load_recipe
from herd.llama3.recipe.schema import Recipe as Recipe
from herd.storage.processes import fix_import_path
from herd.storage.root import DEFAULT_ROOT, Root
from herd.storage.secrets import move_logins

if TYPE_CHECKING:
    from herd.llama3.evaluate.scores import Score
    from herd.llama3.model.transformer import Transformer
    from herd.llama3.tokens.tokenizer import Tokenizer
    from herd.tasks.cluster import Cluster
    from herd.tasks.plan.cluster import ClusterPlan
    from herd.tasks.plan.recipe import RunPlan
    from herd.tasks.runs.records import RunRecord

Place = str | Path | None


class LoadedModel(NamedTuple):
    """A model in memory, and its tokenizer."""

    network: Transformer
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Run:
    """A run of a recipe; everything is read from its root when it is asked for."""

    root: Root
    name: str
    """Such as quickstart-7."""

    @property
    def record(self) -> RunRecord:
        """State, verdict, steps and their artifacts, MLflow run."""
        from herd.tasks.runs.records import Runs

        return Runs(self.root).find(self.name)

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        from herd.tasks.runs.records import Runs

        return Runs(self.root).recipe(self.name)

    @property
    def model(self) -> Path:
        """The folder of the run's last checkpoint. Raises ValueError if no stage is finished."""
        from herd.tasks.models.lookup import model_folder

        return model_folder(self.root, self.name)

    def metrics(self, key: str = "train/loss") -> dict[int, float]:
        """Return the position in tokens -> the value, of the finished stages; docs/reference/metrics.md lists keys.

        Raises ValueError for a key that these stages did not record.
        """
        import pyarrow.parquet as pq

        from herd.storage.object_artifact import open_store
        from herd.tasks.runs.records import trained_stages

        values: dict[int, float] = {}
        store, record = open_store(self.root), self.record
        artifacts = [store.load(record.steps[span.name].artifact) for span in trained_stages(self.recipe, record)]
        paths = [artifact.path_of("metrics.parquet") for artifact in artifacts]
        for path in paths:
            table = pq.read_table(path, columns=["position", "value"], filters=[("key", "=", key)])
            values |= dict(zip(table["position"].to_pylist(), table["value"].to_pylist(), strict=True))
        columns = [] if values else [pq.read_table(path, columns=["key"])["key"] for path in paths]
        if keys := sorted({name for column in columns for name in column.unique().to_pylist()}):
            meant = did_you_mean(key, keys)
            raise ValueError(f"key: {self.name} has no metric {key!r}; {meant}it has {', '.join(keys)}")
        return dict(sorted(values.items()))

    def scores(self) -> dict[str, Score]:
        """Return key -> score of the run's last evaluation; empty while there is none."""
        from herd.llama3.evaluate.scores import read_scores
        from herd.storage.object_artifact import open_store
        from herd.tasks.runs.records import trained_stages

        record = self.record
        steps = [f"evaluate-{span.name}" for span in trained_stages(self.recipe, record)]
        scored = [record.steps[step].artifact for step in steps if step in record.steps]
        return read_scores(open_store(self.root).load(scored[-1]).path) if scored else {}


def plan(recipe: Recipe | str | Path, *, root: Place = None) -> RunPlan:
    """Return what a run would do: schedule, sources, FLOPs, warnings. Reads samples of local sources, runs nothing."""
    from herd.tasks.plan.recipe import survey_and_plan

    return survey_and_plan(_recipe(recipe, _root(root)), _root(root))


def plan_on_cluster(
    recipe: Recipe | str | Path, cluster: str, gpus: Sequence[str] | str | int = (), *, root: Place = None
) -> ClusterPlan:
    """Return layouts, step times, days and cost on a preset (`herd plan presets`) or a cluster's YAML file.

    `gpus`: of all stages, or of one: 8192, `main=16384`; or a list of such.
    """
    from herd.tasks.plan.cluster import plan_on_cluster as planned

    return planned(plan(recipe, root=root), cluster, _texts(gpus), root=_root(root))


def run(
    recipe: Recipe | str | Path,
    *,
    cluster: Cluster | str | Path | None = None,
    until: str = "",
    fresh: bool = False,
    root: Place = None,
) -> Run:
    """Run a recipe on this machine, or on `cluster`, until it ends; an interrupted run of the same recipe continues.

    `until`: the last step to do. `fresh`: start a new run in any case. Raises what the step raises that fails.
    """
    from herd.flows.cli.errors import with_retries
    from herd.flows.local_server import quiet_prefect, start_temporary_server
    from herd.flows.recipe_form import PipelineParameters
    from herd.tasks.cluster import Cluster, load_cluster
    from herd.tasks.operate.preflight import check_run

    place = cluster if isinstance(cluster, Cluster) else load_cluster(Path(cluster)) if cluster else Cluster()
    base = _root(root)
    loaded = _recipe(recipe, base)
    check_run(loaded, place, base, until=until)  # finds wrong input before Prefect starts
    fix_import_path()
    move_logins()
    quiet_prefect()
    ready = start_temporary_server(base)
    from herd.flows.pipeline import pipeline

    ready()
    with tempfile.TemporaryDirectory(prefix="herd-recipe-") as folder:
        path = Path(folder, f"{loaded.name}.yaml")
        path.write_text(to_yaml(loaded))
        config = PipelineParameters(recipe=str(path), cluster=place, until=until, fresh=fresh, root=base.uri)
        return Run(base, with_retries(lambda: pipeline(config)))


def open_run(name: str, *, root: Place = None) -> Run:
    """Return the run called `name`. Raises ValueError that lists the runs there are."""
    opened = Run(_root(root), name)
    opened.record  # noqa: B018  (raises)
    return opened


def load_model(
    model: str | Path, *, dtype: Literal["bf16", "fp32"] = "fp32", device: str = "cpu", root: Place = None
) -> LoadedModel:
    """Load the model of a run, of `FAMILY@ALIAS`, or of a folder in herd's, Hugging Face's or Meta's format."""
    import torch

    from herd.llama3.export.convert import load_model_any_format
    from herd.tasks.models.lookup import model_folder

    weights = {"bf16": torch.bfloat16, "fp32": torch.float32}
    if dtype not in weights:
        raise ValueError(f"dtype: {dtype!r} is unknown; write bf16 or fp32")
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ValueError(f"device: {device!r} cannot be used here ({reason}); write cpu, or cuda on a GPU") from None
    return LoadedModel(*load_model_any_format(model_folder(_root(root), str(model)), weights[dtype], device))


def generate(
    model: LoadedModel | str | Path,
    prompt: str,
    *,
    tokens: int = 80,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] | str = (),
    root: Place = None,
) -> str:
    """Return the model's continuation of `prompt`, without the prompt. Temperature 0 takes the most probable token."""
    from herd.llama3.evaluate import generate as generation

    network, tokenizer = model if isinstance(model, LoadedModel) else load_model(model, root=root)
    return generation.generate(network, tokenizer, prompt, tokens, temperature, top_p, seed, _texts(stop))


def evaluate(
    model: LoadedModel | str | Path,
    tasks: Sequence[str | Path] | str | Path,
    *,
    data: str | None = None,
    limit: int | None = None,
    shots: int | None = None,
    root: Place = None,
) -> dict[str, Score]:
    """Return key -> score of an fp32 model on tasks and suites: names (mmlu, core), YAML files or folders.

    `data`: the folder of published data sets. `limit`: the most questions of a task. `shots`: solved examples.
    """
    from herd.llama3.evaluate.evaluate import evaluate_tasks
    from herd.llama3.evaluate.suite import render_suites

    for name, value, least in (("limit", limit, 1), ("shots", shots, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name}: {value} is below {least}; write {least} or more, or None for the task's own")
    suites = render_suites(_texts(tasks), data, limit, shots)
    network, tokenizer = model if isinstance(model, LoadedModel) else load_model(model, root=root)
    device = str(next(network.parameters()).device)
    return evaluate_tasks(network, tokenizer, suites, threads=os.cpu_count() or 1, device=device).scores


def _recipe(recipe: Recipe | str | Path, root: Root) -> Recipe:
    from herd.tasks.models.start import load_recipe

    return recipe if isinstance(recipe, Recipe) else load_recipe(root, recipe)


def _texts(values: Sequence[object] | str | int | Path) -> list[str]:
    return [str(values)] if isinstance(values, str | int | Path) else [str(value) for value in values]


def _root(root: Place) -> Root:
    return Root.parse(root or os.environ.get("HERD_ROOT") or DEFAULT_ROOT)
