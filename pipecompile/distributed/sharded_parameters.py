"""Parameters that the replicas of a pipeline shard among themselves: whole for the length of a step, DTensors between steps.

    between steps    replica 0: weight[0:2]     replica 1: weight[2:4]    what optimizers and `state_dict` have
    a step begins    all-gather ──► weight[0:4] on both                   in the model's own modules, once
    a stage is over  its gradients ─► reduce-scatter ──► grad[0:2], on the other replica grad[2:4]
    a step ends      the whole parameter is freed

Parameters are cut as `fully_shard` cuts them, along their first dimension, so checkpoints of both load into both. (ZeRO stage 3
between steps: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.)
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
    """`whole` is the model's own parameter, `shard` the DTensor that this rank keeps of it between steps.

    `stride` is the stride of the whole parameter. `width` is the number of elements of a shard in a message, padding
    included. `version` is the version counter of `whole` after it was gathered.
    """

    whole: nn.Parameter
    shard: nn.Parameter
    stride: tuple[int, ...]
    width: int
    version: int = 0

    @property
    def local(self) -> torch.Tensor:
        """The rows in this rank's memory."""
        return local(self.shard.detach())

    def gather(self, elements: torch.Tensor) -> None:
        """Make the parameter whole, from its gathered elements, padded at the end."""
        data = elements[: self.whole.numel()].view(self.whole.shape)
        if data.stride() != self.stride:
            data = torch.empty_strided(data.shape, self.stride, dtype=data.dtype, device=data.device).copy_(data)
        self.whole.data = data
        self.whole.requires_grad_(self.shard.requires_grad)
        self.version = version_of(self.whole)

    def free(self, index: int, size: int) -> None:
        """Free the whole parameter, which is NaN until the next gather. Rows that a forward wrote are copied to the shard."""
        if version_of(self.whole) != self.version:
            self.local.copy_(_rows(self.whole.data, index, size))
        self.whole.data = self.whole.new_full((), torch.nan).expand(self.whole.shape)

    def gradient_rows(self, size: int) -> torch.Tensor:
        """Return the gradient of the whole parameter as `(size, width)`: row `i` is the part of rank `i`."""
        gradient, shape = self.whole.grad, (size, self.width)
        if gradient is None:
            return self.local.new_zeros(shape)
        if not gradient.dim():
            return gradient.expand(shape)
        return _padded(gradient, size * self.width).view(shape)

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Add a padded gradient `(width,)` to that of the shard."""
        own = like(self.shard, gradient[: self.local.numel()].clone())
        self.shard.grad = own if self.shard.grad is None else self.shard.grad.add_(own)


def _normal_tensors(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method that runs outside of inference mode, whose tensors could not become parameters, and without grad."""
    return torch.inference_mode(False)(torch.no_grad()(method))


