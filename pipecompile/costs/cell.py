"""One node of a graph with its arguments, set up so that it can be run forward and backward again and again.

The values between nodes are detached, so each node's backward stands alone:

    value ──detach──► Root ──► the node ──► result ──detach──► value
                       ▲                      │
                       └── autograd.grad ─────┘        seeded with ones

`Root` is an autograd node that copies nothing. What comes out of it is no leaf, so the node may write into it in place,
and it shares the value's storage, so that every other view of the value sees the write, as in the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_map_only

from pipecompile.costs.saved import SavedLedger

__all__ = ["Cell", "settled", "tensors_in"]


def tensors_in(value: object) -> list[Tensor]:
    """The tensors of a nested structure, each once, in order."""
    leaves: list[object] = []
    map_aggregate(value, leaves.extend_leaves if False else lambda leaf: leaves.extend(tree_leaves(leaf)))  # type: ignore[arg-type]
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
