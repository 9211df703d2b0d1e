"""One sharded parameter: the rows that this rank keeps, and the whole values while they are gathered.

gathered    whole.data ──► memory ──► storage        views that a forward saves share the storage
freed       whole.data ──► NaN                        between steps
freed for   whole.data ──► NaN      memory ──► empty storage      within a step: the next gather fills it again, and with
a while                                                           it the views that a backward reads
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pipecompile.errors import InputError
from pipecompile.torch_private.dtensors import cut_further, gradient_of, like, local, part_of, set_part
from pipecompile.torch_private.hidden_values import show
from pipecompile.torch_private.storages import version_of

__all__ = ["ShardedParameter", "padded", "rows_of"]


@dataclass(slots=True)
class ShardedParameter:
    """`whole` is the model's own parameter, `shard` the DTensor that this rank keeps of it between steps.

    With `tp`, `whole` is a DTensor, and what is said of its values is of its part on this rank. `shape` and `stride` are those of the
    whole parameter on this rank. `width` is the number of elements of a shard in a message, padding
    included. `version` is the version counter of `whole` after it was gathered. `memory` has the values of `whole`, or had them and
    has an empty storage; None between steps. `is_trained` says whether both required gradients when they were last compared.
    """

    whole: nn.Parameter
    shard: nn.Parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    width: int
    version: int = 0
    is_whole: bool = True
    memory: torch.Tensor | None = None
    is_trained: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_trained = self.whole.requires_grad

    @classmethod
    def cut(cls, whole: nn.Parameter, layout: DeviceMesh, index: int, size: int) -> ShardedParameter:
        """Keep the rows of rank `index` of `size` ranks of a parameter, and free the rest. `layout` is the mesh of the shard."""
        _check_mesh(whole, layout)
        values = part_of(whole)
        shape, stride = tuple(values.shape), values.stride()
        own = rows_of(values, index, size).contiguous().clone()
        shard = nn.Parameter(cut_further(whole, own, layout), whole.requires_grad)
        width = -(-shape[0] // size) * math.prod(shape[1:]) if shape else 1
        parameter = cls(whole, shard, shape, stride, width, version_of(whole))
        parameter.free(index, size)
        return parameter

    def align(self) -> None:
        """Let `whole` and `shard` both require gradients, or neither, as a script has set the one of them that changed."""
        changed = self.whole if self.whole.requires_grad != self.is_trained else self.shard
        self.is_trained = changed.requires_grad
        self.whole.requires_grad_(self.is_trained)
        self.shard.requires_grad_(self.is_trained)

    @property
    def local(self) -> torch.Tensor:
        """The rows in this rank's memory."""
        return local(self.shard.detach())

    @property
    def nbytes(self) -> int:
        """Bytes of the elements of the whole parameter."""
        return math.prod(self.shape) * self.local.element_size()

    def allocated(self) -> torch.Tensor:
        """Return the memory of the whole parameter, of which the values are any."""
        if self.memory is None:
            self.memory = torch.empty_strided(self.shape, self.stride, dtype=self.local.dtype, device=self.local.device)
        elif not (storage := self.memory.untyped_storage()).nbytes():
            storage.resize_(_extent(self.shape, self.stride) * self.memory.element_size())
        return self.memory

    def copies(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parts of the memory of the whole parameter, each with its elements among the gathered ones `(ranks, width)`, padded
        at the end.
        """
        memory = self.allocated()
        if not memory.is_contiguous():
            return [(memory, rows.reshape(-1)[: memory.numel()].view(self.shape))]
        parts = torch.split(memory.view(-1), self.width) if self.width else ()
        return [(part, row[: len(part)]) for part, row in zip(parts, rows, strict=False)]

    def take(self) -> None:
        """Make the parameter whole, whose memory has the values of all ranks."""
        assert self.memory is not None
        show(self.whole)
        set_part(self.whole, self.memory)
        self.is_whole = True
        self.align()
        self.version = version_of(self.whole)

    def free(self, index: int, size: int, *, is_kept: bool = False) -> None:
        """Free the whole parameter, which is NaN until the next gather. Rows that a forward wrote are copied to the shard.

        With `is_kept`, what shares its storage sees the values of the next gather; else it keeps those of now.
        """
        if self.is_whole:
            if version_of(self.whole) != self.version:
                self.local.copy_(rows_of(part_of(self.whole), index, size))
            set_part(self.whole, self.local.new_full((), torch.nan).expand(self.shape))
            self.is_whole = False
        if self.memory is not None and is_kept:
            self.memory.untyped_storage().resize_(0)
        elif not is_kept:
            show(self.whole)
            self.memory = None

    def is_even(self, size: int) -> bool:
        """Return whether the shards of `size` ranks, one behind the other, are the whole parameter."""
        is_dense = self.stride == torch.empty(self.shape, device="meta").stride()
        return len(self.shape) > 0 and is_dense and self.width * size == math.prod(self.shape)

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient of the whole parameter on this rank. A collective call with `tp`."""
        return None if self.whole.grad is None else local(gradient_of(self.whole))

    def rows(self, gradient: torch.Tensor | None, size: int) -> torch.Tensor:
        """Return a gradient of the whole parameter, or zeros, as `(size, width)`: row `i` is the part of rank `i`."""
        shape = size, self.width
        if gradient is None:
            return self.local.new_zeros(shape)
        if not gradient.dim():
            return gradient.expand(shape)
        return padded(gradient, size * self.width).view(shape)

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Add a padded gradient `(width,)` to that of the shard, which may become a part of it."""
        own = like(self.shard, gradient[: self.local.numel()])
        self.shard.grad = own if self.shard.grad is None else self.shard.grad.add_(own)


def rows_of(whole: torch.Tensor, index: int, size: int) -> torch.Tensor:
    """Return the rows of rank `index`, as `torch.chunk` cuts them: the last ranks may have fewer or none. A scalar is whole."""
    if not whole.dim():
        return whole
    chunks = whole.chunk(size)
    return chunks[index] if index < len(chunks) else whole[:0]


def padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return the elements `(width,)`, zeros at the end."""
    flat = tensor.reshape(-1)
    return flat if len(flat) == width else F.pad(flat, (0, width - len(flat)))


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements of a storage with this shape and these strides."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if all(shape) else 0


def _check_mesh(whole: nn.Parameter, layout: DeviceMesh) -> None:
    """Raise InputError for a DTensor on another mesh than the dimension tp of the layout."""
    if not isinstance(whole, DTensor):
        return
    has_tensor_parallel = "tp" in (layout.mesh_dim_names or ())
    if not has_tensor_parallel or whole.device_mesh != layout["tp"]:
        raise InputError(
            f"a parameter {tuple(whole.shape)} is a DTensor on {whole.device_mesh}",
            why="the mesh of the pipeline shards parameters further (dp_shard), within its own dimension tp",
            hint='parallelize_module(model, mesh["tp"], plan), with the mesh that compile gets',
        )
