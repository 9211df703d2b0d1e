"""Gradients retained by a forward (`h.retain_grad()`) under recomputation: the user's tensor gets the gradient of its recomputed twin.

F   h.retain_grad(); self.h = h     the user holds this tensor, whose graph is dropped
R   h'.retain_grad()                the backward goes through this one: what reaches h' is added to h.grad
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pipecompile.torch_private.modules import forwards_of
from pipecompile.tracing.loaded_names import names_in
from pipecompile.tracing.state.function_state import functions_near

__all__ = ["KeptTensor", "kept_gradients_noted", "names_retain_grad", "pass_on", "references", "show_gradient"]

KeptTensor = Callable[[], torch.Tensor | None]
"""A weak reference to a tensor whose gradient a forward has asked for."""


def names_retain_grad(holders: Iterable[Any]) -> bool:
    """Return whether the code of these modules and functions, or code near it, names `retain_grad`."""
    callables = (forwards_of(one) if isinstance(one, nn.Module) else [one] for one in holders)
    found = (function for own in callables for one in own for function in functions_near(one))
    return any("retain_grad" in names_in(function.__code__) for function in found)


def kept_gradients_noted(*, asks: bool) -> AbstractContextManager[Sequence[torch.Tensor]]:
    """Return a context that yields the tensors whose gradients are asked for in it; none if the stage never `asks`."""
    return _notes() if asks else _NONE


@contextmanager
def _notes() -> Iterator[list[torch.Tensor]]:
    with _Notes() as notes:
        yield notes.tensors


def pass_on(kept: Sequence[KeptTensor], again: Sequence[torch.Tensor]) -> bool:
    """Let the tensors of a forward get the gradients of the same ones of its recomputation. Return whether there are any."""
    for reference, tensor in zip(kept, again, strict=False):
        if tensor.grad_fn is not None:  # after all that writes to it in place, so that nothing comes behind
            tensor.grad_fn.register_prehook(_adding(reference, tensor.output_nr))
    return bool(again)


def show_gradient(made: torch.Tensor, shown: torch.Tensor) -> None:
    """Let the tensor that replaces one with a retained gradient receive that gradient. `shown` keeps `made` alive."""
    shown.retain_grad()
    setattr(made, _SHOWN, ref(shown))
    pass_on([ref(made)], [made])


_SHOWN = "shown_instead"
"""The attribute that a tensor has if the user sees another one in its place: a weak reference to that one."""


def _adding(reference: KeptTensor, number: int) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """Return a hook that adds the gradient of one output of its node to that of a tensor, as autograd does for retained ones."""

    def add(gradients: Sequence[torch.Tensor | None]) -> None:
        kept, gradient = reference(), gradients[number]
        kept = getattr(kept, _SHOWN, reference)()
        if kept is not None and gradient is not None:
            kept.grad = gradient.detach().clone() if kept.grad is None else kept.grad + gradient.detach()

    return add


class _Notes(TorchFunctionMode):
    """The tensors whose gradients are asked for while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call, and note its tensor."""
        if func is torch.Tensor.retain_grad:
            self.tensors.append(args[0])
        return func(*args, **(kwargs or {}))


_NONE = nullcontext[Sequence[torch.Tensor]](())
"""The context of a stage that asks for no gradients."""


def references(tensors: Iterable[torch.Tensor]) -> list[KeptTensor]:
    """Return weak references to tensors."""
    return [ref(one) for one in tensors]
