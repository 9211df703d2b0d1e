"""What one node costs for one micro-batch, and what a provider of such costs looks like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.fx import GraphModule

from pipecompile.errors import PipecompileError

__all__ = ["CostError", "CostProvider", "NodeCost"]


class CostError(PipecompileError):
    """A node failed while its cost was taken; `where` is its line in the user's file. The original is the cause."""


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Seconds and bytes of one node for one micro-batch.

    `saved_bytes` is what autograd keeps for the backward of this node. Parameters and buffers are not counted, and a
    storage that several nodes save is counted once in the whole graph, at the first of them.
    `output_bytes` is the size of the tensors in the node's result, what sending them takes; a view has a size too.
    `weight` is the part of `backward` that is spent on weights alone and may come later (W); half of it when nobody knows.
    `dividing` is what I and W take together beyond `backward`; it comes with W.
    `saves` are the nodes whose results are in `saved_bytes`.
    `spread` is the interquartile range of the measured time over its median; 0 when nothing was measured.
    """

    forward: float
    backward: float
    saved_bytes: int
    output_bytes: int
    spread: float = 0.0
    weight: float | None = None
    dividing: float = 0.0
    saves: frozenset[str] = frozenset()

    @property
    def weight_grad(self) -> float:
        return self.backward / 2 if self.weight is None else self.weight


class CostProvider(Protocol):
    """Anything that maps a traced graph and one micro-batch to the cost of every compute node, by node name.

    `inputs` are the flat values of the placeholders, in order: tensors (real, meta or fake) or constants. The result
    has an entry for every `call_module`, `call_function` and `call_method` node.
    """

    def __call__(self, graph: GraphModule, inputs: Sequence[object]) -> dict[str, NodeCost]: ...
