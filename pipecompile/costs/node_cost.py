"""The cost of one node for one micro-batch, and the protocol of functions that provide costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.fx import GraphModule

from pipecompile.errors import PipecompileError

__all__ = ["CostError", "CostProvider", "NodeCost"]


class CostError(PipecompileError):
    """A node failed while its cost was measured. `where` is its line in the user's file; the original error is the
    cause.
    """


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Seconds and bytes of one node for one micro-batch.

    forward, backward   seconds
    saved_bytes         bytes that autograd saves for this backward, without parameters and buffers; a storage saved by
                        several nodes counts once in the graph, at the first node
    output_bytes        size of the tensors in the result, also of views: the bytes to send
    spread              interquartile range of the measured time over its median; 0 if not measured
    weight              seconds of `backward` that W can do; None if unknown: half of `backward`
    dividing            seconds that I and W together take beyond `backward`; they count for W
    saves               names of the nodes whose results are in `saved_bytes`
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
        """Return the seconds of W."""
        return self.backward / 2 if self.weight is None else self.weight


class CostProvider(Protocol):
    """A function from a traced graph and one micro-batch to the cost of every compute node, by node name.

    `inputs` are the flat values of the placeholders, in order: tensors (real, meta or fake) or constants. The result
    has an entry for every `call_module`, `call_function` and `call_method` node.
    """

    def __call__(self, graph: GraphModule, inputs: Sequence[object]) -> dict[str, NodeCost]: ...
