"""Hooks that layers and gradients have now. Hooks registered after the first step can rule out threads.

step 1 .. 3     no hooks: "auto" gives each device a thread
step 4          hooks of two layers share state, so the order of cells matters, and one thread runs all devices again
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from pipecompile.torch_private.autograd_engine import gradient_hook_tables, hooks_registered
from pipecompile.torch_private.modules import has_any_global_hook, hook_tables_of

__all__ = ["PresentHooks"]


class PresentHooks:
    """The hooks of these modules and parameters. `look` searches again only if a hook was registered anywhere since its last call."""

    def __init__(self, modules: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> None:
        self._modules = tuple(dict.fromkeys(layer for module in modules for layer in module.modules()))
        self._parameters = tuple(parameters)
        self._count, self._known, self._has_global = -1, frozenset[int](), False

    def __bool__(self) -> bool:
        """Return whether there was a hook at the last look."""
        return self._has_global or bool(self._known)

    def look(self) -> bool:
        """Look for hooks, and return whether there are new ones."""
        if hooks_registered() == self._count:
            return False
        self._count, self._has_global, before = hooks_registered(), bool(has_any_global_hook()), self._known
        tables = [table for layer in self._modules for table in hook_tables_of(layer)]
        tables += [table for parameter in self._parameters for table in gradient_hook_tables(parameter)]
        self._known = frozenset(
            key for table in tables for key in table
        )  # torch numbers the hooks of all tables together
        return not self._known <= before
