"""The devices of a cluster: their memory, what a stage needs of it, and the layout in which evaluation fits.

Where devices are not known the answer is None: nothing is guessed.
"""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass
from typing import Literal

import psutil

from herd.llama3.hardware.topology import Fabric, load_fabric
from herd.llama3.model.flops import recipe_vocab_size
from herd.llama3.parallel.layout import FIELD, Layout
from herd.llama3.parallel.memory import (
    BYTES,
    RESERVE,
    Load,
    RankMemory,
    average_bytes,
    inference_bytes,
    inference_layout,
    memory,
    split_micro_batches,
)
from herd.llama3.recipe.schedule import Segment
from herd.llama3.recipe.schema import Recipe
from herd.tasks.cluster import SCHEDULERS, Cluster
from herd.tasks.launch.local import visible_gpus


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one process."""

    name: str
    limit: float
    """Bytes that a process may use."""
    cuda: bool
    per_node: int = 1
    """Devices of a machine."""


def device_memory(cluster: Cluster) -> DeviceMemory | None:
    """Return the device memory of a process of `cluster`, None if it is not known here. Raises ValueError."""
    if cluster.fabric:
        fabric = run_fabric(cluster)
        limit = fabric.accelerator.memory_gb * 1e9 * (1 - RESERVE)
        return DeviceMemory(fabric.accelerator.name, limit, cuda=True, per_node=fabric.server.gpus)
    if cluster.launcher != "local":
        return None
    if cluster.device != "cpu" and (gpu := _gpu()):
        return gpu
    return DeviceMemory("this machine", psutil.virtual_memory().total * (1 - RESERVE) / cluster.processes, cuda=False)


def _gpu() -> DeviceMemory | None:
    """Return the first GPU as the driver's tool describes it; torch would take a second, and start CUDA."""
    if not (count := visible_gpus()):
        return None
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    name, _, mebibytes = listed[0].rpartition(",") if listed else ("", "", "")
    if not mebibytes.strip().isdigit():
        return None
    return DeviceMemory(name.strip(), int(mebibytes) * 2**20 * (1 - RESERVE), cuda=True, per_node=count)


def memory_needs(recipe: Recipe, cluster: Cluster, segment: Segment, device: DeviceMemory) -> RankMemory:
    """Return the memory of the fullest process in a segment. Raises ValueError if the layout cannot be cut so."""
    return rank_memory(recipe, cluster.layout, cluster.processes, cluster.micro_batch, segment, device)


def rank_memory(
    recipe: Recipe, layout: Layout, processes: int, micro_batch: int, segment: Segment, device: DeviceMemory
) -> RankMemory:
    load = micro_batch_load(recipe, layout, processes, micro_batch, segment, device)
    ranks = memory(recipe.model, recipe_vocab_size(recipe), layout, processes, load)
    return max(ranks, key=lambda need: need.total)


def micro_batch_load(
    recipe: Recipe, layout: Layout, processes: int, micro_batch: int, segment: Segment, device: DeviceMemory
) -> Load:
    sequences = max(1, segment.batch // (segment.seq_len * layout.dp(processes)))
    kind: Literal["cuda", "cpu"] = "cuda" if device.cuda else "cpu"
    parts = split_micro_batches(layout, sequences, micro_batch)
    return Load(segment.seq_len, *parts, recipe.precision, device=kind, average=average_bytes(recipe, segment))


def place_evaluation(recipe: Recipe, cluster: Cluster) -> tuple[Layout, int]:
    """Return the layout and the number of processes that evaluate the recipe's model on `cluster`.

    Without `cluster.evaluate.layout` a replica takes the fewest devices that it fits. Raises ValueError if the model
    does not fit, or cannot be split as the layout says.
    """
    wish, vocab_size, device = cluster.evaluate, recipe_vocab_size(recipe), device_memory(cluster)
    layout = wish.layout or Layout()
    if device is None or not device.cuda:  # processes of one machine share its memory: a split saves none
        processes = wish.processes or layout.model_parallel
        limit = device.limit * cluster.processes / processes if device else math.inf
        kind: Literal["cpu", "cuda"] = "cpu"
    else:
        limit, kind = device.limit, "cuda"
        per_node = cluster.nodes.processes_per_node if cluster.nodes else device.per_node
        itemsize = BYTES[recipe.evaluate.precision]
        if wish.layout is None and (
            chosen := inference_layout(recipe.final_model, vocab_size, itemsize, kind, limit, per_node)
        ):
            layout = chosen
        processes = wish.processes or layout.model_parallel
    try:
        layout.check(recipe.model, vocab_size, processes)
    except ValueError as error:
        raise ValueError(str(error).replace(FIELD, "cluster.evaluate.layout")) from None
    need = inference_bytes(recipe.final_model, vocab_size, layout, BYTES[recipe.evaluate.precision], kind)
    if device is not None and need > limit:
        smaller = "evaluate.precision: bf16, or " if recipe.evaluate.precision == "fp32" else ""
        raise ValueError(
            f"cluster.evaluate.layout: to evaluate the model in {recipe.evaluate.precision}, tp {layout.tp} x "
            f"pp {layout.pp} needs {need / 1e9:,.1f} GB a process, and {device.name} has {limit / 1e9:,.1f}; write "
            f"{smaller}a larger tp or pp"
        )
    return layout, processes


def run_fabric(cluster: Cluster, sparse: bool = False) -> Fabric:
    """Return the fabric that `cluster` names. Raises ValueError.

    Where its nodes run fewer processes than a server has GPUs, a server of the fabric is that part of one.
    """
    fabric = load_fabric(cluster.fabric, sparse)
    server, per_node = fabric.server, min(processes_per_node(cluster).values(), default=fabric.server.gpus)
    if server.gpus > per_node and server.gpus % per_node == 0:
        whole = server.model_dump(include={"gpus", "overhead_watts", "peak_watts", "frontend_gbit_s"})
        scaled = {name: value * per_node / server.gpus for name, value in whole.items()} | {"gpus": per_node}
        fabric = fabric.model_copy(update={"server": server.model_copy(update=scaled)})
    return fabric


def processes_per_node(cluster: Cluster) -> dict[str, int]:
    """Return the processes on a node by launcher: the cluster's own, or without one those that its file gives."""
    if cluster.nodes is not None:
        return {cluster.launcher: cluster.nodes.processes_per_node} if cluster.nodes.gpus else {}
    return {
        launcher: nodes.processes_per_node
        for launcher in SCHEDULERS
        for nodes in [getattr(cluster, launcher)]
        if "processes_per_node" in nodes.model_fields_set
    }
