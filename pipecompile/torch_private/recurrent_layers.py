"""Recurrent layers keep lists of their weights beside the attributes: `_flat_weights`, and weak references by which a call notices
new weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["WEIGHT_LISTS", "flatten_weights", "noted_weights"]

WEIGHT_LISTS = ("_flat_weights", "_flat_weight_refs")
"""Attributes of a recurrent layer that follow from its weights. A call with other weights writes them. 2.11."""


@contextmanager
def noted_weights(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Take the present weights of recurrent layers for those that they have noted, in this context. Other modules are left alone. 2.11.

    A call of a layer that sees other weights notes them, and on a GPU copies all of them into one piece of memory.
    """
    before = [(module, module._flat_weight_refs) for module in set(modules) if isinstance(module, nn.RNNBase)]
    for module, _ in before:
        module._flat_weight_refs = [None if one is None else weakref.ref(one) for one in module._flat_weights]
    try:
        yield
    finally:
        for module, references in before:
            module._flat_weight_refs = references


def flatten_weights(modules: Iterable[nn.Module]) -> None:
    """Copy the weights of each recurrent layer on a GPU into one piece of memory, as `Module.to` does. Others are left alone.

    Where each weight has memory of its own, every call copies them all, with a warning.
    """
    for module in dict.fromkeys(modules):
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
