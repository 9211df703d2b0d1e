"""Parameters of which each copy of the pipeline keeps a part: whole for the length of a step, and DTensors between steps.

    between steps    copy 0: weight[0:2]        copy 1: weight[2:4]       what optimizers and `state_dict` know
    a step begins    all-gather ──► weight[0:4] on both                   in the model's own modules, once
    a stage is over  its gradients ─► reduce-scatter ──► grad[0:2], on the other grad[2:4]
    a step ends      the whole is let go

They are cut as `fully_shard` cuts them, along their first dimension: what is saved here, is loaded there. (ZeRO: Rajbhandari et
al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from pipecompile.distributed.collectives import CollectiveGroup, GradientBucket
from pipecompile.distributed.communicator import Communicator
from pipecompile.torch_private.dtensors import like, local
from pipecompile.torch_private.storages import version_of

__all__ = ["ShardedParameters"]

T = TypeVar("T", bound=torch.Tensor)


@dataclass(slots=True)
class ShardedParameter:
    """`whole` is the model's own parameter, `kept` what of it this rank keeps; `width` elements of it are sent, padding included."""

    whole: nn.Parameter
    kept: nn.Parameter
    stride: tuple[int, ...]
    width: int
    version: int = 0

    @property
    def local(self) -> torch.Tensor:
        """The rows in this rank's memory."""
        return local(self.kept.detach())

    def fill(self, elements: torch.Tensor) -> None:
        """Make it whole."""
        made = elements[: self.whole.numel()].view(self.whole.shape)
        if made.stride() != self.stride:
            made = torch.empty_strided(made.shape, self.stride, dtype=made.dtype, device=made.device).copy_(made)
        self.whole.data = made
        self.whole.requires_grad_(self.kept.requires_grad)
        self.version = version_of(self.whole)

    def empty(self, index: int, size: int) -> None:
        """Let go of the whole, which is not a number until it is whole again. What a forward wrote into it is kept."""
        if version_of(self.whole) != self.version:
            self.local.copy_(_rows(self.whole.data, index, size))
        self.whole.data = self.whole.new_full((), torch.nan).expand(self.whole.shape)

    def column(self, size: int) -> torch.Tensor:
        """The gradient of the whole: in each of `size` rows what one rank is to have of it."""
        gradient, shape = self.whole.grad, (size, self.width)
        if gradient is None:
            return self.local.new_zeros(shape)
        if not gradient.dim():
            return gradient.expand(shape)
        return _padded(gradient, size * self.width).view(shape)

    def receive(self, gradient: torch.Tensor) -> None:
        """Add the gradient of the own rows."""
        made = like(self.kept, gradient[: self.local.numel()].clone())
        self.kept.grad = made if self.kept.grad is None else self.kept.grad.add_(made)


class ShardedParameters:
    """`mesh` has the copies that share parameters; with two dimensions, the second: along the first the same part is kept by
    each. None: nothing is shared out. `is_known` says whether it was.
    """

    def __init__(self, mesh: DeviceMesh | None, communicator: Communicator) -> None:
        self.mesh, self.is_known = mesh, mesh is None
        self.groups = (
            [CollectiveGroup(mesh.get_group(dim), communicator) for dim in range(mesh.ndim)] if mesh is not None else []
        )
        self._parts: dict[int, ShardedParameter] = {}
        self._is_whole = False

    def __bool__(self) -> bool:
        return bool(self._parts)

    def shard(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on this rank keeps its part only: of a number alone, all of it. Integers stay as they are."""
        self.is_known = True
        if self.mesh is None:
            return
        for whole in parameters:
            if whole.is_floating_point() and id(whole) not in self._parts:
                self._parts[id(whole)] = self._part(whole, self.mesh)

    def _part(self, whole: nn.Parameter, mesh: DeviceMesh) -> ShardedParameter:
        group = self.groups[-1]
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0) if whole.dim() else Replicate()]
        stride = torch.empty(whole.shape, device="meta").stride()
        own = _rows(whole.data, group.index, group.size).contiguous().clone()
        kept = DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=stride)
        width = -(-len(whole) // group.size) * math.prod(whole.shape[1:]) if whole.dim() else 1
        part = ShardedParameter(
            whole, nn.Parameter(kept, whole.requires_grad), whole.stride(), width, version_of(whole)
        )
        part.empty(group.index, group.size)
        return part

    def kept(self, tensor: T) -> T:
        """What this rank keeps of a parameter, where it keeps a part; else the tensor itself."""
        part = self._parts.get(id(tensor))
        return tensor if part is None else part.kept  # type: ignore[return-value]

    def replace(self, state: Any, tensors: Mapping[str, Any]) -> Any:
        """In a state, which has these tensors, parts for what is kept in parts."""
        for key in state:
            if (part := self._parts.get(id(tensors[key]))) is not None:
                state[key] = part.kept if state[key].requires_grad else part.kept.detach()
        return state

    @contextmanager
    def whole(self) -> Iterator[None]:
        """In this context the model has its parameters whole; one message per dtype. It may be entered again inside."""
        if self._is_whole or not self._parts:
            yield
            return
        self._gather()
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            for part in self._parts.values():
                part.empty(self.groups[-1].index, self.groups[-1].size)

    def reduced(self, is_due: Callable[[torch.Tensor], bool], share: float) -> list[GradientBucket]:
        """Each rank is to get the gradient of its part, a sum over all copies, of which this one counts so much; one message per
        dtype of those that are due.
        """
        due = [part for part in self._parts.values() if part.kept.requires_grad and is_due(part.whole)]
        return [self._message(bucket, share) for bucket in _by_dtype(due)]

    def _gather(self) -> None:
        for bucket in _by_dtype(self._parts.values()):
            row = torch.cat([_padded(part.local, part.width) for part in bucket])
            columns = self.groups[-1].rows(row).split_with_sizes([part.width for part in bucket], 1)
            for part, column in zip(bucket, columns, strict=True):
                part.fill(column.reshape(-1))

    def _message(self, bucket: Sequence[ShardedParameter], share: float) -> GradientBucket:
        """Per part the gradient of the own rows, padded, and last on how many ranks each has a gradient at all."""
        *copies, group = self.groups
        has = torch.tensor([float(part.whole.grad is not None) for part in bucket])
        columns = [part.column(group.size) for part in bucket]
        rows = torch.cat([*columns, has.to(columns[0]).expand(group.size, -1)], 1)
        rows[:, : -len(bucket)].mul_(share)
        for part in bucket:
            part.whole.grad = None
        coming = group.begin_own_row(rows)
        return GradientBucket([part.whole for part in bucket], coming, copies, partial(_receive, bucket))


def _receive(bucket: Sequence[ShardedParameter], row: torch.Tensor) -> None:
    *own, counts = row.split_with_sizes([*(part.width for part in bucket), len(bucket)])
    for part, gradient, count in zip(bucket, own, counts.tolist(), strict=True):
        if count:
            part.receive(gradient)


def _rows(whole: torch.Tensor, index: int, size: int) -> torch.Tensor:
    """The rows of rank `index`: the last ranks may have fewer, or none. A number alone is the same on all."""
    if not whole.dim():
        return whole
    parts = whole.chunk(size)
    return parts[index] if index < len(parts) else whole[:0]


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(tensor.reshape(-1), (0, width - tensor.numel()))


def _by_dtype(parts: Iterable[ShardedParameter]) -> list[list[ShardedParameter]]:
    found: dict[torch.dtype, list[ShardedParameter]] = {}
    for part in parts:
        found.setdefault(part.whole.dtype, []).append(part)
    return [*found.values()]
