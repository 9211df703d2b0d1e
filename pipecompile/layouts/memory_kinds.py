"""Bytes of a device in a step, by kind, as ranks hold them: parameters whole, optimizer state sharded.

                dp                 dp_shard of s, within a step
parameters      whole              whole, and a part of s
gradients       whole              whole, and a part of s
optimizer       whole              a part of s
activations     what the schedule has in flight; or, if that is more, the message that reduces the gradients of a stage
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.module_names import held_tensors
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["DeviceBytes", "StageWeights", "stage_weights"]


@dataclass(frozen=True, slots=True)
class StageWeights:
    """Bytes of the parameters of a stage, and of those of them that are trained."""

    parameters: float
    trained: float


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes that a device holds at the peak of a step, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @classmethod
    def of(
        cls, weights: Sequence[StageWeights], activations: float, *, replicas: int, shards: int, optimizer_state: int
    ) -> DeviceBytes:
        """Return the bytes of a device with these stages.

        `activations` are bytes; `replicas` is the number of copies and shards, `shards` of shards alone, and `optimizer_state` the
        number of tensors that the optimizer keeps per parameter.
        """
        whole, trained = sum(w.parameters for w in weights), sum(w.trained for w in weights)
        part = 1 / shards if shards > 1 else 0.0
        message = max((w.trained for w in weights), default=0.0) * (replicas > 1)
        state = optimizer_state * trained / shards
        return cls(whole * (1 + part), trained * (1 + part), state, max(activations, message))

    @property
    def total(self) -> float:
        """The bytes of all kinds."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def stage_weights(graph: TracedGraph, stage_of: Mapping[str, int], n_stages: int) -> list[StageWeights]:
    """Return the weights of each stage. A parameter that a stage uses twice counts once there."""
    held: list[dict[int, nn.Parameter]] = [{} for _ in range(n_stages)]
    for node in compute_nodes(graph):
        parameters = (t for t in held_tensors(graph, node) if isinstance(t, nn.Parameter))
        held[stage_of[node.name]].update({id(parameter): parameter for parameter in parameters})
    return [
        StageWeights(
            float(sum(p.nbytes for p in own.values())), float(sum(p.nbytes for p in own.values() if p.requires_grad))
        )
        for own in held
    ]
