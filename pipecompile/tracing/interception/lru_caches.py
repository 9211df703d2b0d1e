"""Function caches, passed by while a model is recorded, for calls about sizes and tensors that only stand in.

    @lru_cache
    def plan(shape): ...          plan((batch_size, 3, 8))   ──►   the function itself, and the cache learns nothing

A cache must have the number itself to look it up, so the recording would be right for that batch size alone; and what it
learnt would be wrong for the next call. (einops keeps such caches.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch

from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import FakeTensor
from pipecompile.tracing.reachable_code import Cached

__all__ = ["STAND_INS", "passed_by"]

STAND_INS = (torch.SymInt, torch.SymFloat, torch.SymBool, FakeTensor)
"""What stands in for numbers and tensors."""


@contextmanager
def passed_by(caches: Iterable[Cached]) -> Iterator[None]:
    """While the block lasts, calls of these functions that are about stand-ins go past their caches."""
    swapped = [cached for cached in caches if _put(cached, _around(cached.function))]
    try:
        yield
    finally:
        for cached in swapped:
            _put(cached, cached.function)


def _around(cached: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        about = any(isinstance(leaf, STAND_INS) for leaf in pytree.tree_leaves((args, kwargs)))
        return (cached.__wrapped__ if about else cached)(*args, **kwargs)

    update_wrapper(call, cached)
    vars(call).update(cache_info=cached.cache_info, cache_clear=cached.cache_clear)
    return call


def _put(cached: Cached, function: Any) -> bool:
    if isinstance(cached.holder, dict):
        cached.holder[cached.name] = function
        return True
    try:
        setattr(cached.holder, cached.name, function)
    except (AttributeError, TypeError):  # a class of C, or one that does not let itself be changed
        return False
    return True
