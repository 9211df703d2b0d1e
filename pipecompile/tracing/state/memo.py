"""Function caches (`functools.lru_cache`) that learnt fake tensors or symbolic sizes during a recording must forget them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress, repeat
from operator import is_
from typing import Any

from pipecompile.torch_private import pytree
from pipecompile.tracing.interception.lru_caches import STAND_INS

__all__ = ["forgetful"]

_OURS = ("torch.", "sympy.", "pipecompile.")
"""Who makes fake tensors knows what not to keep."""

_Cache: Any = type(functools.lru_cache(len))


@contextmanager
def forgetful() -> Iterator[None]:
    """Empty every function cache that holds what only stood in when the block ends. Looks at all live objects once."""
    try:
        yield
    finally:
        for cached in _caches():
            if cached.cache_info().currsize and not cached.__module__.startswith(_OURS) and _holds_fakes(cached):
                cached.cache_clear()


def _caches() -> list[Any]:
    """All there are. A million objects are looked at, so Python itself is kept out of the loop."""
    alive = gc.get_objects()
    return list(compress(alive, map(is_, map(type, alive), repeat(_Cache))))


def _holds_fakes(cached: Any) -> bool:
    """What a cache keeps, its keys too, is among the objects it refers to, or in a dict that is, or in a link of its list."""
    near = gc.get_referents(cached)
    tables = [found for found in near if type(found) is dict]
    held = [thing for table in tables for pair in table.items() for thing in pair]
    linked = [thing for link in held if type(link).__name__ == "_lru_list_elem" for thing in gc.get_referents(link)]
    return any(isinstance(leaf, STAND_INS) for leaf in pytree.tree_leaves([*near, *held, *linked]))
