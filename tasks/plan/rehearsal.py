"""A rehearsal of a recipe: what was done in small, what cannot be tried here, and what would go wrong.

Faults come from three places: arithmetic on the recipe and the cluster at full size, the run in small, and what that
run measured of the data.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape

from llama3.data.readers.sources import INSTALLED, estimate_text, survey
from llama3.evaluate.policy import possible_scores
from llama3.evaluate.suite import ARITHMETIC, CONTINUATION, CORE, stage_suite_name, with_suite
from llama3.model.flops import parameter_count, vocab_rows
from llama3.recipe.base import Domain
from llama3.recipe.gates import AtLeast, NoDropOver, assign_rules
from llama3.recipe.lint import lint
from llama3.recipe.schedule import Schedule
from llama3.recipe.schema import Recipe
from llama3.recipe.units import Tokens, tokens
from storage.artifact import Store
from storage.filesystem import write_atomic
from storage.root import Root
from tasks.cluster import Cluster
from tasks.format import FittedTable, format_bytes, format_duration, templates
from tasks.plan.cluster import storage_use
from tasks.plan.predict import device_memory
from tasks.plan.recipe import USUAL_TOKENS_PER_BYTE, data_shortage, make_plan
from tasks.plan.scale_down import ScaledRun, axes_used
from tasks.runs.preflight import check_place
from tasks.runs.records import RunRecord, Runs

WIDTH = 4
"""Bytes of a weight when a model is evaluated: fp32."""
ANSWERED_OTHERWISE = 0.2
"""Share of questions that two models of one quality answer differently; measured between checkpoints of one run."""
LITTLE = 0.2
"""A domain of which less is kept earns a line."""


@dataclass(frozen=True)
class RehearsalFinding:
    """Something that would go wrong, or is odd."""

    text: str
    """Field, value and remedy, or the step that failed and its error."""
    fails: bool = True
    """False: legal but unusual."""


@dataclass
class Rehearsal:
    """What a rehearsal found."""

    scaled: ScaledRun
    findings: list[RehearsalFinding] = field(default_factory=list)
    proven: list[tuple[str, str]] = field(default_factory=list)
    """What was done in small, and how it went."""
    run: str = ""
    """The run in small."""

    @property
    def faults(self) -> list[RehearsalFinding]:
        return [finding for finding in self.findings if finding.fails]

    def stage_rows(self) -> list[tuple[str, ...]]:
        """Return a row per stage or part under `STAGE_HEADERS`: at full size, and in small."""
        parts = zip(self.scaled.parts, Schedule(self.scaled.recipe).trained, strict=True)
        return [
            (
                full.name,
                *(
                    cell
                    for span in (full, small)
                    for cell in (
                        tokens(span.tokens),
                        f"{span.steps:,}",
                        "..".join(dict.fromkeys(str(Tokens(length)) for length in (span.lengths[0], span.lengths[-1]))),
                        str(Tokens(span.segments[-1].batch)),
                    )
                ),
                _layout(*self.scaled.places[full.name]),
            )
            for full, small in parts
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "recipe": self.scaled.original.name,
            "run": self.run,
            "faults": [finding.text for finding in self.faults],
            "odd": [finding.text for finding in self.findings if not finding.fails],
            "proven": [list(pair) for pair in self.proven],
            "not proven": unproven(self.scaled),
        }


FULL = ("tokens", "steps", "seq_len", "batch")
STAGE_HEADERS = ("stage", *FULL, *(f"{name} here" for name in FULL), "layout here")


def _layout(layout: Any, processes: int) -> str:
    axes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp(processes)}
    return " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "1 process"


def full_size_findings(recipe: Recipe, cluster: Cluster, root: Root) -> Iterator[RehearsalFinding]:
    """Yield what is wrong with the recipe at full size on `cluster`, by its own checks and by arithmetic."""
    try:
        check_place(recipe, cluster, root, thorough=True)
    except ValueError as error:
        yield from map(RehearsalFinding, str(error).splitlines())
    yield from evaluation_memory(recipe, cluster)
    yield from full_disk(recipe, root)
    yield from gate_findings(recipe)
    yield from (RehearsalFinding(line, fails=False) for line in lint(recipe))
    nodes = cluster.nodes
    if nodes and cluster.processes % nodes.processes_per_node:
        yield RehearsalFinding(
            f"cluster.processes: {cluster.processes} leave part of a node of {nodes.processes_per_node} idle; "
            f"write {nodes.nodes(cluster.processes) * nodes.processes_per_node}",
            fails=False,
        )
    suites = [suite for suite in (recipe.evaluate.final, recipe.evaluate.suite) if suite in ("core", "full")]
    if suites and not recipe.curate.decontaminate:
        yield RehearsalFinding(
            f"curate.decontaminate: is empty, and suite {suites[0]} reads published questions, which are in web "
            "text; name the data sets",
            fails=False,
        )


def evaluation_memory(recipe: Recipe, cluster: Cluster) -> Iterator[RehearsalFinding]:
    """Yield a fault if the model does not fit the device that evaluates it."""
    device, size = device_memory(cluster), WIDTH * parameter_count(recipe.model, vocab_rows(recipe))
    if device is not None and size > device.limit:
        yield RehearsalFinding(
            f"evaluate: the model takes {format_bytes(size)} in fp32, and {device.name} has "
            f"{format_bytes(device.limit)}; each evaluator holds a whole model: evaluate on a larger device, or train "
            "a smaller model"
        )


def full_disk(recipe: Recipe, root: Root) -> Iterator[RehearsalFinding]:
    """Yield a fault if tokens and checkpoints do not fit the disk of a local root."""
    if not root.is_local:
        return
    stored = storage_use(make_plan(recipe, []))
    folder = next(path for path in (root.local, *root.local.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if stored.total > free:
        yield RehearsalFinding(
            f"root: {format_bytes(stored.total)} at the end of the run ({format_bytes(stored.token_bytes)} of tokens, "
            f"{stored.checkpoints:,.0f} checkpoints of {format_bytes(stored.checkpoint_bytes)}), and {folder} has "
            f"{format_bytes(free)} free; choose another with --root, or lower checkpoint.keep"
        )


def gate_findings(recipe: Recipe) -> Iterator[RehearsalFinding]:
    """Yield the rules of `promote.when` that a model as good as the champion fails, or that no model passes."""
    final = with_suite(recipe, stage_suite_name(recipe, "champion"))
    try:
        scores = possible_scores(final)
    except ValueError:  # `check_place` reports it
        return
    built_in, limit = {ARITHMETIC, CONTINUATION}, recipe.evaluate.limit
    for pattern, metrics in assign_rules(recipe.promote.when, scores).items():
        rule = recipe.promote.when[pattern]
        accuracies = [metric for metric in metrics if "bpb" not in metric and metric != CORE]
        if isinstance(rule, AtLeast) and accuracies and rule.bound > 1:
            yield RehearsalFinding(f"promote.when: {pattern}: {rule}: no accuracy is above 1; write at least 0.3")
        if not isinstance(rule, NoDropOver):
            continue
        counts = {metric: recipe.evaluate.questions if metric in built_in else limit for metric in accuracies}
        for metric, count in counts.items():
            # The upper end of the paired 95 % interval of models that do not differ must be within the allowance.
            half = 1.96 * math.sqrt(ANSWERED_OTHERWISE / count) if count else 0.0
            if count and half > rule.bound:
                needed = math.ceil(ANSWERED_OTHERWISE * (1.96 / rule.bound) ** 2)
                name = "questions" if metric in built_in else "limit"
                yield RehearsalFinding(
                    f"promote.when: {pattern}: {rule}: {count} questions of {metric} tell two models apart by "
                    f"{100 * half:.1f} points, so a model as good as the champion is refused; write "
                    f"evaluate.{name}: {needed}, or a drop over {math.ceil(100 * half)} points"
                )


def data_findings(scaled: ScaledRun, store: Store, record: RunRecord) -> Iterator[RehearsalFinding]:
    """Yield domains that run out of text, by what curation kept of the sample, and domains of which it keeps little."""
    recipe = scaled.original
    if "curate" not in record.steps:
        return
    read = store.load(record.steps["collect"].artifact).metadata["bytes"]
    curated = store.load(record.steps["curate"].artifact)
    held_out, wanted = (float(each.curate.validation_fraction) for each in (scaled.recipe, recipe))
    kept = {domain: size * (1 - wanted) / (1 - held_out) for domain, size in curated.metadata["bytes"].items()}
    per_byte = {domain: tokens_per_byte(recipe, store, record, domain, kept[domain]) for domain in kept}
    ledger = pq.read_table(curated.part("ledger.parquet")).to_pylist()
    for found in survey(recipe):
        domain, share = found.domain, kept[found.domain] / max(1, read[found.domain])
        if share < LITTLE and not found.name:
            dropped = [row for row in ledger if row["domain"] == domain and row["outcome"] not in ("kept", "held_out")]
            reason = max(dropped, key=lambda row: int(row["bytes"] or 0))
            yield RehearsalFinding(
                f"curate: keeps {share:.1%} of sources.{found.title}; most goes for {reason['outcome']} "
                f"({reason['documents']:,} documents of the sample); loosen it for this domain in curate.quality_for",
                fails=False,
            )
        if not found.complete:
            sources = [source for source in recipe.sources[domain] if (source.name or "") == found.name]
            size = sum(estimate_text(source) for source in sources if source.uri != INSTALLED) + found.bytes * any(
                source.uri == INSTALLED for source in sources
            )
            found = replace(found, bytes=size, complete=True)
        if fault := data_shortage(recipe, found, share * per_byte[domain]):
            yield RehearsalFinding(f"{fault} (of the sample, curation keeps {share:.0%})")


def tokens_per_byte(recipe: Recipe, store: Store, record: RunRecord, domain: Domain, kept: float) -> float:
    """Return the tokens of a byte of curated text: measured with the recipe's own tokenizer, or the usual number."""
    if recipe.tokenizer.use is None or "tokenize" not in record.steps or not kept:
        return USUAL_TOKENS_PER_BYTE  # the tokenizer in small has a small vocabulary
    counts = store.load(record.steps["tokenize"].artifact).metadata["tokens"]
    return float(counts[domain]) / kept


