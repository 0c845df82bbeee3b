"""A rehearsal of a recipe: what was done in small, what cannot be tried here, and what would go wrong.

In small are the same steps in the same proportions: sources (a sample), curation, stages and their order, the batch
ramp, gates, suites, and the kind of layout, in which an axis of more than one process becomes one of two. Scaled are
model, sequences, batches, steps and questions. Faults come from three places: arithmetic on the recipe and the cluster
at full size, the run in small, and what that run measured of the data.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape

from herd.llama3.data.readers.sources import BUILT_IN, estimate_text, survey
from herd.llama3.evaluate.checks import gate_powers, possible_scores
from herd.llama3.evaluate.suite import CORE, stage_suite_name, with_suite
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import Load
from herd.llama3.recipe.base import Domain
from herd.llama3.recipe.gates import AbsoluteRule, AtLeast, AtMost, GateRule, assign_rules
from herd.llama3.recipe.lint import lint
from herd.llama3.recipe.load import resolved
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Bytes, Cadence, Share, Tokens, tokens
from herd.storage.artifact import Store
from herd.storage.filesystem import write_atomic
from herd.storage.processes import processors
from herd.storage.root import Root
from herd.tasks.cluster import Cluster, EvaluationCluster, StageCluster
from herd.tasks.format import FittedTable, format_bytes, format_duration
from herd.tasks.html import render
from herd.tasks.launch.devices import device_memory, place_evaluation
from herd.tasks.models.start import known_tokenizer, known_vocab_size
from herd.tasks.operate.preflight import check_run
from herd.tasks.pipeline_steps import pipeline_steps
from herd.tasks.plan.cluster import storage_use
from herd.tasks.plan.recipe import (
    SURELY,
    USUAL_TOKENS_PER_BYTE,
    conversation_shortage,
    data_shortage,
    make_plan,
    survey_chats,
)
from herd.tasks.runs.records import RunRecord, Runs

# The recipe and the cluster in small.

LONGEST = 1024
"""Tokens of the longest sequence; the others are as much shorter as in the recipe, except those of conversations."""
SEQUENCE_UNIT = 8
"""Every length is a multiple: twice cp x tp, each at most 2."""
STEPS = 32
"""Optimizer steps of the run, divided by the tokens of the stages."""
FEWEST = 4
"""Minimum steps per sequence length, unless the recipe itself has fewer."""
CONVERSATIONS = 500
"""Of each source of them."""
SAMPLE = 4_000_000
"""Bytes of raw text per domain."""
VOCABULARY = 2048
"""Base tokens of a tokenizer that the recipe trains."""
QUESTIONS, DOCUMENTS, NEEDLES = 4, 4, 11
VALIDATION = Share.parse("5%")
"""Minimum share of held-out documents: 2 % of a sample may be none."""


def scaled_layout(layout: Layout, world: int, processes: int) -> tuple[Layout, int]:
    """Return the layout with two processes on each used axis, and its number of processes, at most `processes`.

    Data parallelism is given up first, then the axes from the outermost. Compilation, which takes minutes on a CPU, is
    left out.
    """
    degrees = {axis: min(2, getattr(layout, axis)) for axis in ("pp", "cp", "tp")}
    for axis in degrees:
        if degrees["pp"] * degrees["cp"] * degrees["tp"] > processes:
            degrees[axis] = 1
    model_parallel = degrees["pp"] * degrees["cp"] * degrees["tp"]
    dp = 2 if layout.dp(world) > 1 and 2 * model_parallel <= processes else 1
    changes = {
        **degrees,
        "dp_replicate": min(layout.dp_replicate, dp),
        "vpp": min(2, layout.vpp) if degrees["pp"] > 1 else 1,
        "microbatch_group_size": 0,
        "compile": False,
        "async_tp": False,
        "flash": "auto",
    }
    return layout.model_copy(update=changes), model_parallel * dp


class ScaledRun:
    """A recipe and a cluster in small."""

    def __init__(self, recipe: Recipe, cluster: Cluster, processes: int = 8) -> None:
        """`processes`: maximum trainer processes."""
        self.original, self.original_cluster, self.schedule = recipe, cluster, recipe.schedule
        self.processes = processes
        self.spans = [span for stage in self.schedule.spans for span in stage.parts]
        self.placements = {
            span.name: scaled_layout(placed.layout, placed.processes, processes)
            for span in self.spans
            for placed in [cluster.for_stage(span.stage.name, span.name)]
        }
        """Stage, or part between gates -> layout and processes."""
        longest = max(segment.seq_len for segment in self.schedule.segments)
        self.divisor = max(1, longest // LONGEST)
        """Of sequence lengths."""
        self.batches = self._batches()
        self.steps = {segment: self._steps(segment.stage, segment.steps) for segment in self.schedule.segments}
        self.recipe = self._recipe()
        self.cluster = self._cluster(cluster)

    def sequence(self, seq_len: int) -> int:
        """Return a sequence length in small."""
        return max(2, seq_len // self.divisor // SEQUENCE_UNIT) * SEQUENCE_UNIT

    def lengths(self, span: StageSpan) -> list[int]:
        """Return the sequence lengths of a stage in small; conversations are not shortened, so theirs stay if short."""
        if span.stage.kind == "sft":
            return [max(2, min(LONGEST, span.lengths[0]) // SEQUENCE_UNIT) * SEQUENCE_UNIT]
        return [self.sequence(seq_len) for seq_len in span.lengths]

    def position(self, original: float) -> int:
        """Return the position in small that corresponds to a position of the recipe: linear within a segment."""
        small = 0
        for segment in self.schedule.segments:
            tokens = self.steps[segment] * self.batches[segment.stage]
            if original <= segment.end:
                return small + round((original - segment.start) / segment.tokens * tokens)
            small += tokens
        return round(small * original / self.schedule.tokens)

    def _data_parallel(self, span: StageSpan) -> int:
        """Return the largest data-parallel size among the parts of a stage."""
        return max(layout.dp(processes) for layout, processes in (self.placements[part.name] for part in span.parts))

    def _batches(self) -> dict[str, int]:
        """Return stage -> tokens per step: batches keep their ratio, and the smallest has the fewest sequences."""
        units = {span.name: lcm(*self.lengths(span)) * self._data_parallel(span) for span in self.schedule.spans}
        sizes = {span.name: span.segments[0].batch / self.divisor for span in self.schedule.spans}
        pretrained = [span.name for span in self.schedule.spans if span.stage.kind == "pretrain"] or list(units)
        factor = max(1.0, min(sizes[name] / units[name] for name in pretrained))
        return {name: max(1, round(sizes[name] / factor / units[name])) * units[name] for name in units}

    def _steps(self, stage: str, steps: int) -> int:
        span = self.schedule.span(stage)
        share = round(STEPS * span.tokens / self.schedule.tokens / len(span.segments))
        average = span.stage.weight_averaging
        return min(steps, max(FEWEST, share, average.count if average else 0))

    def _recipe(self) -> Recipe:
        recipe, plain = self.original, resolved(self.original)
        for name in ("init_from", "studies"):
            plain.pop(name, None)
        plain["name"] = f"{recipe.name[:53]}-rehearsal"
        plain["precision"] = "fp32"  # four times as fast as bf16 on processors without its instructions
        plain["model"] = self._model(plain["model"])
        plain["lr"] = self._rate(plain["lr"])
        pairs = zip(self.schedule.spans, plain["stages"], strict=True)
        plain["stages"] = [self._stage(span, stage) for span, stage in pairs]
        for sources in plain["sources"].values():
            for source in sources:
                most = SAMPLE // len(sources)
                source["limit"] = str(Bytes(min(most, Bytes.parse(source["limit"]) if source["limit"] else most)))
        for source in plain.get("conversations", ()):
            source["limit"] = min(source["limit"] or CONVERSATIONS, CONVERSATIONS)
        if train := plain["tokenizer"]["train"]:
            train["vocab"], train["sample"] = min(train["vocab"], VOCABULARY), str(Bytes(SAMPLE))
        if unit := recipe.tokens.chunk_tokens:
            plain["tokens"]["chunk_tokens"] = f"{self.sequence(unit)} tokens"
        plain["tokens"]["max_epochs"] = 1e6  # of a sample; `data_findings` judges the whole source
        if recipe.curate.validation_fraction:
            plain["curate"]["validation_fraction"] = str(max(recipe.curate.validation_fraction, VALIDATION))
        plain["spikes"]["sigma"] = 1e6  # a few steps of a tiny model say nothing about spikes
        keep = recipe.checkpoint.keep.every
        total = sum(self.steps[segment] * self.batches[segment.stage] for segment in self.schedule.segments)
        plain["checkpoint"]["every"] = str(Cadence(max(1, total // 16), "tokens"))
        plain["checkpoint"]["keep"]["every"] = f"{max(1, self.position(keep))} tokens" if keep else None
        plain["evaluate"] |= {
            "precision": "fp32",
            "documents": min(recipe.evaluate.documents, DOCUMENTS),
            "val_documents": min(recipe.evaluate.val_documents, 2),
            "questions": min(recipe.evaluate.questions, QUESTIONS),
            "limit": min(recipe.evaluate.limit or QUESTIONS, QUESTIONS),
            "needles": NEEDLES,
            "deferred_suite": None,
        }
        if isinstance(recipe.evaluate.val_interval, Tokens):
            plain["evaluate"]["val_interval"] = f"{max(1, self.position(recipe.evaluate.val_interval))} tokens"
        plain["promote"] |= {
            "when": {metric: _passable(rule) for metric, rule in recipe.promote.when.items()},
            "approval": "none",
        }
        return Recipe.model_validate(plain)

    def _model(self, plain: dict[str, Any]) -> dict[str, Any]:
        model = self.original.model
        layers = max([2, *(layout.stages for layout, _ in self.placements.values())])
        if plain["rope_scaling"]:
            plain["rope_scaling"]["original"] = max(2, plain["rope_scaling"]["original"] // self.divisor)
        heads = 2 if model.heads == model.kv_heads else 4
        longest = max(seq_len for span in self.schedule.spans for seq_len in self.lengths(span))
        small = {"preset": "custom", "layers": layers, "dim": 64, "ffn": 224, "heads": heads, "kv_heads": 2}
        return {**plain, **small, "max_seq_len": max(longest, self.sequence(model.max_seq_len))}

    def _rate(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return the learning rate with warm-up and decay at the corresponding positions."""
        first, run, decay = self.batches[self.schedule.spans[0].name], self.schedule.timeline, self.original.lr.decay
        plain["warmup"] = f"{max(first, self.position(float(run.warmup_end[1])))} tokens"
        scaled = decay.scaled(run, lambda length: self.schedule.reached(length)[1], self.position, first)
        return {**plain, decay.key: scaled.model_dump(mode="json")}

    def _stage(self, span: StageSpan, plain: dict[str, Any]) -> dict[str, Any]:
        lengths = [f"{self.steps[segment] * self.batches[span.name]} tokens" for segment in span.segments]
        several = isinstance(span.stage.seq_len, list)
        sequences = self.lengths(span)
        plain |= {
            "until": None,
            "for": lengths if several else lengths[0],
            "seq_len": sequences if several else sequences[0],
            "batch": f"{self.batches[span.name]} tokens",
        }
        plain.pop("epochs", None)  # of a sample
        if span.stage.gates:  # they are computed, and pass: an untrained model finds no needle
            passable = {"short-context": "no worse than 100%", "needle": "at least 0"}
            plain["gates"] = {gate: passable[gate] for gate in span.stage.gates}
        return plain

    def _cluster(self, cluster: Cluster) -> Cluster:
        stages = {}
        for original, span in zip(self.spans, self.recipe.schedule.trained, strict=True):
            layout, processes = self.placements[original.name]
            per_rank = min(segment.batch // segment.seq_len for segment in span.segments) // layout.dp(processes)
            passes = 2 * layout.pp  # several micro-batches where there are enough sequences
            stages[span.name] = StageCluster(processes=processes, layout=layout, micro_batch=max(1, per_rank // passes))
        evaluate = EvaluationCluster()
        with suppress(ValueError):  # `check_run` reports it
            layout, processes = scaled_layout(*place_evaluation(self.original, cluster), self.processes)
            evaluate = EvaluationCluster(processes=processes, layout=layout)
        first = next(iter(stages.values()))
        assert first.processes is not None
        assert first.layout is not None
        return Cluster(
            processes=first.processes,
            layout=first.layout,
            stages=stages,
            threads=processors(),
            device="cpu",
            evaluate=evaluate,
            deterministic=cluster.deterministic,
            checkpoints=f"{cluster.checkpoints.rstrip('/')}/rehearsal" if cluster.checkpoints else "",
            attempts=2,
            timeout_s=max(300, cluster.timeout_s),
            memory=cluster.memory,
        )


def _passable(rule: GateRule) -> str:
    """Return a rule that any first model passes; one against the champion passes where there is none."""
    if not isinstance(rule, AbsoluteRule):
        return str(rule)
    return "at most 1000000000" if isinstance(rule, AtMost) else "at least 0"


def axes_used(placements: Sequence[tuple[Layout, int]]) -> list[str]:
    """Return the layout axes with more than one process in any of `placements`: `tp`, `cp`, `pp`, `dp`, ..."""
    used = [axis for axis in ("tp", "cp", "pp") if any(getattr(layout, axis) > 1 for layout, _ in placements)]
    return used + (["dp"] if any(layout.dp(processes) > 1 for layout, processes in placements) else [])


# What a rehearsal finds.

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
        pairs = zip(self.scaled.spans, self.scaled.recipe.schedule.trained, strict=True)
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
                _layout(*self.scaled.placements[full.name]),
            )
            for full, small in pairs
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


def _layout(layout: Layout, processes: int) -> str:
    axes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp(processes)}
    return " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "1 process"


def full_size_findings(recipe: Recipe, cluster: Cluster, root: Root) -> Iterator[RehearsalFinding]:
    """Yield the faults of the recipe at full size on `cluster`, by its own checks and by arithmetic."""
    filled = list(full_disk(recipe, root))
    try:
        check_run(recipe, cluster, root, thorough=True)
    except ValueError as error:
        lines = str(error).splitlines()
        yield from (RehearsalFinding(line) for line in lines if not (filled and line.startswith("disk: ")))
    try:
        conversations = survey_chats(recipe, known_tokenizer(root, recipe), remote=False)
        yield from map(RehearsalFinding, conversation_shortage(recipe, conversations, SURELY))
    except ValueError as error:
        yield from map(RehearsalFinding, str(error).splitlines())
    yield from filled
    yield from gate_findings(recipe)
    yield from (RehearsalFinding(line, fails=False) for line in lint(recipe))
    nodes = cluster.nodes
    if nodes and cluster.processes % nodes.processes_per_node:
        yield RehearsalFinding(
            f"cluster.processes: {cluster.processes} leave part of a node of {nodes.processes_per_node} idle; "
            f"write {nodes.nodes(cluster.processes) * nodes.processes_per_node}",
            fails=False,
        )
    published = ("core", "full", "full-hub")
    suites = [suite for suite in (recipe.evaluate.final, recipe.evaluate.suite) if suite in published]
    if suites and not recipe.curate.decontaminate:
        yield RehearsalFinding(
            f"curate.decontaminate: is empty, and suite {suites[0]} reads published questions, which are in web "
            "text; write [evaluated]",
            fails=False,
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
        scores, powers = possible_scores(final), gate_powers(recipe)
    except ValueError:  # `check_run` reports it
        return
    for pattern, metrics in assign_rules(recipe.promote.when, scores).items():
        rule = recipe.promote.when[pattern]
        accuracies = [metric for metric in metrics if "bpb" not in metric and metric != CORE]
        if isinstance(rule, AtLeast) and accuracies and rule.bound > 1:
            yield RehearsalFinding(f"promote.when: {pattern}: {rule}: no accuracy is above 1; write at least 0.3")
    yield from (RehearsalFinding(warning) for power in powers if (warning := power.warning()))


def data_findings(scaled: ScaledRun, store: Store, record: RunRecord) -> Iterator[RehearsalFinding]:
    """Yield domains that run out of text, by what curation kept of the sample, and domains of which it keeps little."""
    recipe = scaled.original
    if "curate" not in record.steps:
        return
    read = store.load(record.steps["collect"].artifact).metadata["bytes"]
    curated = store.load(record.steps["curate"].artifact)
    small_held_out, held_out = (float(each.curate.validation_fraction) for each in (scaled.recipe, recipe))
    kept = {domain: size * (1 - held_out) / (1 - small_held_out) for domain, size in curated.metadata["bytes"].items()}
    per_byte = {domain: tokens_per_byte(recipe, store, record, domain, kept[domain]) for domain in kept}
    ledger = pq.read_table(curated.path_of("ledger.parquet")).to_pylist()
    for surveyed in survey(recipe):
        domain, share = surveyed.domain, kept[surveyed.domain] / max(1, read[surveyed.domain])
        if share < LITTLE and not surveyed.name:
            dropped = [row for row in ledger if row["domain"] == domain and row["outcome"] not in ("kept", "held_out")]
            reason = max(dropped, key=lambda row: int(row["bytes"] or 0))
            yield RehearsalFinding(
                f"curate: keeps {share:.1%} of sources.{surveyed.title}; most goes for {reason['outcome']} "
                f"({reason['documents']:,} documents of the sample); loosen it for this domain in curate.quality_for",
                fails=False,
            )
        if not surveyed.complete:
            sources = [source for source in recipe.sources[domain] if (source.name or "") == surveyed.name]
            estimates = [estimate_text(source) for source in sources if source.uri not in BUILT_IN]
            size = sum(estimates) + (surveyed.bytes if len(estimates) < len(sources) else 0)
            surveyed = replace(surveyed, bytes=size, complete=True)
        if fault := data_shortage(recipe, surveyed, share * per_byte[domain]):
            yield RehearsalFinding(f"{fault} (of the sample, curation keeps {share:.0%})")


def tokens_per_byte(recipe: Recipe, store: Store, record: RunRecord, domain: Domain, kept: float) -> float:
    """Return the tokens of a byte of curated text: measured with the recipe's own tokenizer, or the usual number."""
    if recipe.tokenizer.use is None or "tokenize" not in record.steps or not kept:
        return USUAL_TOKENS_PER_BYTE  # the tokenizer in small has a small vocabulary
    counts = store.load(record.steps["tokenize"].artifact).metadata["tokens"]
    return float(counts[domain]) / kept


def unproven(scaled: ScaledRun) -> list[str]:
    """Return the limits of a rehearsal of this recipe and cluster on processors."""
    recipe, cluster = scaled.original, scaled.original_cluster
    layouts = [cluster.for_stage(span.stage.name, span.name).layout for span in scaled.spans]
    lines = [
        "numbers, speed and memory of GPUs: herd plan predicts them; make test-cuda executes every CUDA path on a "
        "null device",
        "whether the trained model passes its gates",
    ]
    here = max(processes for _, processes in scaled.placements.values())
    if cluster.processes > here:
        lines.append(f"{cluster.processes:,} processes at once: at most {here} here")
    if recipe.precision != "fp32":
        lines.append(f"precision {recipe.precision}: fp32 here")
    if any(layout.compile or layout.async_tp for layout in layouts):
        lines.append("compiled blocks and asynchronous tensor parallelism: eager here")
    if cluster.launcher != "local":
        lines.append(f"launcher {cluster.launcher}: processes of this machine here")
    if cluster.data != "threads":
        lines.append(f"data on {cluster.data}: threads here")
    if recipe.init_from is not None:
        lines.append("init_from: random weights here, in another shape")
    if device_memory(cluster) is None:
        lines.append("memory of the stages: cluster.fabric is not given (herd plan presets)")
    return lines


def built_layouts(scaled: ScaledRun, root: Root) -> str:
    """Build the last rank of each layout at full size, on the meta device; return what it holds.

    A layout that cannot be built is left out: `check_run` reports it.
    """
    from herd.llama3.parallel.check_layout import check_layout  # imports torch

    recipe, built = scaled.original, dict[tuple[Layout, int], str]()
    vocab_size = known_vocab_size(root, recipe)
    for span in scaled.spans:
        placed = scaled.original_cluster.for_stage(span.stage.name, span.name)
        key = (placed.layout, placed.processes)
        if key in built:
            continue
        load = Load(span.lengths[0], 1, placed.layout.pp, recipe.precision)
        with suppress(ValueError):
            check = check_layout(recipe.model, vocab_size, *key, load, [placed.processes - 1])
            (rank,) = check.ranks
            built[key] = (
                f"{span.name} {len(rank.layers)} layers, {tokens(rank.parameters)} parameters of rank {rank.rank:,}"
            )
    return "; ".join(built.values())


def proofs(scaled: ScaledRun, root: Root, record: RunRecord, killed: str) -> Iterator[tuple[str, str]]:
    """Yield the proofs of the run in small; `killed`: the stage in which a rank was killed, or empty."""
    steps = [step for step in pipeline_steps(scaled.recipe) if step.name in record.steps]
    if data := [step.name for step in steps if step.span is None]:
        yield "data", f"{', '.join(data)} of a sample in {_seconds(record, data)}"
    if trained := [step.name for step in steps if step.kind == "pretrain"]:
        axes = ", ".join(axes_used(list(scaled.placements.values()))) or "one process"
        yield "training", f"{', '.join(trained)} in {_seconds(record, trained)}; layout axes: {axes}"
    if killed and killed in record.steps:
        attempts = len(list((Runs(root).folder(record.name) / "logs" / killed).glob("attempt-*")))
        yield "recovery", f"a rank of {killed} was killed; attempt {attempts} went on from a checkpoint"
    if judged := [step.name for step in steps if step.span is not None and step.kind != "pretrain"]:
        yield "evaluation", f"{', '.join(judged)} in {_seconds(record, judged)}"
    if record.verdict:
        yield "promotion", f"the gate decided: {record.verdict}"


def _seconds(record: RunRecord, names: Sequence[str]) -> str:
    return format_duration(sum(record.steps[name].seconds for name in names))


def print_rehearsal(rehearsal: Rehearsal, console: Console) -> None:
    """Print the page."""
    stages = FittedTable(
        "", STAGE_HEADERS, left_out=("tokens here", "tokens", "batch here", "batch"), numbers=STAGE_HEADERS[1:-1]
    )
    for row in rehearsal.stage_rows():
        stages.add_row(*row)
    console.print(f"\n[bold]Rehearsal of {rehearsal.scaled.original.name}[/]: at full size, and here")
    console.print(stages)
    for title, pairs in (
        ("proven", rehearsal.proven),
        ("not proven", [("", line) for line in unproven(rehearsal.scaled)]),
    ):
        console.print(f"[bold]{title}[/]")
        for name, text in pairs:
            console.print(f"  {name:<12}{escape(text)}" if name else f"  {escape(text)}")
    for finding in sorted(rehearsal.findings, key=lambda finding: not finding.fails):
        console.print(f"{'[red]fails[/]' if finding.fails else '[yellow]odd[/]  '}  {escape(finding.text)}")
    if not rehearsal.faults:
        console.print("[green]nothing fails[/] of what can be tried here")


def write_rehearsal(rehearsal: Rehearsal, folder: Path) -> Path:
    """Write `rehearsal.html` and `rehearsal.json` into `folder`; return the page."""
    page = folder / "rehearsal.html"
    rows, limits = rehearsal.stage_rows(), unproven(rehearsal.scaled)
    text = render(page.name, rehearsal=rehearsal, headers=STAGE_HEADERS, rows=rows, unproven=limits)
    write_atomic(page, text)
    write_atomic(page.with_suffix(".json"), json.dumps(rehearsal.as_dict(), indent=1))
    return page