class ShardedParameters:
    """The sharded parameters of a rank.

    `mesh` has the replicas. With two dimensions (HSDP), parameters are sharded along the second and replicated along the
    first; None shards nothing. `is_known` says whether `shard` has run, or has nothing to do.
    """

    def __init__(self, mesh: DeviceMesh | None, communicator: Communicator) -> None:
        self.communicator = communicator
        self.mesh, self.is_known = mesh, mesh is None
        groups = mesh.get_all_groups() if mesh is not None else ()
        self.groups = [CollectiveGroup(group, communicator) for group in groups]
        self._parameters: dict[int, ShardedParameter] = {}
        self._is_whole = False

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def shard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep only the rows of this rank from now on. Scalars are replicated; integer parameters stay as they are."""
        self.is_known = True
        if self.mesh is None:
            return
        for whole in parameters:
            if whole.is_floating_point() and id(whole) not in self._parameters:
                self._parameters[id(whole)] = self._shard(whole, self.mesh)

    def _shard(self, whole: nn.Parameter, mesh: DeviceMesh) -> ShardedParameter:
        group = self.groups[-1]
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0) if whole.dim() else Replicate()]
        stride = torch.empty(whole.shape, device="meta").stride()
        own = _rows(whole.data, group.index, group.size).contiguous().clone()
        shard = DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=stride)
        width = -(-len(whole) // group.size) * math.prod(whole.shape[1:]) if whole.dim() else 1
        parameter = ShardedParameter(
            whole, nn.Parameter(shard, whole.requires_grad), whole.stride(), width, version_of(whole)
        )
        parameter.free(group.index, group.size)
        return parameter

    def shard_of(self, tensor: T) -> T:
        """Return the shard of a sharded parameter, and any other tensor itself."""
        parameter = self._parameters.get(id(tensor))
        return tensor if parameter is None else parameter.shard  # type: ignore[return-value]

    def replace(self, state: Any, tensors: Mapping[str, Any]) -> Any:
        """Replace sharded parameters in a state dict by their shards; `tensors` has the model's own tensors by key."""
        for key in state:
            if (parameter := self._parameters.get(id(tensors[key]))) is not None:
                state[key] = parameter.shard if state[key].requires_grad else parameter.shard.detach()
        return state

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make all parameters whole in this context, with one all-gather per dtype. An inner context has no effect."""
        if self._is_whole or not self._parameters:
            yield
            return
        with self.communicator.starting():
            self._gather()
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            self._free()

    def reduced(self, is_due: Callable[[torch.Tensor], bool], share: float) -> list[GradientBucket]:
        """Start to reduce the gradients of the parameters that are due, weighted by `share`; return a bucket per dtype."""
        due = [p for p in self._parameters.values() if p.shard.requires_grad and is_due(p.whole)]
        return [self._bucket(parameters, share) for parameters in _by_dtype(due)]

    @_normal_tensors
    def _gather(self) -> None:
        for parameters in _by_dtype(self._parameters.values()):
            row = torch.cat([_padded(parameter.local, parameter.width) for parameter in parameters])
            columns = self.groups[-1].all_gather(row).split_with_sizes([p.width for p in parameters], 1)
            for parameter, column in zip(parameters, columns, strict=True):
                parameter.gather(column.reshape(-1))

    @_normal_tensors
    def _free(self) -> None:
        for parameter in self._parameters.values():
            parameter.free(self.groups[-1].index, self.groups[-1].size)

    def _bucket(self, parameters: Sequence[ShardedParameter], share: float) -> GradientBucket:
        """Start one bucket: per rank a row of padded gradients, and per parameter the number of ranks that have one for it."""
        *replicas, group = self.groups
        has_gradient = torch.tensor([float(parameter.whole.grad is not None) for parameter in parameters])
        columns = [parameter.gradient_rows(group.size) for parameter in parameters]
        rows = torch.cat([*columns, has_gradient.to(columns[0]).expand(group.size, -1)], 1)
        weigh_in_place(rows[:, : -len(parameters)], share)
        for parameter in parameters:
            parameter.whole.grad = None
        pending = group.start_reduce_scatter(rows)
        return GradientBucket([p.whole for p in parameters], pending, replicas, partial(_add_gradients, parameters))


def _add_gradients(parameters: Sequence[ShardedParameter], row: torch.Tensor) -> None:
    *gradients, counts = row.split_with_sizes([*(parameter.width for parameter in parameters), len(parameters)])
    for parameter, gradient, count in zip(parameters, gradients, counts.tolist(), strict=True):
        if count:
            parameter.add_gradient(gradient)


def _rows(whole: torch.Tensor, index: int, size: int) -> torch.Tensor:
    """Return the rows of rank `index`, as `torch.chunk` cuts them: the last ranks may have fewer or none. A scalar is whole."""
    if not whole.dim():
        return whole
    chunks = whole.chunk(size)
    return chunks[index] if index < len(chunks) else whole[:0]


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return the elements `(width,)`, zeros at the end."""
    return F.pad(tensor.reshape(-1), (0, width - tensor.numel()))


def weigh_in_place(gradients: torch.Tensor, share: float) -> None:
    """Multiply gradients by the share of a replica. Those of a loss that counts nothing are not numbers, and become 0."""
    gradients.mul_(share) if share else gradients.zero_()


def _by_dtype(parameters: Iterable[ShardedParameter]) -> list[list[ShardedParameter]]:
    groups: dict[torch.dtype, list[ShardedParameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.whole.dtype, []).append(parameter)
    return [*groups.values()]
