"""What the planner says of the stages of a run before they start: whether they fit, and how fast they will be.

A layout that does not fit is refused with one that would. What is predicted goes to MLflow as `plan/*`, beside what is
measured, so that everyone sees the error of the model. Where devices are not known or not measured (`herd plan
calibrate`), the prediction is absent: nothing is guessed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from herd.llama3.evaluate.held_out import document_bytes
from herd.llama3.evaluate.needle import KINDS, context_lengths
from herd.llama3.evaluate.suite import recipe_suite, stage_suite_name, with_suite
from herd.llama3.evaluate.task import TASK_KINDS, WrittenKind
from herd.llama3.hardware.topology import load_fabric
from herd.llama3.model.flops import flops_per_token, parameter_count, recipe_vocab_size
from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import BYTES, DECODED, RankCoords, inference_bytes, memory, memory_error
from herd.llama3.recipe.schedule import Segment, StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.train import metrics
from herd.llama3.train.job import PredictedStepTimes
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.cluster import Cluster, quantity_bytes
from herd.tasks.launch.devices import (
    DeviceMemory,
    device_memory,
    memory_needs,
    micro_batch_load,
    place_evaluation,
    rank_memory,
    run_fabric,
)
from herd.tasks.plan.calibrate import load_calibration
from herd.tasks.step import CALIBRATION

if TYPE_CHECKING:
    from herd.llama3.planner.device_curves import Curves
    from herd.llama3.planner.step_time import StepModel


def memory_faults(recipe: Recipe, cluster: Cluster) -> list[str]:
    """Return a line for each stage whose layout does not fit its devices, and for a pod's memory, with what would."""
    faults = pod_memory_faults(recipe, cluster)
    for span in recipe.schedule.trained:
        stage_cluster = cluster.for_stage(span.stage.name, span.name)
        device = device_memory(stage_cluster)
        if device is None:
            continue
        fullest = max(
            ((memory_needs(recipe, stage_cluster, segment, device), segment) for segment in span.segments),
            key=lambda p: p[0].total,
        )
        if fullest[0].total > device.limit:
            shortage = memory_error(fullest[0], device.limit)
            faults.append(
                f"cluster.layout: {span.name} does not fit {device.name}: {shortage}; "
                f"{memory_remedy(recipe, stage_cluster, fullest[1], device)}"
            )
    return faults


def pod_memory_faults(recipe: Recipe, cluster: Cluster) -> list[str]:
    """Return a line if a save copies more to a pod's memory than the launcher requests; other use of it is unknown."""
    given, saves = getattr(cluster.nodes, "memory", None), list[tuple[int, str]]()
    if cluster.nodes is None or given is None:
        return []
    limit = quantity_bytes(given)
    for span in recipe.schedule.trained:
        stage_cluster = cluster.for_stage(span.stage.name, span.name)
        layout, world, each = stage_cluster.layout, stage_cluster.processes, cluster.nodes.processes_per_node
        pod = DeviceMemory("pod", limit, cuda=True)
        load = micro_batch_load(recipe, layout, world, stage_cluster.micro_batch, span.segments[0], pod)
        saved = [need.saved for need in memory(recipe.model, recipe_vocab_size(recipe), layout, world, load)]
        ranks = [saved[RankCoords.from_rank(rank, layout).pp] for rank in range(world)]
        saves += [(sum(ranks[first : first + each]), span.name) for first in range(0, world, each)]
    most, name = max(saves, default=(0, ""))
    if most <= limit:
        return []
    return [
        f"cluster.{cluster.launcher}.memory: {given} is {limit / 1e9:,.1f} GB, and a save of {name} copies "
        f"{most / 1e9:,.1f} GB to the memory of a pod; write {math.ceil(2 * most / 2**30)}Gi, because torch rounds "
        "each tensor there up to a power of two, or take more nodes"
    ]


