"""The changes that a call of a pipeline makes on its rank, to be undone: gradients, buffers, attributes, random states, recordings.

    before    references to gradients, copies of buffers, random states
    fails     all are put back
    counts    the sums of gradients go into the memory of the earlier ones

Parameters that are trained are not copied. A forward that writes one of them cannot be undone, which their versions show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from pipecompile.batching.containers import flatten_containers
from pipecompile.driver.compile_cache import CompileCache
from pipecompile.errors import RunError
from pipecompile.torch_private.storages import version_of
from pipecompile.tracing.state.preserved_run import attributes_undo, state_tensors
from pipecompile.tracing.state.random_states import RandomStates, generators_among, random_sources

__all__ = ["CallUndo"]

Undo = Callable[[], object]


class CallUndo:
    """The state of the modules of a rank before a call. `own` are the tensors that live on the rank, `inputs` the arguments of the call."""

    def __init__(
        self, modules: Iterable[nn.Module], own: Callable[[torch.Tensor], bool], cache: CompileCache, inputs: Any
    ) -> None:
        modules = [*modules]
        tensors = {id(tensor): tensor for module in modules for tensor in state_tensors(module) if own(tensor)}
        self._gradients = {
            tensor: tensor.grad for tensor in tensors.values() if tensor.is_leaf and tensor.requires_grad
        }
        self._versions = {tensor: version_of(tensor) for tensor in self._gradients}
        self._undos = [_contents(tensor) for tensor in tensors.values() if tensor not in self._gradients]
        self._undos += [_gradient(leaf) for leaf in flatten_containers(inputs)[0] if isinstance(leaf, torch.Tensor)]
        every = [*chain.from_iterable(module.modules() for module in modules)]
        self._undos += [attributes_undo(module) for module in every if not _is_of_torch(module)]
        generators = generators_among(value for module in every for value in vars(module).values())
        devices = {tensor.device for tensor in tensors.values()}
        self._undos += [RandomStates(random_sources(generators, devices)).restore, _recordings(cache)]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the call. Raises RunError if it has written a parameter that is trained."""
        for tensor, gradient in self._gradients.items():
            tensor.grad = gradient
        for undo in self._undos:
            undo()
        if any(version_of(tensor) != version for tensor, version in self._versions.items()):
            raise RunError(
                "the call that failed cannot be undone",
                stage=None,
                microbatch=0,
                why="the forward writes a parameter that is trained",
                hint="a buffer in its place; or the ranks started again, from the last checkpoint",
            )

    @torch.no_grad()
    def settle(self) -> None:
        """Put the sums of gradients into the memory of the earlier gradients, which other code may hold."""
        for tensor, gradient in self._gradients.items():
            if gradient is not None and tensor.grad is not None and tensor.grad is not gradient:
                gradient.copy_(tensor.grad)
                tensor.grad = gradient


def _is_of_torch(module: nn.Module) -> bool:
    """Return whether a module is a layer of torch, whose forward changes no attribute."""
    return type(module).__module__.startswith("torch.nn.")


def _contents(tensor: torch.Tensor) -> Undo:
    """Return a function that restores the contents of a tensor, through `data`, so that its version stays."""
    return partial(tensor.data.copy_, tensor.detach().clone())


def _gradient(leaf: torch.Tensor) -> Undo:
    """Return a function that restores the gradient of an input."""
    if not leaf.is_leaf or not leaf.requires_grad:
        return lambda: None
    gradient = leaf.grad
    copy = None if gradient is None else gradient.detach().clone()

    def undo() -> None:
        if gradient is not None and copy is not None:
            gradient.copy_(copy)
        leaf.grad = gradient

    return undo


def _recordings(cache: CompileCache) -> Undo:
    """Return a function that forgets the recordings made since: ranks count them alike."""
    entries, traces = [*cache.entries], cache.traces

    def undo() -> None:
        cache.entries, cache.traces = [*entries], traces
        cache.listed.clear()

    return undo
