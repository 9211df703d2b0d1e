"""Leave a model, and the state of the thread that runs it, exactly as they were found, whatever happens in between.

`untouched` covers everything but the contents of tensors: attributes of modules (training flags, hooks, caches, the
parameter and buffer tables), `.grad`, RNG states, grad mode, autocast. `preserved` covers the contents of tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.torch_private.modes import FakeTensor
from pipecompile.torch_private.storages import version_of
from pipecompile.tracing.state.leftover_state import muted
from pipecompile.tracing.state.snapshot import kept_content, places_of

__all__ = ["preserved", "state_tensors", "untouched"]

Undo = Callable[[], None]

AUTOCAST_TYPES = ("cpu", "cuda")


def state_tensors(model: nn.Module) -> tuple[Tensor, ...]:
    """Every parameter, buffer and plain tensor attribute of the model, once."""
    found = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        found.update((id(value), value) for value in vars(module).values() if isinstance(value, Tensor))
    return tuple(found.values())


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put back the model's structure, `.grad`, RNG states, grad mode and autocast on the way out, error or not.

    Inside, inference mode is off, because it makes tensors that autograd refuses; grad mode is the caller's.
    """
    with muted(), kept_content(places_of(model)), _attributes_untouched(model):
        yield


@contextmanager
def _attributes_untouched(model: nn.Module) -> Iterator[None]:
    tensors = state_tensors(model)
    undos = [_attributes(module) for module in model.modules()]
    undos += [_flags(tensor) for tensor in tensors]
    undos += [_autocast(), partial(random.setstate, random.getstate())]
    cards = sorted({t.get_device() for t in tensors if t.is_cuda})
    grad = torch.is_grad_enabled()  # to be asked first: leaving inference mode turns it on
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(grad),
        torch.random.fork_rng(devices=cards, device_type="cuda"),
    ):
        try:
            yield
        finally:
            for undo in undos:
                undo()


@contextmanager
def preserved(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Put back, bit for bit, the contents of those tensors that were written to meanwhile, and list them on the way out.
    Costs a copy of them all.

    The version alone does not tell: the kernel of batch norm updates its running statistics without a new version.
    Fake tensors have no contents.
    """
    with torch.no_grad():
        kept = [(t, t.detach().clone(), version_of(t)) for t in tensors if not isinstance(t, FakeTensor)]
    written: list[Tensor] = []
    try:
        yield written
    finally:
        for tensor, copy, version in kept:
            if version_of(tensor) != version or not torch.equal(tensor, copy):
                tensor.data.copy_(copy)  # through `data`, so that restoring is no new version either
                written.append(tensor)


def _attributes(module: nn.Module) -> Undo:
    """What restores the attributes of one module, and the contents of the dicts, lists and sets among them."""
    attributes = vars(module)
    undos = [_contents(value) for value in attributes.values() if isinstance(value, dict | list | set)]
    undos.append(_contents(attributes))

    def undo() -> None:
        for put_back in undos:
            put_back()

    return undo


def _contents(container: dict[Any, Any] | list[Any] | set[Any]) -> Undo:
    """What restores the contents of one container, keeping the container itself."""
    if isinstance(container, list):
        return partial(container.__setitem__, slice(None), list(container))
    kept = container.copy()

    def undo() -> None:
        container.clear()
        container.update(kept)

    return undo


def _flags(tensor: Tensor) -> Undo:
    """What restores `requires_grad` and `.grad` of a leaf; other tensors cannot have either changed."""
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
    """What leaves every autocast region that was entered since, and restores its settings."""
    depth = _autocast_depth()
    settings = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST_TYPES]
    cached = torch.is_autocast_cache_enabled()

    def undo() -> None:
        while _autocast_depth() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        for kind, enabled, dtype in settings:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cached)

    return undo


def _autocast_depth() -> int:
    """How many autocast regions are open. There is no getter, but stepping in and out again tells."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
