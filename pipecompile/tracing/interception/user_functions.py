"""The user's functions while a model is recorded: calls of `int`, `float` and `type` are redirected, and caches are bypassed.

    int(n // 2)                          needs a number, but a size that depends on the batch is a symbol
    type(x) is Tensor                    must see the class that x has in eager mode, not the class of its stand-in
    @lru_cache  def plan(shape): ...     plan((batch_size, 3, 8)) calls the function itself; the cache stores nothing

`int`, `float` and `type` are types, so they cannot be patched: `x is int` and `dtype=int` must keep their meaning. In the
bytecode, a global that is loaded in order to be called has a flag; only these loads are changed to load another name.

A cache hashes its arguments, which needs a concrete batch size: the recording would be right for that size alone. And a
stored fake tensor would be a wrong result of the next eager call, so caches are purged at the end. (einops keeps such caches.)
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import CellType, CodeType, FunctionType
from typing import Any
from weakref import WeakSet

import torch

from pipecompile.errors import RecordingWarning
from pipecompile.torch_private import pytree
from pipecompile.torch_private.modes import FakeTensor
from pipecompile.tracing.fakes.lifted_numbers import NotLiftedError, lifted_in
from pipecompile.tracing.loaded_names import names_in
from pipecompile.tracing.reachable_code import CachedFunction
from pipecompile.tracing.user_source import warn

__all__ = ["builtin_calls_redirected", "caches_bypassed", "caches_purged"]

_PREFIX = "_pipecompile_"
_LOAD, _EXTENDED = dis.opmap["LOAD_GLOBAL"], dis.opmap["EXTENDED_ARG"]

for _name in ("int", "float", "type"):  # now, so that no recording adds names to those of Python
    setattr(builtins, _PREFIX + _name, getattr(builtins, _name))

_CODES: dict[int, tuple[CodeType, CodeType]] = {}
"""Cache by id: the code object, which stays alive here, and its rewritten form."""

_STAND_INS = (torch.SymInt, torch.SymFloat, torch.SymBool, FakeTensor)
"""Types that stand for numbers and tensors while a model is recorded."""

_PURGED_ELSEWHERE = ("torch.", "sympy.", "pipecompile.")
"""Modules whose caches are left alone: their own code makes fake tensors and symbols, and is prepared to cache them."""

_Cache: Any = type(functools.lru_cache(len))

_FOUND_CACHES: WeakSet[Any] = WeakSet()
"""The caches that earlier recordings found, but for those that are left alone."""


@contextmanager
def builtin_calls_redirected(
    substitutes: Mapping[str, Callable[..., Any]], functions: Iterable[FunctionType]
) -> Iterator[None]:
    """Let calls of the builtins named in `substitutes`, made by these functions, call the substitutes inside the block.

    Functions that they make there outlive it, as a hook on a gradient does, and then call the builtins.
    """
    originals = [(f, f.__code__) for f in functions if not names_in(f.__code__).isdisjoint(substitutes)]
    for name, substitute in substitutes.items():
        setattr(builtins, _PREFIX + name, substitute)
    try:
        for function, code in originals:
            function.__code__ = _rewritten(code, tuple(substitutes))
        yield
    finally:
        for function, code in originals:
            function.__code__ = code
        for name in substitutes:
            setattr(builtins, _PREFIX + name, getattr(builtins, name))


def _rewritten(code: CodeType, names: tuple[str, ...]) -> CodeType:
    if id(code) not in _CODES:
        _CODES[id(code)] = code, _rewrite(code, names)
    return _CODES[id(code)][1]


def _rewrite(code: CodeType, names: tuple[str, ...]) -> CodeType:
    """Return the code, and the code of the functions inside it, with calls of `names` redirected."""
    inner = tuple(_rewrite(c, names) if isinstance(c, CodeType) else c for c in code.co_consts)
    indices = {index: name for index, name in enumerate(code.co_names) if name in names}
    calls = list(_calls(code.co_code, indices)) if indices else []
    if not calls and all(a is b for a, b in zip(inner, code.co_consts, strict=True)):
        return code
    table, body = list(code.co_names), bytearray(code.co_code)
    for position, name in calls:
        if _PREFIX + name not in table:
            table.append(_PREFIX + name)
        argument = table.index(_PREFIX + name) << 1 | 1
        if argument > 255:  # needs an EXTENDED_ARG: leave the function as it is
            return code
        body[position] = argument
    return code.replace(co_consts=inner, co_names=tuple(table), co_code=bytes(body))


def _calls(body: bytes, names: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """Yield (position, name) of the argument of each LOAD_GLOBAL that loads one of the names to call it.

    `names` are by their index in the code. In the argument, bit 0 is the flag of a call, the other bits are the index.
    """
    extended = 0
    for position in range(0, len(body), 2):
        operation, argument = body[position], body[position + 1] | extended
        extended = argument << 8 if operation == _EXTENDED else 0
        if operation == _LOAD and argument & 1 and argument >> 1 in names:
            yield position + 1, names[argument >> 1]


@contextmanager
def caches_bypassed(
    caches: Iterable[CachedFunction], paused: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Call these functions past their caches inside the block, whenever an argument is symbolic or fake.

    Where a cache has a result, the function runs too, `paused`: guards then see what it reads, which counts once the cache is cleared.
    """
    swapped = [cached for cached in caches if _replace(cached, _bypass(cached.function, paused))]
    try:
        yield
    finally:
        for cached in swapped:
            _replace(cached, cached.function)


