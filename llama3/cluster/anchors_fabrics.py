"""A17: a step on tuned RoCE and on InfiniBand."""

from __future__ import annotations

from llama3.cluster.anchor import Anchor
from llama3.cluster.fabrics import on_fabric
from llama3.cluster.published import fitted, meta_layout, wanted
from llama3.cluster.topology import Fabric, load_fabric
from llama3.parallel.scale import TABLE_4

SOURCE = "arXiv 2407.21783, section 3.3.1: tuned to equivalent performance; no figure is published"
MOST = 0.02


def anchors() -> list[Anchor]:
    """Return each row of Table 4 on both clusters, and RoCE untuned, which must be slower."""
    tuned, band = load_fabric("roce-24k"), load_fabric("ib-24k")
    plain = tuned.model_copy(update={"routing": "ecmp", "queue_pairs": 1})
    rows = []
    for row in range(len(TABLE_4)):
        ratio = _step(row, tuned) / _step(row, band)
        what = f"step on RoCE over InfiniBand, row {row + 1} of Table 4"
        rows.append(Anchor("A17", what, ratio, 1.0, "", "+-2 %", abs(ratio - 1) <= MOST, SOURCE))
    slow = _step(2, plain) / _step(2, band)
    what = "the same for row 3 with plain ECMP"
    rows.append(Anchor("A17", what, slow, 1.0, "", "must miss 2 %", slow - 1 > MOST, ablation=True))
    return rows


def _step(row: int, fabric: Fabric) -> float:
    return on_fabric(wanted(row), fabric, fitted(), meta_layout(row)).best.time.total
