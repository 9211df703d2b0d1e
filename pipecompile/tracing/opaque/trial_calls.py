"""Notes on a call of a piece in a trial run: its result, reads, writes and costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private import pytree
from pipecompile.tracing.opaque.left_attributes import NOTHING_LEFT, LeftAttributes
from pipecompile.tracing.outlining.outlined_calls import BlockCall

__all__ = ["KernelWork", "TrialCall", "TrialTensor"]

KernelWork = tuple[float, float, torch.dtype]
"""One kernel: FLOPs, bytes moved, dtype."""


@dataclass(frozen=True, slots=True)
class TrialTensor:
    """A tensor that a call returned. `offset` counts elements.

    `source` is the tensor whose memory it shares: the position of an argument leaf, a tensor of the model, or None.
    `is_source`: it is this very tensor and no view.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    source: int | torch.Tensor | None = None
    is_source: bool = False


@dataclass(slots=True)
class TrialCall:
    """One call of a piece.

    structure, leaves       the result: TrialTensors and plain values
    written                 positions of the argument leaves that the call wrote in place
    used                    tensors of the model that the call read or may write, and that are not the piece's own; those of modules
                            that a block names
    trained                 parameters of the model that the call wrote in place
    buffers                 buffers of the model that the call wrote in place
    only_read               buffers among `used` that no code of the piece writes, as far as its source says, and no call wrote
    reads_foreign_tensors   it read tensors that an earlier call made and that are not among its arguments
    work, saved_bytes       its kernels, and the bytes that autograd saved for the backward, without the model's tensors
    draws_random            it drew random numbers
    changes_containers      it changed a list, a dict or an object among its arguments
    block                   the call of a block
    left                    attributes that the call leaves, which the result has too
    selects                 the values of the inputs decide how many elements one of its kernels selects
    """

    structure: pytree.TreeSpec
    leaves: list[Any]
    written: tuple[int, ...] = ()
    used: tuple[torch.Tensor, ...] = ()
    trained: tuple[torch.Tensor, ...] = ()
    reads_foreign_tensors: bool = False
    work: list[KernelWork] = field(default_factory=list)
    saved_bytes: int = 0
    draws_random: bool = False
    changes_containers: bool = False
    block: BlockCall | None = None
    left: LeftAttributes = NOTHING_LEFT
    selects: bool = False
    only_read: tuple[torch.Tensor, ...] = ()
    buffers: tuple[torch.Tensor, ...] = ()

    @property
    def returns_numbers(self) -> bool:
        """Whether a number is among the results, which may be another in the next call."""
        return any(type(leaf) in (int, float) for leaf in self.leaves)

    @property
    def n_parameters(self) -> int:
        """The elements of the parameters among `used`."""
        return sum(tensor.numel() for tensor in self.used if isinstance(tensor, nn.Parameter))

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the model that the call may write: of parameters, those that it wrote."""
        read = {id(tensor) for tensor in self.only_read}
        state = [tensor for tensor in self.used if not isinstance(tensor, nn.Parameter) and id(tensor) not in read]
        return (*state, *self.trained)
