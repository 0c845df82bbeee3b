"""The same job on several clusters: what the network costs a step, and what routing costs the network.

Meta built two clusters of 24,576 GPUs, one on RoCE and one on InfiniBand, tuned both until they trained equally fast,
and trained the largest model on RoCE (arXiv 2407.21783, section 3.3.1). Here each is a file, and the comparison asks
what share of a card's rate flows get under its routing, and what the step makes of that. "Equivalent" is all that is
published of it, so the difference is a calibration and not a validation.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama3.cluster.curves import Curves
from llama3.cluster.layout import Candidate, Wanted, judge
from llama3.cluster.network import Network
from llama3.cluster.routing import bandwidth_share
from llama3.cluster.steptime import StepModel
from llama3.cluster.topology import Fabric
from llama3.parallel.layout import Layout


@dataclass(frozen=True)
class OnFabric:
    """A job on one cluster."""

    fabric: Fabric
    share: float
    """Of a card's rate that flows between racks get under the cluster's routing."""
    best: Candidate


def step_model(wanted: Wanted, fabric: Fabric, curves: Curves) -> StepModel:
    """Return the model of steps on a cluster, with the rate that its routing leaves."""
    return StepModel(wanted.spec, wanted.rows, Network(fabric, bandwidth_share(fabric)), curves)


def on_fabric(wanted: Wanted, fabric: Fabric, curves: Curves, layout: Layout) -> OnFabric:
    """Return a job on a cluster, with micro-batches of one sequence. Raises ValueError if it cannot be cut so."""
    return OnFabric(fabric, bandwidth_share(fabric), judge(wanted, layout, 1, step_model(wanted, fabric, curves)))
