"""Tensors of a model whose values on one rank are old: parameters that another rank trains, buffers that a stage of another rank
writes, and what a state that was loaded left out. The loss, or a hook, that reads one of them, or writes a tensor of another rank,
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from pipecompile.errors import InputError
from pipecompile.torch_private.hidden_values import hidden
from pipecompile.torch_private.storages import memory_state

__all__ = ["StaleValues"]

Named = Mapping[torch.Tensor, str]
"""Tensors and their names in the model."""


class StaleValues:
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

    @contextmanager
    def hidden(self, tensors: Named) -> Iterator[None]:
        """Raise InputError when an old one of these tensors is read in this context, and at its end if another one was written."""
        changed, old, versions = (
            self._written | self._left_out,
            list[torch.Tensor](),
            list[tuple[torch.Tensor, tuple[int, int]]](),
        )
        for tensor in tensors:
            if tensor.requires_grad or id(tensor) in changed:
                old.append(tensor)
            elif not tensor.is_inference():
                versions.append((tensor, memory_state(tensor)))
        with hidden(old, partial(self._refusal, names=tensors)):
            yield
        for tensor, version in versions:
            if memory_state(tensor) != version:
                raise _written_here(tensors[tensor])

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


def _written_here(name: str) -> InputError:
    return InputError(
        f"{name}, which lives on another rank, is written on this one",
        why="the loss, or a hook, writes it, and the stages that use it run on its own rank",
        hint="this write in the model's forward, or after the step on every rank",
    )