def unproven(scaled: ScaledRun) -> list[str]:
    """Return what no rehearsal on processors can show of this recipe and cluster."""
    recipe, cluster = scaled.original, scaled.original_cluster
    layouts = [cluster.for_stage(part.stage.name, part.name).layout for part in scaled.parts]
    lines = [
        "numbers, speed and memory of GPUs: herd plan predicts them; make test-cuda executes every CUDA path on a "
        "null device",
        f"{cluster.processes:,} processes at once: at most {max(n for _, n in scaled.places.values())} here",
        "whether the trained model passes its gates",
    ]
    if recipe.precision != "fp32":
        lines.append(f"precision {recipe.precision}: fp32 here")
    if any(layout.compile or layout.async_tp for layout in layouts):
        lines.append("compiled blocks and asynchronous tensor parallelism: eager here")
    if cluster.launcher != "local":
        lines.append(f"launcher {cluster.launcher}: processes of this machine here")
    if cluster.data != "threads":
        lines.append(f"data on {cluster.data}: threads here")
    if recipe.init_from is not None:
        lines.append(f"init_from {recipe.init_from.path}: random weights here, in another shape")
    if device_memory(cluster) is None:
        lines.append("memory of the stages: cluster.fabric is not given (herd plan presets)")
    return lines


def proofs(scaled: ScaledRun, root: Root, record: RunRecord, killed: str) -> Iterator[tuple[str, str]]:
    """Yield what the run in small did; `killed`: the stage in which a rank was killed, or empty."""
    steps = record.steps
    data = [name for name in ("collect", "annotate", "curate", "tokenizer", "tokenize") if name in steps]
    if data:
        yield "data", f"{', '.join(data)} of a sample in {_seconds(record, data)}"
    trained = [span.name for span in Schedule(scaled.recipe).trained if span.name in steps]
    if trained:
        axes = ", ".join(axes_used(list(scaled.places.values()))) or "one process"
        yield "training", f"{', '.join(trained)} in {_seconds(record, trained)}; layout axes: {axes}"
    if killed and killed in steps:
        attempts = len(list((Runs(root).folder(record.name) / "logs" / killed).glob("attempt-*")))
        yield "recovery", f"a rank of {killed} was killed; attempt {attempts} went on from a checkpoint"
    judged = [name for name in steps if name.startswith(("evaluate", "gate"))]
    if judged:
        yield "evaluation", f"{', '.join(judged)} in {_seconds(record, judged)}"
    if record.verdict:
        yield "promotion", f"the gate decided: {record.verdict}"


