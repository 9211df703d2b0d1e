"""Memory of receive buffers. The next copy writes a buffer after its last reader, so what outlives the reader gets memory of its own, or
its memory goes back to the compute stream.

    copy 0►1    v#0 ■──┐                          v#3 into the memory of v#0
    compute 1          └─► 1F0 ■ ── ... 1B0 ■──────┘        an output that is a view of v#0 is copied
                                    .grad is a part of v#0: its memory goes back in the order of compute
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipecompile.runtime.registers import Frame, Run
from pipecompile.torch_private.autograd_engine import other_users
from pipecompile.torch_private.pytree import tree_leaves
from pipecompile.torch_private.storages import strided_parts

__all__ = ["copying_views", "free_received"]


def free_received(register: int, release: Callable[[Any], None]) -> Run:
    """Return the function of the FREE of a value in a receive buffer, which keeps the tensor until the next copy into it.

    `release` gets a tensor whose memory something else still holds: a gradient that is a view of it, or what autograd saved. Who else
    has the tensors of a container, or the parts of a sparse tensor, is not known: `release` gets them all.
    """

    def run(frame: Frame) -> None:
        value, frame.registers[register] = frame.registers[register], None
        is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        for tensor in _strided(value):
            if not is_plain or other_users(tensor):
                release(tensor)

    return run


def copying_views(run: Run, received: Sequence[int], writes: Sequence[int]) -> Run:
    """Return a cell's function that copies outputs, in the registers `writes`, which are views of `received` inputs."""

    def run_and_copy(frame: Frame) -> None:
        memories = {_memory(one) for index in received for one in _strided(frame.registers[index])} - {None}
        run(frame)
        for index in writes:
            value = frame.registers[index]
            if isinstance(value, torch.Tensor) and any(_memory(one) in memories for one in strided_parts(value)):
                frame.registers[index] = value.detach().clone().requires_grad_(value.requires_grad)

    return run_and_copy


def _memory(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() or None


def _strided(value: Any) -> list[torch.Tensor]:
    """Return the strided tensors in a value: a tensor, the parts of a sparse tensor, or the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        return strided_parts(value)
    return [part for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) for part in strided_parts(leaf)]
