"""Arguments of a loss that come from outside its stage: outputs of earlier stages, and the target. The loss may write into them.

    F   h of stage 0 ─► leaf of the last stage ─► received(leaf) ─► loss: h.mul_(2), labels.sub_(1)
    R   copies of what the loss wrote in F     ─► received(copy) ─► loss, from the same numbers

Autograd refuses writes into leaves, and a loss may test `h.grad_fn is None`. So the last stage and its loss get a tensor on the same
memory that an operation has produced, as in eager. Before a recomputation calls the loss again, its writes to the arguments are undone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from pipecompile.batching.containers import flatten_containers
from pipecompile.errors import InputError
from pipecompile.graph.stages import Stage
from pipecompile.ir import TARGET
from pipecompile.torch_private.storages import storage_key, version_of
from pipecompile.tracing.node_facts import value_of

__all__ = ["loss_places", "received", "require_apart", "unwritten", "versions"]

_PLAIN = (bool, int, float, complex, str, bytes)


class _Received(torch.autograd.Function):
    """The identity, on the same memory and with the same version counter. The result is not a view, so it may be written."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 nothing is kept
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004 nothing was kept
        return gradients[0]


def loss_places(stage: Stage, inputs: Sequence[str], outputs: Collection[str]) -> tuple[int, ...]:
    """Return the places of the inputs of the last stage that the loss gets, or of which it gets a view."""
    nodes: Any = stage.module.graph.output_node().args[0]
    made = zip(stage.outputs, nodes if isinstance(nodes, (tuple, list)) else (nodes,), strict=True)
    shared = {_memory_of(value_of(node)) for name, node in made if name in outputs} - {None}
    taken = zip(stage.inputs, stage.module.graph.find_nodes(op="placeholder"), strict=False)
    viewed = {name for name, node in taken if _memory_of(value_of(node)) in shared}
    return tuple(place for place, name in enumerate(inputs) if name == TARGET or name in viewed or name in outputs)


def received(value: Any) -> Any:
    """Return an output of an earlier stage as the result of an operation; as it is, if it has no gradient."""
    if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
        return _Received.apply(value)
    return value


def versions(values: Sequence[Any]) -> list[int]:
    """Return how often each tensor with a gradient was written, -1 for other values."""
    return [version_of(one) if isinstance(one, torch.Tensor) and one.requires_grad else -1 for one in values]


def require_apart(values: Sequence[Any], before: Sequence[int]) -> None:
    """Raise InputError if a loss has written into one of these outputs of earlier stages, and another one is on the same memory:
    autograd does not know of it, since each stage differentiates to its own leaves.
    """
    if len(values) < 2 or versions(values) == before:
        return
    keys = [_memory_of(one) for one, version in zip(values, before, strict=True) if version >= 0]
    if len(set(keys)) < len(keys):
        raise InputError(
            "the loss writes in place into an output of the model that shares memory with another one",
            why="they come from different stages, where autograd does not see that both change",
            hint="write into a copy: output.clone(); or keep_together= the modules that make both",
        )


def _memory_of(value: Any) -> int | None:
    """Return a key of the memory of a strided tensor, None for anything else."""
    return storage_key(value) if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def unwritten(copies: Mapping[int, Any], values: Sequence[Any], places: Collection[int]) -> list[int]:
    """Return the places of the arguments that the loss has not changed: they equal their copies from before.

    On accelerators a comparison would wait for the device, so no place is returned.
    """
    return [place for place in places if place in copies and _is_same(copies[place], values[place])]


def _is_same(before: Any, now: Any) -> bool:
    (leaves, structure), (others, present) = flatten_containers(before), flatten_containers(now)
    return structure == present and all(map(_is_equal, leaves, others))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or (one.device.type == other.device.type == "cpu" and torch.equal(one, other))
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and bool(one == other))