def _bypass(cached: Any, paused: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    seen = set[Any]()

    def call(*args: Any, **kwargs: Any) -> Any:
        if _has_stand_in((args, kwargs)):
            return cached.__wrapped__(*args, **kwargs)
        hits = cached.cache_info().hits
        result = computed = cached(*args, **kwargs)
        if cached.cache_info().hits > hits and (key := (args, *sorted(kwargs.items()))) not in seen:
            seen.add(key)
            with paused(), suppress(Exception):
                computed = cached.__wrapped__(*args, **kwargs)
        for number in lifted_in(computed):
            raise NotLiftedError(number, f"{cached.__qualname__}, a function with a cache, returns it")
        _warn_if_stale(cached, result, computed)
        return result

    functools.update_wrapper(call, cached)
    vars(call).update(cache_info=cached.cache_info, cache_clear=cached.cache_clear)
    return call


def _warn_if_stale(cached: Any, result: Any, computed: Any) -> None:
    """Warn of a number in a cache that the function would not compute now."""
    if type(result) in (int, float) and type(computed) in (int, float) and result != computed:
        what = (
            f"{cached.__qualname__} returns another number from its cache than it would compute now: a recording has the number of the"
            " cache, and cache_clear() is not noticed. Try cache_clear() when what the function reads changes"
        )
        warn(what, RecordingWarning)


def _replace(cached: CachedFunction, function: Any) -> bool:
    """Put `function` where the cached function is found. Return False if its class does not allow this."""
    if isinstance(cached.holder, dict):
        cached.holder[cached.name] = function
        return True
    if isinstance(cached.holder, CellType):
        cached.holder.cell_contents = function
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
    counters = {cached: cached.cache_info() for cached in _FOUND_CACHES}
    try:
        yield
    finally:
        for cached in _CENSUS.alive():
            _FOUND_CACHES.add(cached)
            if _may_store_stand_in(cached, counters.get(cached)) and _stores_stand_in(cached):
                cached.cache_clear()


def _is_users(cached: Any) -> bool:
    return not str(cached.__module__).startswith(_PURGED_ELSEWHERE)


def _may_store_stand_in(cached: Any, counters: Any) -> bool:
    now = cached.cache_info()
    return bool(now.currsize and now != counters)


class _Census:
    """The caches alive, found by one look at all live objects, which takes longer than the recording of a small model.

    Each cache refers to its type. While the type has no more and no fewer references than the known caches and the `others` of the
    last look, there is no new cache.
    """

    def __init__(self) -> None:
        self.known: WeakSet[Any] = WeakSet()
        self.users: WeakSet[Any] = WeakSet()
        self.others = -1

    def alive(self) -> list[Any]:
        """Return the user's caches alive."""
        if sys.getrefcount(_Cache) - len(self.known) != self.others:
            self.known = WeakSet(one for one in gc.get_referrers(_Cache) if type(one) is _Cache)
            self.users = WeakSet(filter(_is_users, self.known))
            self.others = sys.getrefcount(_Cache) - len(self.known)
        return list(self.users)


_CENSUS = _Census()


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
