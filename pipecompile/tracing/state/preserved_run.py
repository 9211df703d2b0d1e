"""Runs of the real model that leave the model and the state of the thread unchanged, error or not.

`untouched` restores everything but the contents of tensors: attributes of modules (training flags, hooks, caches, the
parameter and buffer tables), `.grad`, RNG states, grad mode, autocast. `preserved` restores the contents of tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from pipecompile.torch_private.accelerators import forked_generators
from pipecompile.torch_private.modes import FakeTensor
from pipecompile.torch_private.storages import version_of
from pipecompile.tracing.ambient_modes import autocast_depth
from pipecompile.tracing.container_items import items_in, refill
from pipecompile.tracing.state.effect_nodes import effects_muted
from pipecompile.tracing.state.function_state import function_restored, globals_restored
from pipecompile.tracing.state.muted_output import output_muted
from pipecompile.tracing.state.snapshot import contents_restored, held_values, places_of

__all__ = ["attributes_undo", "functions_restored", "preserved", "state_tensors", "untouched"]

Undo = Callable[[], None]

AUTOCAST_TYPES = ("cpu", "cuda")


def state_tensors(model: nn.Module) -> tuple[Tensor, ...]:
    """Return every parameter, buffer and plain tensor attribute of the model, each once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        tensors.update((id(value), value) for value in vars(module).values() if isinstance(value, Tensor))
    return tuple(tensors.values())


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore the model's structure, what its code and that of modules which it holds apart changes outside of them, `.grad`, RNG states,
    grad mode and autocast when the block ends, error or not; what it prints is dropped.

    Inside the block, inference mode is off, because autograd refuses inference tensors; grad mode is the caller's.
    """
    places, inside = places_of(model, deep=True), {id(module) for module in model.modules()}
    apart = [one for one in held_values(places) if isinstance(one, nn.Module) and id(one) not in inside]
    with ExitStack() as stack:
        stack.enter_context(effects_muted())
        stack.enter_context(output_muted())
        for module in (model, *{id(one): one for one in apart}.values()):
            stack.enter_context(globals_restored(module, tensors=False))
        nodes = model.graph.nodes if isinstance(model, fx.GraphModule) else ()
        stack.enter_context(functions_restored(nodes, tensors=False))
        stack.enter_context(contents_restored(places))
        stack.enter_context(_attributes_untouched(model))
        yield


@contextmanager
def functions_restored(nodes: Iterable[fx.Node], *, tensors: bool) -> Iterator[None]:
    """Restore what the user's autograd functions among the nodes change outside of the model; contents of tensors if `tensors`."""
    called = {
        id(node.target.autograd_function): node.target for node in nodes if hasattr(node.target, "autograd_function")
    }
    with ExitStack() as stack:
        for function in called.values():
            stack.enter_context(function_restored(cast(Callable[..., Any], function), tensors=tensors))
        yield


@contextmanager
def _attributes_untouched(model: nn.Module) -> Iterator[None]:
    tensors = state_tensors(model)
    undos = [attributes_undo(module) for module in model.modules()]
    undos += [_flags(tensor) for tensor in tensors]
    undos += [_autocast(), partial(random.setstate, random.getstate())]
    cards = dict.fromkeys(tensor.device for tensor in tensors)
    grad = torch.is_grad_enabled()  # read before leaving inference mode, which turns it on
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(grad),
        forked_generators(cards),
    ):
        try:
            yield
        finally:
            for undo in undos:
                undo()


@contextmanager
def preserved(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Restore, bit for bit, the contents of the tensors that the block writes, and append these tensors to the list yielded.

    Costs a copy of all tensors. The version counter alone does not show every write: the kernel of batch norm updates its
    running statistics without a new version. Fake tensors have no contents and are left out.
    """
    with torch.no_grad():
        copies = [(t, t.detach().clone(), version_of(t)) for t in tensors if not isinstance(t, FakeTensor)]
    written: list[Tensor] = []
    try:
        yield written
    finally:
        for tensor, copy, version in copies:
            if version_of(tensor) != version or not torch.equal(tensor, copy):
                tensor.data.copy_(copy)  # through `data`, so that the version stays
                written.append(tensor)


def attributes_undo(module: nn.Module) -> Undo:
    """Return a function that restores the attributes of a module, and the contents of the dicts, lists and sets among them."""
    attributes = vars(module)
    undos = [_contents(value) for value in attributes.values() if isinstance(value, dict | list | set)]
    undos.append(_contents(attributes))

    def undo() -> None:
        for restore in undos:
            restore()

    return undo


def _contents(container: dict[Any, Any] | list[Any] | set[Any]) -> Undo:
    """Return a function that restores the contents of a container in place."""
    return partial(refill, container, items_in(container))


def _flags(tensor: Tensor) -> Undo:
    """Return a function that restores `requires_grad` and `.grad` of a leaf; of other tensors neither can change."""
    if not tensor.is_leaf:
        return lambda: None
    required, grad = tensor.requires_grad, tensor.grad

    def undo() -> None:
        if tensor.requires_grad != required:
            tensor.requires_grad_(required)
        if tensor.grad is not grad:
            tensor.grad = grad

    return undo


def _autocast() -> Undo:
    """Return a function that leaves every autocast region entered since, and restores the settings of autocast."""
    depth = autocast_depth()
    settings = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST_TYPES]
    cached = torch.is_autocast_cache_enabled()

    def undo() -> None:
        while autocast_depth() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        for kind, enabled, dtype in settings:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cached)

    return undo
