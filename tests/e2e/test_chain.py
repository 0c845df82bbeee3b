"""The real chain on a tiny recipe, as a user meets it. The tests build on one another, in order, on one root."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from mlflow import MlflowClient
from safetensors import safe_open

from herd.llama3.recipe.base import DOMAINS
from herd.storage.artifact import Store
from herd.storage.root import Root
from herd.tasks.promotion.log import last_promotion
from herd.tasks.runs.records import Runs
from tests.e2e.conftest import Herd, record


def client(herd: Herd) -> MlflowClient:
    uri = f"sqlite:///{herd.root}/mlflow.db"
    return MlflowClient(uri, registry_uri=uri)


def test_raw_text_becomes_a_promoted_model(herd: Herd) -> None:
    printed = herd.printed
    assert "ramp -> main: seq_len 64 -> 128, batch 1Ki -> 2Ki; stream continues at token 16,384" in printed
    assert "main -> anneal: mix base -> annealing, lr linear to 0; stream continues at token 81,920" in printed
    assert "tiny version 1 is the champion" in printed
    for command in ("herd up", "herd rerun tiny-1"):
        assert command in printed
    assert (record(herd, "tiny-1").state, record(herd, "tiny-1").verdict) == ("finished", "promoted")


def test_training_learns(herd: Herd) -> None:
    facts = [Store(herd.root).load(record(herd, "tiny-1").steps[s].artifact).metadata for s in ("ramp", "main")]
    ramp = Store(herd.root).load(record(herd, "tiny-1").steps["ramp"].artifact)
    rows = parquet.read_table(ramp.path / "metrics.parquet")
    losses = [row["value"] for row in rows.sort_by("position").to_pylist() if row["key"] == "train/loss"]
    assert losses[0] == pytest.approx(6.64, abs=0.15), "ln(768) before the first step"
    assert facts[0]["first_loss"] == pytest.approx(sum(losses[:8]) / 8), "a mean over half of 16 steps"
    assert facts[1]["last_loss"] < losses[0] - 1.2
    assert facts[1]["bits_per_byte"] < facts[0].get("bits_per_byte", 10.0)


def test_the_realized_mix_is_the_planned_one_to_the_token(herd: Herd) -> None:
    store, steps = Store(herd.root), record(herd, "tiny-1").steps
    taken: Counter[str] = Counter()
    for stage in ("ramp", "main"):
        artifact = store.load(steps[stage].artifact)
        rows = parquet.read_table(artifact.path / "metrics.parquet").to_pylist()
        last = {row["key"]: row["value"] for row in rows if row["position"] == artifact.metadata["end"]}
        for domain in DOMAINS:
            taken[domain] += last[f"data/fraction/{domain}"] * (artifact.metadata["end"] - artifact.metadata["start"])
    assert {domain: round(count, 3) for domain, count in taken.items()} == {
        "general": 40960,
        "math": 20480,
        "code": 13926,
        "multilingual": 6554,
    }


def test_mlflow_holds_one_continuous_curve_over_tokens(herd: Herd) -> None:
    history = client(herd).get_metric_history(record(herd, "tiny-1").mlflow_run, "train/loss")
    positions = sorted(metric.step for metric in history)
    assert len(positions) == len(set(positions)) == 16 + 32 + 8
    assert positions[-1] == 96 * 1024


def test_mlflow_knows_stages_models_and_datasets(herd: Herd) -> None:
    mlflow, run = client(herd), record(herd, "tiny-1")
    children = mlflow.search_runs([run.mlflow_experiment], f"tags.`mlflow.parentRunId` = '{run.mlflow_run}'")
    stages = {child.data.tags["stage"] for child in children}
    assert {
        "collect",
        "annotate",
        "curate",
        "tokenizer",
        "tokenize",
        "ramp",
        "main",
        "anneal",
        "evaluate-main",
        "promote",
    } <= stages
    assert {child.info.status for child in children} == {"FINISHED"}
    parent = mlflow.get_run(run.mlflow_run)
    assert {data.dataset.name for data in parent.inputs.dataset_inputs} == {"general", "math", "code", "multilingual"}
    assert parent.data.params["model.preset"] == "tiny"
    assert {"eval/bpb", "eval/bpb/math", "train/lr"} <= set(parent.data.metrics)
    champion = mlflow.get_model_version_by_alias("tiny", "champion")
    assert champion.tags["verdict"] == "promoted"
    model = mlflow.get_logged_model(champion.source.rsplit("/", 1)[-1])
    assert model.tags["herd.artifact"] == run.steps["anneal"].artifact


FORMATS = Path(__file__).parents[1] / "golden" / "formats.json"
_VARIES = re.compile(r"\d{3,}|[0-9a-f]{12,}")
_OF_THE_MACHINE = ("files", "packages")
"""Keys of a manifest: what stands there is listed anyway, or differs between machines."""


def form_of(value: object) -> object:
    """Return the keys of JSON, all the way down, and the types of its values; of a list that of its first entry.

    `*` stands for the keys of a large mapping to values of one form, such as a vocabulary.
    """
    if isinstance(value, dict):
        shown = {key: inner for key, inner in sorted(value.items()) if key not in _OF_THE_MACHINE}
        form = {_VARIES.sub("N", key): form_of(inner) for key, inner in shown.items()}
        return {"*": next(iter(form.values()))} if len(form) > 12 and len(set(map(str, form.values()))) == 1 else form
    if isinstance(value, list):
        return [form_of(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def format_of(path: Path) -> object:
    """Return the columns of Parquet, the keys of JSON and of the header of safetensors; otherwise that it is a file."""
    if path.suffix == ".parquet":
        return {field.name: str(field.type) for field in parquet.read_schema(path)}
    if path.suffix == ".safetensors":
        with safe_open(path, "np") as file:
            return {"metadata": sorted(file.metadata() or {}), "tensors": len(file.keys())}
    return form_of(json.loads(path.read_text())) if path.suffix == ".json" else "file"


def test_what_a_run_writes_has_the_recorded_form(herd: Herd, tmp_path: Path) -> None:
    """Roots outlive versions and others read them: a name or type that changes is seen here, and said in CHANGELOG."""
    found: dict[str, object] = {}
    for step, made in sorted(record(herd, "tiny-1").steps.items()):
        if made.artifact and step not in ("ramp", "main", "evaluate-main"):  # as anneal and its evaluation
            folder = Store(herd.root).load(made.artifact).path
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                found[f"{step}/{_VARIES.sub('N', str(path.relative_to(folder)))}"] = format_of(path)
    written = tmp_path / "formats.json"
    written.write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(form)}' for name, form in found.items()) + "\n}\n")
    assert found == json.loads(FORMATS.read_text()), f"if the change is meant: cp {written} {FORMATS}"


def test_a_document_that_was_dropped_can_be_looked_up(herd: Herd) -> None:
    curated = Store(herd.root).load(record(herd, "tiny-1").steps["curate"].artifact)
    rows = [row for path in sorted((curated.path / "drops").iterdir()) for row in parquet.read_table(path).to_pylist()]
    dropped = next(row for row in rows if row["field"])
    printed = herd("data", "why", dropped["id"])
    assert dropped["outcome"] in printed
    assert f"curate.quality.{dropped['field']}: " in printed
    kept = parquet.read_table(next((curated.path / "documents").iterdir())).to_pylist()[0]
    assert "trained on" in herd("data", "why", kept["text"]) or kept["split"] == "held_out"
    refused = herd("data", "why", "0" * 32, status=2)
    assert "is not in the curated data of tiny-1" in refused


def test_the_report_shows_what_was_tracked(herd: Herd) -> None:
    folder = herd.root / "runs" / "tiny-1"
    html, markdown = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert html.count('<div class="chart">') == 6
    assert html.count("<svg") == 2, "mix and bits per byte"
    loads = r"""(src|link [^>]*href)=["']?(http|//)|@import|url\(['"]?http"""
    assert not re.search(loads, html), "the page needs nothing else"
    for text in ("Where the documents went", "eval/bpb/math", "ramp", "held out", "no champion yet"):
        assert text in html
        assert text in markdown
    assert "5-gram</span>: " in html


def test_the_data_page_shows_where_documents_went(herd: Herd) -> None:
    html = (herd.root / "runs" / "tiny-1" / "data.html").read_text()
    for text in ("Step by step", "What became of the documents", "held out", "tokens per word", "Samples", "<svg"):
        assert text in html
    assert not re.search(r"""(src|href)=["']?(http|//)|@import|url\(['"]?http""", html), "the page needs nothing else"


@pytest.mark.slow
def test_inspect_names_the_documents_behind_tokens(herd: Herd) -> None:
    printed = herd("inspect", "tiny-1", "--tokens", "16Ki:48Ki", "--limit", "3")
    shares = dict(re.findall(r"^(general|math|code|multilingual) +[\d,]+ +([\d.]+)%", printed, re.MULTILINE))
    assert shares.keys() == {"general", "math", "code", "multilingual"}
    assert float(shares["general"]) == pytest.approx(50, abs=1)
    assert "the first 3 stretches" in printed
    assert "--tokens: '5' is not a span" in herd("inspect", "tiny-1", "--tokens", "5", status=2)


@pytest.mark.slow
def test_a_second_run_reuses_everything(herd: Herd) -> None:
    printed = herd("run", herd.recipe, server=False)
    second = record(herd, "tiny-2")
    assert {step.outcome for step in second.steps.values()} == {"reused"}
    assert "reused curated/tiny-" in printed
    assert second.verdict == "promoted"
    assert len(client(herd).get_metric_history(second.mlflow_run, "train/loss")) == 56


@pytest.mark.slow
def test_a_changed_parameter_redoes_only_what_is_downstream(herd: Herd) -> None:
    change = (herd.recipe, "--set", "stages.anneal.weight_averaging=3")
    plan = {step["step"]: step for step in json.loads(herd("plan", *change, "--steps", "--json"))["pipeline"]}
    printed = herd("run", *change)
    steps = record(herd, "tiny-3").steps
    made = {name for name, step in plan.items() if step["outcome"] == "new"}
    assert made == {"anneal", "evaluate-anneal", "promote"}, "what the run then does, and its decision"
    assert plan["anneal"]["why"] == 'average "last 2" -> "last 3"'
    assert plan["evaluate-anneal"]["why"] == "anneal is new"
    assert plan["promote"]["inputs"] == ["anneal", "evaluate-anneal", "curate"]
    assert {name for name, step in steps.items() if step.outcome == "created"} == {"anneal", "evaluate-anneal"}
    assert 'anneal            new: average "last 2" -> "last 3"' in printed


@pytest.mark.slow
def test_a_rerun_from_a_stage_redoes_it_and_what_follows(herd: Herd) -> None:
    herd("rerun", "tiny-1", "--from", "main")
    first, again = record(herd, "tiny-1"), record(herd, "tiny-4")
    assert again.rerun_of == "tiny-1"
    assert {name for name, step in again.steps.items() if step.outcome == "reused"} >= {
        "collect", "annotate", "curate", "tokenize", "ramp",
    }  # fmt: skip
    store = Store(herd.root)
    for stage in ("main", "anneal"):
        assert again.steps[stage].outcome == "created"
        old, new = (store.load(run.steps[stage].artifact).metadata["model_sha256"] for run in (first, again))
        assert old == new, "the same recipe trains to the same bytes"


@pytest.mark.slow
def test_a_worse_recipe_is_refused_with_gate_value_and_threshold(herd: Herd) -> None:
    worse = ("--set", "stages.main.until=20Ki", "--set", "lr.peak=1e-5", "--set", "lr.cosine.to=0")
    printed = herd("run", herd.recipe, *worse, status=3)
    assert "rejected" in printed
    assert '-> "2e-06 to 9.57e-06, peak 1e-05" and 1 more' in printed, "what is new is told in numbers"
    run = record(herd, "tiny-5")
    assert (run.state, run.verdict) == ("finished", "rejected")
    refused = last_promotion(Root.parse(herd.root), "tiny-5")
    assert refused is not None
    (failed,) = [row for row in refused.decision.rows if not row.passed]
    assert failed.metric == "eval/bpb"
    assert failed.candidate is not None
    assert failed.threshold is not None
    assert failed.champion is not None
    assert failed.candidate > failed.threshold > failed.champion
    assert "allowed 2%" in failed.reason
    assert failed.reason in printed
    champion = client(herd).get_model_version_by_alias("tiny", "champion")
    assert champion.tags["herd.run"] != "tiny-5"


@pytest.mark.slow
def test_runs_are_compared_and_models_speak(herd: Herd) -> None:
    printed = herd("compare", "tiny-1", "tiny-5", "--no-browser")
    assert "stages.main.until" in printed
    assert "20Ki" in printed
    assert "eval/bpb" in printed
    assert herd("generate", "tiny@champion", "--prompt", "The", "--tokens", "5").startswith("The")
    assert herd("report", "tiny-1").strip().endswith("report.html")


def refused(herd: Herd, faults: dict[str, str]) -> None:
    """Check that each command is refused with that fault, before any run is begun."""
    before = len(Runs(Root.parse(herd.root)).all())
    for command, fault in faults.items():
        words = (herd.recipe if word == "RECIPE" else word for word in command.split("|"))
        printed = herd(*words, status=2)
        assert fault in printed, command
        assert "Traceback" not in printed, command
    assert len(Runs(Root.parse(herd.root)).all()) == before


@pytest.mark.fault("F17")
def test_a_mistake_is_refused_before_any_work(herd: Herd) -> None:
    faults = {
        "run|none.yaml": "none.yaml: cannot be read",
        "rerun|tiny-99": "run 'tiny-99' does not exist",
        "rerun|tiny-1|--from|later": "--from: 'later' is not a step of tiny; did you mean",
        "run|RECIPE|--processes|3": "data-parallel size 3",
        "run|RECIPE|--root|/proc/herd": "root: /proc/herd cannot be written",
        "run|RECIPE|--root|s3://user:secret@bucket/herd": "root",
        "run|RECIPE|--set|tokenizer={use: none.model}": "tokenizer.use: 'none.model' is not a file",
        "compare|tiny-1": "name at least two",
    }
    refused(herd, faults)


@pytest.mark.slow
def test_what_only_the_flow_can_see_is_refused_before_any_work(herd: Herd) -> None:
    faults = {
        "run|RECIPE|--set|sources.math=[{uri: none/*.txt}]": "sources.math.0.uri: 'none/*.txt'",
        "run|RECIPE|--set|stages.main.until=900M": "sources.multilingual",
    }
    refused(herd, faults)


@pytest.mark.slow
def test_a_damaged_artifact_is_made_again(herd: Herd) -> None:
    steps = record(herd, "tiny-1").steps
    next(Path(Store(herd.root).load(steps["tokenizer"].artifact).path).glob("tokenizer.json")).unlink()
    herd("run", herd.recipe)
    again = record(herd, "tiny-6").steps
    assert again["tokenizer"].outcome == "created"
    assert {again[name].outcome for name in ("curate", "tokenize", "main", "anneal")} == {"reused"}
