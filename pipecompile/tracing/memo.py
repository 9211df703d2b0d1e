"""Function caches (`functools.lru_cache`) that learnt fake tensors during a recording must forget them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

__all__ = ["forgetful"]

_Cache: Any = type(functools.lru_cache(len))


@contextmanager
def forgetful() -> Iterator[None]:
    """Empty every function cache that holds a fake tensor when the block ends. Looks at all live objects once."""
    try:
        yield
    finally:
        for cached in [found for found in gc.get_objects() if type(found) is _Cache]:
            if cached.cache_info().currsize and _holds_fakes(cached):
                cached.cache_clear()


def _holds_fakes(cached: Any) -> bool:
    """With room for any number the results are in a dict, else in that dict's values, which are links of a list."""
    for held in gc.get_referents(cached):
        if type(held) is dict:
            links = [value for value in held.values() if type(value).__name__ == "_lru_list_elem"]
            results = [*held.values(), *(item for link in links for item in gc.get_referents(link))]
            if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(results)):
                return True
    return False
