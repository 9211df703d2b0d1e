"""Tables of `nn.Module`: its parameters, buffers, children and hooks, and the base classes of normalisation layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize as _parametrize

__all__ = [
    "BUFFER_TABLE",
    "BatchNorm",
    "CALL_MACHINERY",
    "EXTRA_STATE",
    "GLOBAL_BACKWARD_HOOKS",
    "GLOBAL_FORWARD_HOOKS",
    "HOOK_ATTRIBUTES",
    "HOOK_TABLES",
    "InstanceNorm",
    "NormBase",
    "STATE_TABLES",
    "apply_to_tensors",
    "backward_hooks_of",
    "backward_hooks_removed",
    "buffers_of",
    "children_of",
    "copy_metadata",
    "forward_hooks_of",
    "has_any_global_hook",
    "forwards_of",
    "hook_tables_of",
    "hooks_of_torch_removed",
    "is_compiled",
    "is_hooked",
    "modules_in",
    "non_persistent_of",
    "parameters_of",
    "parametrizations_uncached",
    "sync_check_input_dim",
    "users_hooks",
    "uses_batch_statistics",
]

BatchNorm = _BatchNorm
"""Base class of BatchNorm1d, 2d, 3d and SyncBatchNorm. 2.11."""

InstanceNorm = _InstanceNorm
"""Base class of InstanceNorm1d, 2d and 3d. 2.11."""

NormBase = _NormBase
"""Base class of BatchNorm and InstanceNorm layers. 2.11."""

STATE_TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that hold its parameters, buffers and children. 2.11."""

BUFFER_TABLE = "_buffers"
"""The attribute of a module that holds its buffers. 2.11."""

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes of a module that hold the hooks that its call runs. 2.11."""

HOOK_ATTRIBUTES = frozenset(
    {
        *HOOK_TABLES,
        "_backward_hooks",
        "_backward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
        "_is_full_backward_hook",
    }
)
"""Attributes of a module that decide which hooks its call and its backward run. 2.11."""

CALL_MACHINERY = ("__call__", "_call_impl", "_wrapped_call_impl")
"""Functions of `nn.Module` between a call and its forward. 2.11."""

GLOBAL_FORWARD_HOOKS: tuple[dict[int, Callable[..., Any]], ...] = (
    _module._global_forward_hooks,
    _module._global_forward_pre_hooks,
)
"""Hooks that every module runs. 2.11."""

GLOBAL_BACKWARD_HOOKS: tuple[dict[int, Callable[..., Any]], ...] = (
    _module._global_backward_hooks,
    _module._global_backward_pre_hooks,
)
"""Hooks that every module runs with its backward. 2.11."""


def users_hooks(table: Mapping[int, Any]) -> tuple[Any, ...]:
    """Return the hooks of a table that are not torch's own, such as those of `FlopCounterMode`, which look and change nothing. 2.11."""
    return tuple(hook for hook in table.values() if not _is_of_torch(hook)) if table else ()


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(hook, "__module__", None)).startswith("torch.")


@contextmanager
def hooks_of_torch_removed() -> Iterator[None]:
    """Take torch's own hooks off the tables of hooks of all modules until the block ends. 2.11."""
    before = [dict(table) for table in GLOBAL_FORWARD_HOOKS]
    for table in GLOBAL_FORWARD_HOOKS:
        for key in [key for key, hook in table.items() if _is_of_torch(hook)]:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(GLOBAL_FORWARD_HOOKS, before, strict=True):
            added = {key: hook for key, hook in table.items() if key not in hooks}
            table.clear()
            table.update(hooks | added)


has_any_global_hook: Callable[[], bool] = _module._has_any_global_hook
"""Return True if a hook is registered for all modules. 2.11; bound, because each step calls it."""

parameters_of: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_parameters")
"""Return the table of a module's own parameters. 2.11."""

buffers_of: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
"""Return the table of a module's own buffers. 2.11."""

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Return the table of a module's children. 2.11; bound, because each step reads the mode of all modules."""


def modules_in(module: nn.Module) -> list[nn.Module]:
    """Return a module and all modules in it, each once, breadth first. Every step calls this function: `module.modules()` takes two to
    three times as long.
    """
    found, known = [module], {id(module)}
    for parent in found:  # the loop body appends to the list
        for child in children_of(parent).values():
            if child is not None and id(child) not in known:
                known.add(id(child))
                found.append(child)
    return found


non_persistent_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""Return the names of a module's buffers that `state_dict` leaves out. 2.11."""

is_compiled: Callable[[nn.Module], Any] = attrgetter("_compiled_call_impl")
"""Return what `module.compile()` installed, or None. 2.11."""

sync_check_input_dim = nn.SyncBatchNorm._check_input_dim
"""Raise ValueError for an input that SyncBatchNorm refuses. 2.11."""

hook_tables_of: Callable[[nn.Module], tuple[dict[int, Any], ...]] = attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
"""Return the tables of a module's own hooks. 2.11; bound, because each step looks at each layer."""


forward_hooks_of: Callable[[nn.Module], tuple[dict[int, Any], ...]] = attrgetter("_forward_hooks", "_forward_pre_hooks")
"""Return the tables of a module's own hooks that run with its forward. 2.11."""

backward_hooks_of: Callable[[nn.Module], tuple[dict[int, Any], ...]] = attrgetter(
    "_backward_hooks", "_backward_pre_hooks"
)
"""Return the tables of a module's own hooks that run with its backward. 2.11."""


@contextmanager
def backward_hooks_removed(model: nn.Module) -> Iterator[None]:
    """Take the hooks that run with a backward off all modules until the block ends. 2.11."""
    tables = [table for module in model.modules() for table in backward_hooks_of(module) if table]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


def forwards_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return a module's forward as its class has it, and one that was assigned to the module. Modules of `torch.jit` have none in Python:
    their class raises AttributeError for `forward`. 2.11.
    """
    own, of_class = vars(module).get("forward"), inspect.getattr_static(type(module), "forward", None)
    of_class = getattr(of_class, "__func__", of_class)  # a static method or a class method
    return [one for one in (own, of_class) if callable(one)]


EXTRA_STATE: str = _module._EXTRA_STATE_KEY_SUFFIX
"""The last part of the key of a module's extra state in `state_dict`. 2.11."""


def is_hooked(module: nn.Module) -> bool:
    """Return True if a call of the module runs more than its forward. 2.11."""
    return any(hook_tables_of(module))


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> None:
    """Replace each parameter and buffer by the function's result, as `module.to` does. 2.11."""
    module._apply(function, recurse)  # type: ignore[no-untyped-call]


def copy_metadata(source: Any, target: Any) -> None:
    """Give the state dict `target` the versions of modules in `source`, which `load_state_dict` reads. 2.11."""
    target._metadata = getattr(source, "_metadata", None)


@contextmanager
def parametrizations_uncached() -> Iterator[None]:
    """Begin with an empty cache of `torch.nn.utils.parametrize.cached()`, and put the user's back when the block ends. 2.11."""
    cache, _parametrize._cache = _parametrize._cache, {}
    try:
        yield
    finally:
        _parametrize._cache = cache


def uses_batch_statistics(norm: BatchNorm) -> bool:
    """Return whether a BatchNorm normalises by the statistics of the batch, not by running ones."""
    return norm.training or norm.running_mean is None