def memory_remedy(recipe: Recipe, cluster: Cluster, segment: Segment, device: DeviceMemory) -> str:
    """Return the smallest change that makes a segment fit: micro-batch, then recomputation and ZeRO, then more of both.

    In words: which fields to write.
    """
    from herd.llama3.planner.layout_search import LADDER, MICRO_BATCHES

    smaller = [size for size in (cluster.micro_batch, *reversed(MICRO_BATCHES)) if size <= cluster.micro_batch]
    tries = [(size, cluster.layout) for size in smaller]
    for zero, recompute in LADDER if cluster.layout.schedule != "zero-bubble" else ():  # which allows neither
        tries += [(size, cluster.layout.model_copy(update={"zero": zero, "recompute": recompute})) for size in smaller]
    for size, layout in tries:
        if rank_memory(recipe, layout, cluster.processes, size, segment, device).total <= device.limit:
            changes = {"micro_batch": size} if size != cluster.micro_batch else {}
            own = {
                f"layout.{name}": getattr(layout, name)
                for name in ("zero", "recompute")
                if getattr(layout, name) != getattr(cluster.layout, name)
            }
            return "write " + ", ".join(f"{name}: {value}" for name, value in {**changes, **own}.items())
    return "no micro-batch, ZeRO level or recomputation helps; take more processes, or herd plan --cluster to find some"


def predict_step_times(root: Root, recipe: Recipe, cluster: Cluster, span: StageSpan) -> PredictedStepTimes | None:
    """Return the prediction for a stage on its `cluster`; None where nothing is known."""
    device = device_memory(cluster)
    if device is None:
        return None
    model = _step_model(root, recipe, cluster)
    by_seq = {segment.seq_len: _of_segment(recipe, cluster, segment, device, model) for segment in span.segments}
    return PredictedStepTimes(processes=cluster.processes, by_seq=by_seq)


def _of_segment(
    recipe: Recipe, cluster: Cluster, segment: Segment, device: DeviceMemory, model: StepModel | None
) -> dict[str, float]:
    need = memory_needs(recipe, cluster, segment, device)
    predicted = {metrics.PLANNED_GIB: need.total / 2**30}
    if model is not None:
        load = micro_batch_load(recipe, cluster.layout, cluster.processes, cluster.micro_batch, segment, device)
        step_s = model.predict(cluster.layout, cluster.processes, load).total
        flops = flops_per_token(recipe.model, recipe_vocab_size(recipe), segment.seq_len).causal * segment.batch
        predicted |= {metrics.PLANNED_STEP_S: step_s, metrics.PLANNED_TFLOPS: flops / cluster.processes / step_s / 1e12}
    return predicted


def _step_model(root: Root, recipe: Recipe, cluster: Cluster) -> StepModel | None:
    """Return the model of steps on a described cluster, or on this machine if it was measured and works alone.

    A run on a machine that was not measured imports nothing of the planner.
    """
    alone = cluster.processes == 1 and cluster.launcher == "local" and not cluster.fabric
    curves = local_calibration(root, cluster.device) if alone else None
    if not cluster.fabric and curves is None:
        return None  # traffic between processes of this machine is not measured
    from herd.llama3.planner.collectives import Network
    from herd.llama3.planner.routing import bandwidth_share
    from herd.llama3.planner.step_time import StepModel
    from herd.tasks.plan.options import device_curves

    vocab_size = recipe_vocab_size(recipe)
    if cluster.fabric:
        fabric = run_fabric(cluster)
        return StepModel(
            recipe.model, vocab_size, Network(fabric, bandwidth_share(fabric)), device_curves(fabric, root)
        )
    assert curves is not None
    return StepModel(recipe.model, vocab_size, Network(load_fabric("roce-24k")), curves)  # one process sends nothing


def local_calibration(root: Root, device: str = "auto") -> Curves | None:
    """Return the newest calibration of this machine's device, or None; `device`: auto, cpu or cuda."""
    if not open_store(root).all(CALIBRATION):  # most roots; do not import torch, which names the device
        return None
    from herd.llama3.planner.calibrate import resolve_device
    from herd.llama3.train.device import device_name

    return load_calibration(root, device_name(resolve_device(device)))


