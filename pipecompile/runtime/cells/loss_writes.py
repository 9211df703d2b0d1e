"""Tensors that a loss function writes. The function is not recorded, so no graph shows them.

    F0  loss writes w, and saves it     F1  loss writes w again     B0  reads the copy that F0 took at its end

The first call of a loss notes those of the tensors near it that it writes. Each forward saves copies of these. If the code of the loss
names something that writes tensors (`mul_`, `data`), a later call may write those that it names: each forward saves copies of them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipecompile.runtime.cells.forward_backward import Function
from pipecompile.runtime.cells.saved_state import state_copied
from pipecompile.runtime.registers import Frame, Run
from pipecompile.torch_private.hidden_values import is_hidden
from pipecompile.torch_private.storages import storage_key
from pipecompile.tracing.reachable_code import reachable
from pipecompile.tracing.state.function_state import functions_near, roots_near, tensors_held
from pipecompile.tracing.state.tensor_contents import CopyBeforeWrite, is_same_memory
from pipecompile.tracing.state.writing_code import writable_tensors

__all__ = ["LossWrites", "copying_forward"]


class LossWrites:
    """The tensors of a loss function that its first call has `written`, or that a later one may write; None before that call."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self._loss_fn = loss_fn
        self.written: Sequence[torch.Tensor] | None = None

    def near(self) -> list[torch.Tensor]:
        """Return the tensors that a call may write: not those whose values are elsewhere, as weights of other ranks."""
        held = tensors_held(self._loss_fn, roots_near(self._loss_fn))
        here = [one for one in held if not is_hidden(one)]
        return [one for one in here if one.layout is torch.strided and not one.is_inference()]

    def watched(self, losses: Function) -> Function:
        """Return the function that computes losses, with its first call watched."""

        def function(*arguments: Any) -> Any:
            return losses(*arguments) if self.written is not None else self._watched_call(losses, arguments)

        return function

    def _watched_call(self, losses: Function, arguments: tuple[Any, ...]) -> Any:
        aliases = [(one, one.detach()) for one in self.near()]
        guard = CopyBeforeWrite([one for one, _ in aliases])
        with guard:
            result = losses(*arguments)
        moved = {id(one) for one, alias in aliases if not is_same_memory(one, alias)}
        moved |= {id(one) for one in _written_later(self._loss_fn, [one for one, _ in aliases])}
        written = guard.copies.keys()
        self.written = [one for one, alias in aliases if id(one) in moved or storage_key(alias) in written]
        return result


def _written_later(loss_fn: Callable[..., Any], near: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of the tensors near a loss that its code, or code near it, may write in a later call."""
    functions = reachable(loss_fn).functions if isinstance(loss_fn, nn.Module) else functions_near(loss_fn)
    modules = [one for one in (loss_fn, *roots_near(loss_fn)) if isinstance(one, nn.Module)]
    named = (pair for one in modules for pair in (*one.named_parameters(), *one.named_buffers()))
    names = {id(tensor): name for name, tensor in named}
    called = (function for function in functions if function.__name__ != "__init__")
    return writable_tensors(called, [(names.get(id(one), ""), one) for one in near])


def copying_forward(run: Run, state: Sequence[torch.Tensor], writes: LossWrites | None) -> Run:
    """Return an F whose graph saves copies of `state`, and of what the loss behind it writes."""

    def forward(frame: Frame) -> None:
        ours = () if writes is None else writes.near() if writes.written is None else writes.written
        if not (state or ours):
            run(frame)
            return
        with state_copied((*state, *ours)) as copied:
            run(frame)
            if writes is not None and writes.written is not ours:
                kept = {id(one) for one in (*state, *(writes.written or ()))}
                copied[:] = [one for one in copied if id(one) in kept]

    return forward