def _seconds(record: RunRecord, names: Sequence[str]) -> str:
    return format_duration(sum(record.steps[name].seconds for name in names))


def print_rehearsal(found: Rehearsal, console: Console) -> None:
    """Print the page."""
    stages = FittedTable(
        "", STAGE_HEADERS, left_out=("tokens here", "tokens", "batch here", "batch"), numbers=STAGE_HEADERS[1:-1]
    )
    for row in found.stage_rows():
        stages.add_row(*row)
    console.print(f"\n[bold]Rehearsal of {found.scaled.original.name}[/]: at full size, and here")
    console.print(stages)
    for title, pairs in (("proven", found.proven), ("not proven", [("", line) for line in unproven(found.scaled)])):
        console.print(f"[bold]{title}[/]")
        for name, text in pairs:
            console.print(f"  {name:<12}{escape(text)}" if name else f"  {escape(text)}")
    for finding in sorted(found.findings, key=lambda finding: not finding.fails):
        console.print(f"{'[red]fails[/]' if finding.fails else '[yellow]odd[/]  '}  {escape(finding.text)}")
    if not found.faults:
        console.print("[green]nothing fails[/] of what can be tried here")


def write_rehearsal(found: Rehearsal, folder: Path) -> Path:
    """Write `rehearsal.html` and `rehearsal.json` into `folder`; return the page."""
    page = folder / "rehearsal.html"
    text = (
        templates(page.name)
        .get_template(page.name)
        .render(found=found, headers=STAGE_HEADERS, rows=found.stage_rows(), unproven=unproven(found.scaled))
    )
    write_atomic(page, text)
    write_atomic(page.with_suffix(".json"), json.dumps(found.as_dict(), indent=1))
    return page
