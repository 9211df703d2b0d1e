"""Values of micro-batches merged into the value of the mini-batch, and the derivative of each merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

__all__ = ["MergeKind", "MergeRule", "gather", "ungather"]


class MergeKind(Enum):
    """The ways to merge the micro-batches' values of one tensor."""

    JOINED = "joined along a dimension"
    AVERAGED = "averaged by size"
    ADDED = "added up"
    MULTIPLIED = "multiplied"
    MAXIMUM = "the maximum"
    MINIMUM = "the minimum"
    LOGSUMEXP = "the logarithm of the sum of exponentials"
    SAME = "the same for all"
    FIRST = "that of the first micro-batch"
    LAST = "that of the last micro-batch"
    LISTED = "in a list with one entry per sample"
    COMPUTED = "computed on the whole mini-batch"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class MergeRule:
    """The rule for one output. `dim` is the dimension of concatenation (JOINED), `reason` the reason for REFUSED."""

    kind: MergeKind
    dim: int | None = None
    reason: str = ""


def gather(parts: Sequence[torch.Tensor], rule: MergeRule, sizes: Sequence[int]) -> Any:
    """Return one value, merged from its micro-batches of these sizes (samples) by a rule. A LISTED value becomes a list."""
    if rule.kind is MergeKind.LISTED:
        return list(parts)
    if len(parts) == 1 or rule.kind in (MergeKind.SAME, MergeKind.LAST):
        return parts[-1]
    if rule.kind is MergeKind.FIRST:
        return parts[0]
    if rule.dim is not None:
        return torch.cat(tuple(parts), rule.dim)
    if rule.kind is MergeKind.AVERAGED:
        return torch.stack([part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)]).sum(0)
    return _reduced(torch.stack(tuple(parts)), rule.kind)


def _reduced(stacked: torch.Tensor, kind: MergeKind) -> torch.Tensor:
    is_bool = stacked.dtype is torch.bool
    match kind:
        case MergeKind.MAXIMUM:
            return stacked.any(0) if is_bool else stacked.amax(0)
        case MergeKind.MINIMUM:
            return stacked.all(0) if is_bool else stacked.amin(0)
        case MergeKind.MULTIPLIED:
            return stacked.prod(0, dtype=stacked.dtype)
        case MergeKind.LOGSUMEXP:
            return stacked.logsumexp(0)
        case _:
            return stacked.sum(0, dtype=stacked.dtype)


_SHARES = (MergeKind.MULTIPLIED, MergeKind.MAXIMUM, MergeKind.MINIMUM, MergeKind.LOGSUMEXP)
"""Merges whose gradient depends on the values."""


def ungather(gradient: Any, parts: Sequence[torch.Tensor], rule: MergeRule, sizes: Sequence[int]) -> Sequence[Any]:
    """Return the gradients of the micro-batches' values: the derivative of `gather`."""
    if rule.kind is MergeKind.LISTED:
        return list(gradient)
    if gradient is None:
        return [None] * len(parts)
    if rule.dim is not None:
        return torch.split(gradient, [part.shape[rule.dim] for part in parts], rule.dim)
    if len(parts) == 1 or rule.kind in (MergeKind.SAME, MergeKind.LAST):
        return [*[None] * (len(parts) - 1), gradient]
    if rule.kind is MergeKind.FIRST:
        return [gradient, *[None] * (len(parts) - 1)]
    if rule.kind in _SHARES:
        with torch.enable_grad():
            leaves = [part.detach().requires_grad_() for part in parts]
            return torch.autograd.grad(gather(leaves, rule, sizes), leaves, gradient)
    return [gradient if rule.kind is MergeKind.ADDED else gradient * (size / sum(sizes)) for size in sizes]
