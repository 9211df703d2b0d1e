"""Tensors that a loss function writes. The function is not recorded, so no graph shows them.

    F0  loss writes w, and saves it     F1  loss writes w again     B0  reads the copy that F0 took at its end

The first call saves copies of all tensors near the loss, and notes those that it writes. Later calls save copies of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipecompile.runtime.cells.forward_backward import Function
from pipecompile.torch_private.storages import storage_key
from pipecompile.tracing.state.function_state import roots_near, tensors_held
from pipecompile.tracing.state.tensor_contents import CopyBeforeWrite, is_same_memory

__all__ = ["LossWrites"]


class LossWrites:
    """The tensors of a loss function that a later call of it may write: all of them before its first call, then those that it wrote."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self._loss_fn, self._is_known = loss_fn, False
        self._tensors: Sequence[torch.Tensor] | None = None

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        if self._tensors is None:
            held = tensors_held(self._loss_fn, roots_near(self._loss_fn))
            self._tensors = [one for one in held if one.layout is torch.strided and not one.is_inference()]
        return self._tensors

    def watched(self, losses: Function) -> Function:
        """Return the function that computes losses, with its first call watched."""

        def function(*arguments: Any) -> Any:
            return losses(*arguments) if self._is_known else self._watched_call(losses, arguments)

        return function

    def _watched_call(self, losses: Function, arguments: tuple[Any, ...]) -> Any:
        aliases = [(one, one.detach()) for one in self.tensors]
        guard = CopyBeforeWrite(self.tensors)
        with guard:
            result = losses(*arguments)
        moved = {id(one) for one, alias in aliases if not is_same_memory(one, alias)}
        written = guard.copies.keys()
        self._tensors = [one for one, alias in aliases if id(one) in moved or storage_key(alias) in written]
        self._is_known = True
        return result
