"""Scale a recipe and its cluster down to minutes on one machine: the same steps, in the same proportions.

Kept: sources (a sample), curation, stages and their order, the batch ramp, gates, suites, and the kind of layout: an
axis of more than one process becomes one of two. Scaled: model, sequences, batches, steps, questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

from llama3.parallel.layout import Layout
from llama3.recipe.gates import AbsoluteRule, AtMost, GateRule
from llama3.recipe.load import resolved
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.recipe.units import Bytes, Cadence, Share, Tokens
from storage.processes import processors
from tasks.cluster import Cluster, StageCluster

LONGEST = 1024
"""Tokens of the longest sequence; the others are as much shorter as in the recipe."""
SEQUENCE_UNIT = 8
"""Every length is a multiple: twice cp x tp, each at most 2."""
STEPS = 32
"""Optimizer steps of the run, divided by the tokens of the stages."""
FEWEST = 4
"""Minimum steps per sequence length, unless the recipe itself has fewer."""
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
    }
    return layout.model_copy(update=changes), model_parallel * dp


class ScaledRun:
    """A recipe and a cluster in small."""

    def __init__(self, recipe: Recipe, cluster: Cluster, processes: int = 8) -> None:
        """`processes`: maximum trainer processes."""
        self.original, self.original_cluster, self.schedule = recipe, cluster, Schedule(recipe)
        self.parts = [part for span in self.schedule.spans for part in span.parts]
        self.places = {
            part.name: scaled_layout(place.layout, place.processes, processes)
            for part in self.parts
            for place in [cluster.for_stage(part.stage.name, part.name)]
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
        return max(layout.dp(processes) for layout, processes in (self.places[part.name] for part in span.parts))

    def _batches(self) -> dict[str, int]:
        """Return stage -> tokens per step: batches keep their ratio, and the smallest has the fewest sequences."""
        units = {
            span.name: lcm(*map(self.sequence, span.lengths)) * self._data_parallel(span)
            for span in self.schedule.spans
        }
        sizes = {span.name: span.segments[0].batch / self.divisor for span in self.schedule.spans}
        factor = max(1.0, min(sizes[name] / units[name] for name in units))
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
        plain["model"] = self._model()
        plain["lr"] = self._rate(plain["lr"])
        plain["stages"] = [self._stage(span, stage) for span, stage in self._spans(plain["stages"])]
        for sources in plain["sources"].values():
            for source in sources:
                most = SAMPLE // len(sources)
                source["limit"] = str(Bytes(min(most, Bytes.parse(source["limit"]) if source["limit"] else most)))
        if train := plain["tokenizer"]["train"]:
            train["vocab"], train["sample"] = min(train["vocab"], VOCABULARY), str(Bytes(SAMPLE))
        if unit := recipe.tokens.chunk_tokens:
            plain["tokens"]["chunk_tokens"] = f"{self.sequence(unit)} tokens"
        plain["tokens"]["max_epochs"] = 1e6  # of a sample; `rehearsal_findings` judges the whole source
        if recipe.curate.validation_fraction:
            plain["curate"]["validation_fraction"] = str(max(recipe.curate.validation_fraction, VALIDATION))
        plain["spikes"]["sigma"] = 1e6  # a few steps of a tiny model say nothing about spikes
        keep = recipe.checkpoint.keep.every
        total = sum(self.steps[segment] * self.batches[segment.stage] for segment in self.schedule.segments)
        plain["checkpoint"]["every"] = str(Cadence(max(1, total // 16), "tokens"))
        plain["checkpoint"]["keep"]["every"] = f"{max(1, self.position(keep))} tokens" if keep else None
        plain["evaluate"] |= {
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

    def _spans(self, stages: list[dict[str, Any]]) -> list[tuple[StageSpan, dict[str, Any]]]:
        return list(zip(self.schedule.spans, stages, strict=True))

    def _model(self) -> dict[str, Any]:
        model = self.original.model
        layers = max([2, *(layout.stages for layout, _ in self.places.values())])
        plain = resolved(self.original)["model"]
        if plain["rope_scaling"]:
            plain["rope_scaling"]["original"] = max(2, plain["rope_scaling"]["original"] // self.divisor)
        heads = 2 if model.heads == model.kv_heads else 4
        longest = max(self.sequence(segment.seq_len) for segment in self.schedule.segments)
        small = {"preset": "custom", "layers": layers, "dim": 64, "ffn": 224, "heads": heads, "kv_heads": 2}
        return {**plain, **small, "max_seq_len": max(longest, self.sequence(model.max_seq_len))}

    def _rate(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return the learning rate with warm-up and decay at the corresponding positions."""
        first = self.batches[self.schedule.spans[0].name]
        end = self.schedule.reached(self.original.lr.warmup)[1]
        warmup = max(first, self.position(float(end)))
        plain["warmup"] = f"{warmup} tokens"
        for name in ("cosine", "linear"):
            if plain.get(name):
                over = self.schedule.reached(getattr(self.original.lr, name).over)[1]
                plain[name]["over"] = f"{max(warmup + first, self.position(float(over)))} tokens"
        if plain.get("wsd"):
            decay, run_end = self.original.lr.decay, self.schedule.timeline.decay_end[1]
            length = float(self.schedule.reached(getattr(decay, "decay"))[1])  # noqa: B009  (of Wsd alone)
            begin = self.position(max(0.0, run_end - length))
            plain["wsd"]["decay"] = f"{max(first, self.position(run_end) - begin)} tokens"
        return plain

    def _stage(self, span: StageSpan, plain: dict[str, Any]) -> dict[str, Any]:
        lengths = [f"{self.steps[segment] * self.batches[span.name]} tokens" for segment in span.segments]
        several = isinstance(span.stage.seq_len, list)
        sequences = [self.sequence(length) for length in span.lengths]
        plain |= {
            "until": None,
            "for": lengths if several else lengths[0],
            "seq_len": sequences if several else sequences[0],
            "batch": f"{self.batches[span.name]} tokens",
        }
        if span.stage.gates:  # they are computed, and pass: an untrained model finds no needle
            passable = {"short-context": "no worse than 100%", "needle": "at least 0"}
            plain["gates"] = {gate: passable[gate] for gate in span.stage.gates}
        return plain

    def _cluster(self, cluster: Cluster) -> Cluster:
        stages = {}
        for original, span in zip(self.parts, Schedule(self.recipe).trained, strict=True):
            layout, processes = self.places[original.name]
            per_rank = min(part.batch // part.seq_len for part in span.segments) // layout.dp(processes)
            passes = 2 * layout.pp  # several micro-batches where there are enough sequences
            stages[span.name] = StageCluster(processes=processes, layout=layout, micro_batch=max(1, per_rank // passes))
        first = next(iter(stages.values()))
        assert first.processes is not None
        assert first.layout is not None
        return Cluster(
            processes=first.processes,
            layout=first.layout,
            stages=stages,
            threads=processors(),
            device="cpu",
            evaluators=min(2, cluster.evaluators),
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


def axes_used(places: Sequence[tuple[Layout, int]]) -> list[str]:
    """Return the layout axes with more than one process in any of `places`: `tp`, `cp`, `pp`, `dp`, ..."""
    used = [axis for axis in ("tp", "cp", "pp") if any(getattr(layout, axis) > 1 for layout, _ in places)]
    return used + (["dp"] if any(layout.dp(processes) > 1 for layout, processes in places) else [])
