"""One sharded parameter: the rows that this rank keeps, and the whole values while they are gathered.

gathered    whole.data ──► memory ──► storage        views that a forward saves share the storage
freed       whole.data ──► NaN                        between steps
freed for   whole.data ──► NaN      memory ──► empty storage      within a step: the next gather fills it again, and with
a while                                                           it the views that a backward reads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from pipecompile.torch_private.dtensors import like, local
from pipecompile.torch_private.hidden_values import show
from pipecompile.torch_private.storages import version_of

__all__ = ["ShardedParameter", "padded", "rows_of"]


@dataclass(slots=True)
class ShardedParameter:
    """`whole` is the model's own parameter, `shard` the DTensor that this rank keeps of it between steps.

    `stride` is the stride of the whole parameter. `width` is the number of elements of a shard in a message, padding
    included. `version` is the version counter of `whole` after it was gathered. `memory` has the values of `whole`, or had them and
    has an empty storage; None between steps. `is_trained` says whether both required gradients when they were last compared.
    """

    whole: nn.Parameter
    shard: nn.Parameter
    stride: tuple[int, ...]
    width: int
    version: int = 0
    is_whole: bool = True
    memory: torch.Tensor | None = None
    is_trained: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_trained = self.whole.requires_grad

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

    def allocated(self) -> torch.Tensor:
        """Return the memory of the whole parameter, of which the values are any."""
        shape, own = self.whole.shape, self.local
        if self.memory is None:
            self.memory = torch.empty_strided(shape, self.stride, dtype=own.dtype, device=own.device)
        elif not (storage := self.memory.untyped_storage()).nbytes():
            storage.resize_(_extent(shape, self.stride) * self.memory.element_size())
        return self.memory

    def gather(self, rows: torch.Tensor) -> None:
        """Make the parameter whole, from its gathered elements `(ranks, width)`, padded at the end."""
        memory = self.allocated()
        if memory.is_contiguous():
            flat = memory.view(-1)
            for index, row in enumerate(rows):
                part = flat[index * self.width : (index + 1) * self.width]
                part.copy_(row[: len(part)])
        else:
            memory.copy_(rows.reshape(-1)[: self.whole.numel()].view(self.whole.shape))
        self.take()

    def take(self) -> None:
        """Make the parameter whole, whose memory has the values of all ranks."""
        assert self.memory is not None
        show(self.whole)
        self.whole.data, self.is_whole = self.memory, True
        self.align()
        self.version = version_of(self.whole)

    def free(self, index: int, size: int, *, is_kept: bool = False) -> None:
        """Free the whole parameter, which is NaN until the next gather. Rows that a forward wrote are copied to the shard.

        With `is_kept`, what shares its storage sees the values of the next gather; else it keeps those of now.
        """
        if self.is_whole:
            if version_of(self.whole) != self.version:
                self.local.copy_(rows_of(self.whole.data, index, size))
            self.whole.data = self.whole.new_full((), torch.nan).expand(self.whole.shape)
            self.is_whole = False
        if self.memory is not None and is_kept:
            self.memory.untyped_storage().resize_(0)
        elif not is_kept:
            show(self.whole)
            self.memory = None

    def is_even(self, size: int) -> bool:
        """Return whether the shards of so many ranks, one behind the other, are the whole parameter."""
        is_dense = self.stride == torch.empty(self.whole.shape, device="meta").stride()
        return self.whole.dim() > 0 and is_dense and self.width * size == self.whole.numel()

    def gradient_rows(self, size: int) -> torch.Tensor:
        """Return the gradient of the whole parameter as `(size, width)`: row `i` is the part of rank `i`."""
        gradient, shape = self.whole.grad, (size, self.width)
        if gradient is None:
            return self.local.new_zeros(shape)
        if not gradient.dim():
            return gradient.expand(shape)
        return padded(gradient, size * self.width).view(shape)

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Add a padded gradient `(width,)` to that of the shard."""
        own = like(self.shard, gradient[: self.local.numel()].clone())
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
