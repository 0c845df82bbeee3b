"""Connected components of a graph given by its edges: union-find over arrays.

In SQL the same takes one join per step of the longest path, and near-duplicate clusters chain. Here it is near linear
in the number of edges, and central: some 40 bytes per edge and node in memory, which is what it gives up. Documents
without an edge cost nothing.
"""

from __future__ import annotations

import numpy as np

from llama3.data.kernels.arrow import Offsets
from llama3.data.kernels.union import smallest_connected


def components(left: Offsets, right: Offsets) -> tuple[Offsets, Offsets]:
    """Return (nodes, labels) of the graph with edges `left[i]` - `right[i]`; all int64.

    `nodes` are the ends of the edges, sorted, each once; `labels[i]` is the smallest node that is connected to
    `nodes[i]`.
    """
    nodes, places = np.unique(np.concatenate((left, right)), return_inverse=True)
    return nodes, nodes[smallest_connected(len(nodes), places[: len(left)], places[len(left) :])]
