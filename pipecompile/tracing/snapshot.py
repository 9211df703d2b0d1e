"""The model is left exactly as it was found: attributes, parameters, buffers, children, modes and random states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["untouched"]

_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore every module's `__dict__` and the random number generators when the block ends, however it ends.

    Tensors are restored by identity; their *values* are safe because the block computes on fake tensors only.
    """
    saved = [(module, _attributes(module)) for module in model.modules()]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        for module, (attributes, tables) in saved:
            _restore(module, attributes, tables)


def _attributes(module: nn.Module) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    return dict(module.__dict__), {table: dict(module.__dict__[table]) for table in _TABLES}


def _restore(module: nn.Module, attributes: dict[str, Any], tables: dict[str, dict[str, Any]]) -> None:
    module.__dict__.clear()
    module.__dict__.update(attributes)
    for table, content in tables.items():
        live = module.__dict__[table]
        if live.keys() != content.keys() or any(live[key] is not content[key] for key in content):
            live.clear()
            live.update(content)
