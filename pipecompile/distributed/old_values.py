"""Tensors of a model whose values on one rank are old: parameters that another rank trains, buffers that a stage of another rank writes, and
what a state that was loaded left out. The loss, or a hook, that reads one of them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch

from pipecompile.errors import InputError
from pipecompile.torch_private.hidden_values import hidden

__all__ = ["OldValues"]

Named = Mapping[torch.Tensor, str]
"""Tensors and their names in the model."""


class OldValues:
    """The tensors that live on other ranks and may be old here. `elsewhere` returns all tensors that live on other ranks, by name."""

    def __init__(self, elsewhere: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._elsewhere = elsewhere
        self._written, self._left_out = set[int](), set[int]()

    def elsewhere(self, own: Collection[int] = ()) -> dict[torch.Tensor, str]:
        """Return the tensors that live on other ranks, with their names, but for those with an id in `own`."""
        return {tensor: name for name, tensor in self._elsewhere().items() if id(tensor) not in own}

    def note_written(self, buffers: Iterable[torch.Tensor]) -> None:
        """Note buffers that stages of other ranks write."""
        self._written.update(map(id, buffers))

    def note_loaded(self, names: Collection[str], every: Collection[str]) -> None:
        """Note the names of a state that was loaded, and `every` name that the whole state has. What lives on another rank, is not trained
        and was not loaded may be old.
        """
        for name, tensor in self._elsewhere().items():
            if name in names:
                self._left_out.discard(id(tensor))
            elif name in every and not tensor.requires_grad:
                self._left_out.add(id(tensor))

    def hidden(self, tensors: Named) -> AbstractContextManager[None]:
        """Return a context in which reading an old one of these tensors raises InputError."""
        changed = self._written | self._left_out
        old = [tensor for tensor in tensors if tensor.requires_grad or id(tensor) in changed]
        return hidden(old, partial(self._refusal, names=tensors))

    def _refusal(self, tensor: torch.Tensor, *, names: Named) -> InputError:
        name = names.get(tensor, f"a tensor {list(tensor.shape)}")
        hint = "this part of the loss computed in the model's forward, whose stages run where their tensors are"
        if id(tensor) in self._written:
            why = "a stage of another rank writes the buffer, so its values here are old; the loss, or a hook, reads it"
            return InputError(f"the values of {name} are read on a rank that does not update it", why=why, hint=hint)
        if id(tensor) in self._left_out:
            why = "the state that was loaded on this rank had no entry for it, and the loss, or a hook, reads it"
            hint = "pipe.load_state_dict of the whole state on every rank"
            return InputError(f"the values of {name} are read, which lives on another rank", why=why, hint=hint)
        why = "another rank has the parameter, so its values here are old and its gradient would be lost; the loss, or a hook, reads it"
        return InputError(f"the values of {name} are read on a rank that does not train it", why=why, hint=hint)