# What evaluation costs. How many questions the published tasks have is assumed, so that a plan needs no data.

QUESTIONS, QUESTION_TOKENS, BUILT_IN_TOKENS = 2_000, 256, 64
"""Questions of a published task without `evaluate.limit`, tokens read for one without its shared examples, and tokens
of a built-in question."""
EFFICIENCY = 0.5
"""Share of a large product's rate that scoring reaches, and of the memory bandwidth that generating does: assumed."""
FP32_SHARE = 67 / 989
"""FP32 products without tensor cores over BF16 ones (H100 SXM data sheet)."""


class EvaluationCost(NamedTuple):
    """Estimate of all evaluations and gates of a run."""

    layout: Layout
    processes: int
    process_bytes: float
    evaluations: int
    gates: int
    read: float
    """Tokens read by scoring."""
    written: float
    """Tokens generated."""
    seconds: float

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.processes / 3600

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "layout": self.layout.model_dump(include={"tp", "pp"}), "gpu_hours": self.gpu_hours}


def evaluation_cost(recipe: Recipe, cluster: Cluster) -> EvaluationCost:
    """Return the estimate for `cluster`, which has a fabric. Raises ValueError as `place_evaluation` does."""
    layout, processes = place_evaluation(recipe, cluster)
    accelerator, section, vocab_size = (
        load_fabric(cluster.fabric).accelerator,
        recipe.evaluate,
        recipe_vocab_size(recipe),
    )
    schedule, domains = recipe.schedule, sum(bool(sources) for sources in recipe.sources.values())
    window = recipe.final_model.max_seq_len
    evaluated = [*(section.after or [recipe.stages[-1].name]), "champion"]
    work: list[tuple[float, int]] = []  # positions, and the sequence length that attention sees
    written = 0.0
    for suite in (recipe_suite(with_suite(recipe, stage_suite_name(recipe, name))) for name in evaluated):
        if "bits" in suite.built_in:
            work.append((section.documents * domains * document_bytes(recipe) / 4, window))
        if "needle" in suite.built_in:
            work += [(section.needles * len(KINDS) * length, length) for length in context_lengths(window)]
        count = section.limit or QUESTIONS
        work.append((len(suite.built_in) * section.questions * BUILT_IN_TOKENS, BUILT_IN_TOKENS))
        work.append((len(suite.tasks) * count * QUESTION_TOKENS, QUESTION_TOKENS))
        answers = [task.definition for task in suite.tasks if not isinstance(task.definition, Path)]
        written += sum(
            count * task.writing.samples * task.writing.max_tokens
            for task in answers
            if isinstance(TASK_KINDS[task.kind], WrittenKind)
        )
    gated = [(span, part) for span in schedule.spans if span.stage.gates for part in span.parts]
    for span, part in gated:
        if "needle" in span.stage.gates:
            work.append((section.needles * part.lengths[-1], part.lengths[-1]))
        if "short-context" in span.stage.gates:
            work.append((2 * section.documents * domains * span.lengths[0], span.lengths[0]))
    flops = sum(positions * flops_per_token(recipe.model, vocab_size, length).causal / 3 for positions, length in work)
    rate = accelerator.reached_tflops * 1e12 * EFFICIENCY * (1 if section.precision == "bf16" else FP32_SHARE)
    weights = BYTES[section.precision] * parameter_count(recipe.model, vocab_size)
    token_s = weights / layout.tp / (accelerator.memory_tb_s * 1e12 * EFFICIENCY)  # stage after stage
    replicas = processes // layout.model_parallel
    seconds = flops / rate / processes + written / DECODED["cuda"] / replicas * token_s
    need = inference_bytes(recipe.final_model, vocab_size, layout, BYTES[section.precision], "cuda")
    read = sum(positions for positions, _ in work)
    return EvaluationCost(layout, processes, need, len(evaluated), len(gated), read, written, seconds)
