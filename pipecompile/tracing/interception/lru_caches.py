"""Function caches (`functools.lru_cache`) of the user's while a model is recorded: bypassed, and purged at the end.

    @lru_cache
    def plan(shape): ...          plan((batch_size, 3, 8))   ──►   the function itself; the cache stores nothing

A cache hashes its arguments, which needs a concrete batch size: the recording would be right for that size alone. And a
stored fake tensor would be a wrong result of the next eager call. (einops keeps such caches.)
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import FakeTensor
from pipecompile.tracing.reachable_code import CachedFunction

__all__ = ["caches_bypassed", "caches_purged"]

_STAND_INS = (torch.SymInt, torch.SymFloat, torch.SymBool, FakeTensor)
"""Types that stand for numbers and tensors while a model is recorded."""

_PURGED_ELSEWHERE = ("torch.", "sympy.", "pipecompile.")
"""Modules whose caches are left alone: their own code makes fake tensors and symbols, and is prepared to cache them."""

_Cache: Any = type(functools.lru_cache(len))


@contextmanager
def caches_bypassed(caches: Iterable[CachedFunction]) -> Iterator[None]:
    """Call these functions past their caches inside the block, whenever an argument is symbolic or fake."""
    swapped = [cached for cached in caches if _replace(cached, _bypass(cached.function))]
    try:
        yield
    finally:
        for cached in swapped:
            _replace(cached, cached.function)


def _bypass(cached: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (cached.__wrapped__ if _has_stand_in((args, kwargs)) else cached)(*args, **kwargs)

    functools.update_wrapper(call, cached)
    vars(call).update(cache_info=cached.cache_info, cache_clear=cached.cache_clear)
    return call


def _replace(cached: CachedFunction, function: Any) -> bool:
    """Put `function` where the cached function is found. Return False if its class does not allow this."""
    if isinstance(cached.holder, dict):
        cached.holder[cached.name] = function
        return True
    try:
        setattr(cached.holder, cached.name, function)
    except (AttributeError, TypeError):  # a class of C, or one with a __setattr__ of its own
        return False
    return True


@contextmanager
def caches_purged() -> Iterator[None]:
    """Empty, when the block ends, every function cache that stores fake tensors or symbols.

    This finds the caches that `caches_bypassed` does not reach, by one look at all live objects. A cache with the counters that
    it had before the block has stored nothing in the block, so its entries are not inspected.
    """
    counters = {cached: cached.cache_info() for cached in _KNOWN}
    try:
        yield
    finally:
        for cached in _all_caches():
            if _is_users(cached):
                _KNOWN.add(cached)
                if _may_store_stand_in(cached, counters.get(cached)) and _stores_stand_in(cached):
                    cached.cache_clear()


_KNOWN: WeakSet[Any] = WeakSet()
"""The caches that earlier recordings found, but for those that are left alone."""


def _is_users(cached: Any) -> bool:
    return not str(cached.__module__).startswith(_PURGED_ELSEWHERE)


def _may_store_stand_in(cached: Any, counters: Any) -> bool:
    now = cached.cache_info()
    return bool(now.currsize and now != counters)


def _all_caches() -> list[Any]:
    """Return all caches alive: an object refers to its type. This takes half the time of a look at the type of each object."""
    return [referrer for referrer in gc.get_referrers(_Cache) if type(referrer) is _Cache]


def _stores_stand_in(cached: Any) -> bool:
    """Return whether a key or a value of the cache is symbolic or fake.

    A cache refers to a dict of its keys and values, or to a linked list of them if its size is limited.
    """
    referents = gc.get_referents(cached)
    tables = [referent for referent in referents if type(referent) is dict]
    entries = [entry for table in tables for pair in table.items() for entry in pair]
    linked = [item for link in entries if type(link).__name__ == "_lru_list_elem" for item in gc.get_referents(link)]
    return _has_stand_in([*referents, *entries, *linked])


def _has_stand_in(structure: Any) -> bool:
    return any(isinstance(leaf, _STAND_INS) for leaf in pytree.tree_leaves(structure))
