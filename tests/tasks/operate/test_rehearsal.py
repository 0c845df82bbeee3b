"""Mistakes in the 8B and 405B recipes that arithmetic finds; tests/e2e/test_rehearse.py plants the others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from herd.llama3.parallel.layout import Layout
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schema import Recipe
from herd.storage.root import Root
from herd.tasks.cluster import Cluster, EvaluationCluster, StageCluster
from herd.tasks.launch.devices import place_evaluation
from herd.tasks.operate.rehearsal import Rehearsal, ScaledRun, full_size_findings, unproven, write_rehearsal

QUICK = ("evaluate.suite=quick", "evaluate.final=quick", "evaluate.data=null")
DOMAINS = ("general", "math", "code", "multilingual")


def load(name: str, *overrides: str) -> Recipe:
    sources = [f'sources.{domain}=[{{uri: "/data/{domain}/*.parquet"}}]' for domain in DOMAINS]
    return load_recipe(Path("recipes") / f"llama3-{name}.yaml", [*sources, *QUICK, *overrides])


LONG = StageCluster(layout=Layout(cp=8, zero=3))
WIDE = Layout(tp=8, cp=16, pp=16, vpp=8, recompute="selective")
CLUSTERS = {
    "8b": Cluster(
        fabric="roce-24k", processes=256, micro_batch=1, layout=Layout(zero=3), stages={"long": LONG, "anneal": LONG}
    ),
    "405b": Cluster(
        fabric="roce-24k",
        processes=8192,
        micro_batch=1,
        layout=Layout(tp=8, pp=16, vpp=8),
        stages={"long": StageCluster(layout=WIDE), "anneal": StageCluster(layout=WIDE)},
    ),
}


@pytest.fixture
def large_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("herd.tasks.operate.rehearsal.shutil.disk_usage", lambda _: usage._replace(free=10**18))


def faults(recipe: Recipe, cluster: Cluster, root: Path) -> list[str]:
    found = full_size_findings(recipe, cluster, Root.parse(root))
    return [finding.text for finding in found if finding.fails]


@pytest.mark.usefixtures("large_disk")
@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.slow
def test_a_published_recipe_has_no_fault(name: str, tmp_path: Path) -> None:
    assert faults(load(name), CLUSTERS[name], tmp_path) == []


def test_a_replica_takes_the_fewest_devices_that_it_fits() -> None:
    chosen = {name: place_evaluation(load(name), CLUSTERS[name]) for name in CLUSTERS}
    assert chosen == {"8b": (Layout(), 1), "405b": (Layout(tp=8, pp=4), 32)}
    assert place_evaluation(load("405b", "evaluate.precision=fp32"), CLUSTERS["405b"]) == (Layout(tp=8, pp=8), 64)


def tuned(count: int, uri: str = "problems") -> tuple[str, ...]:
    """Return overrides with a stage of 100M tokens on `count` conversations."""
    main = "{name: main, until: 14.8T, seq_len: 8192, batch: 8Mi, mix: base}"
    chat = "{name: chat, kind: sft, for: 100M, seq_len: 8192, batch: 2Mi, mix: base, lr: constant at 1e-5}"
    return f"stages=[{main}, {chat}]", f"conversations=[{{uri: {uri}, limit: {count}}}]", "evaluate.after=[main]"


NO_STAGES: dict[str, Any] = {"stages": {}}


class Mistake(NamedTuple):
    recipe: str
    says: str
    """A part of the only fault's text."""
    overrides: tuple[str, ...] = ()
    cluster: dict[str, Any] = {}  # noqa: RUF012  (never changed)


MISTAKES = {
    "memory": Mistake(
        "8b", "long does not fit h100", cluster={"stages": {"long": StageCluster(layout=Layout(cp=4)), "anneal": LONG}}
    ),
    "batch over ranks": Mistake("8b", "ramp-4k.batch: 4Mi is not a multiple", cluster={"processes": 3072}),
    "gate within the noise": Mistake(
        "8b",
        "100 questions pass an equal model in 35%; write eval/arithmetic: no drop over 10 points, or raise evaluate.",
        ("promote.when={eval/arithmetic: no drop over 5 points}", "evaluate.questions=100"),
    ),
    "gate on no score": Mistake("8b", "eval/mmlu is not among the scores", ("promote.when={eval/mmlu: better}",)),
    "gate above 1": Mistake("8b", "no accuracy is above 1", ("promote.when={eval/arithmetic: at least 60}",)),
    "too few conversations": Mistake(
        "8b", "passes over the conversations, at most tokens.max_epochs 4; write for: 2Mi, add", tuned(100), NO_STAGES
    ),
    "a broken conversation": Mistake("8b", "conversations.0.uri: 'none.jsonl' ", tuned(100, "none.jsonl"), NO_STAGES),
    "no evaluation data": Mistake("8b", "evaluate.data: is not set", ("evaluate.suite=core",)),
    "fp8 without compilation": Mistake("8b", "makes precision: fp8 slower", ("precision=fp8",)),
    "placeholder": Mistake("8b", "<your-bucket> is a placeholder", ("sources.code.0.uri=s3://<your-bucket>/code",)),
    "evaluation on a node": Mistake(
        "405b",
        "cluster.evaluate.layout: to evaluate the model in bf16, tp 8 x pp 1 needs",
        cluster={"evaluate": EvaluationCluster(layout=Layout(tp=8))},
    ),
    "sequence over ranks": Mistake(
        "405b", "does not split into", ("stages.anneal.seq_len=1000", "stages.anneal.batch=16000000 tokens")
    ),
}


@pytest.mark.usefixtures("large_disk")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    recipe = load(mistake.recipe, *mistake.overrides)
    cluster = CLUSTERS[mistake.recipe].model_copy(update=mistake.cluster)
    texts = faults(recipe, cluster, tmp_path)
    assert any(mistake.says in text for text in texts), texts


def test_a_disk_that_tokens_and_checkpoints_fill_is_found(tmp_path: Path) -> None:
    texts = faults(load("8b"), CLUSTERS["8b"], tmp_path)
    assert any(text.startswith("root: ") and "62.4 TB of tokens" in text for text in texts), texts
    assert sum(" free" in text for text in texts) == 1, "it is told once"


def test_odd_settings_do_not_fail(tmp_path: Path) -> None:
    found = full_size_findings(load("405b"), CLUSTERS["405b"], Root.parse(tmp_path))
    odd = [finding.text for finding in found if not finding.fails]
    assert any("2.4 steps, rounded to 2" in text for text in odd)


def test_the_page_needs_nothing_from_outside_and_names_what_is_not_proven(tmp_path: Path) -> None:
    recipe, cluster = load("8b", "precision=fp8"), Cluster(processes=64, launcher="slurm", data="dask")
    found = Rehearsal(ScaledRun(recipe, cluster), list(full_size_findings(recipe, cluster, Root.parse(tmp_path))))
    html = write_rehearsal(found, tmp_path).read_text()
    assert "http" not in html
    lines = unproven(found.scaled)
    for text in ("precision fp8", "launcher slurm", "data on dask", "cluster.fabric is not given"):
        assert any(line.startswith(text) or text in line for line in lines)
        assert text in html
