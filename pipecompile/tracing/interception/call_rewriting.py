"""Calls of `int`, `float` and `type` in the user's functions, redirected while a model is recorded.

    int(n // 2)            needs a number, but a size that depends on the batch is a symbol
    type(x) is Tensor      must see the class that x has in eager mode, not the class of its stand-in

These names are types, so they cannot be patched: `x is int` and `dtype=int` must keep their meaning. In the bytecode, a
global that is loaded in order to be called has a flag; only these loads are changed to load another name.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from pipecompile.tracing.reachable_code import names_in

__all__ = ["builtin_calls_redirected"]

_PREFIX = "_pipecompile_"
_LOAD, _EXTENDED = dis.opmap["LOAD_GLOBAL"], dis.opmap["EXTENDED_ARG"]

_known: dict[int, tuple[CodeType, CodeType]] = {}
"""Cache by id: the code object, which stays alive here, and its rewritten form."""


@contextmanager
def builtin_calls_redirected(
    substitutes: Mapping[str, Callable[..., Any]], functions: Iterable[FunctionType]
) -> Iterator[None]:
    """Let calls of the builtins named in `substitutes`, made by these functions, call the substitutes inside the block."""
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
            delattr(builtins, _PREFIX + name)


def _rewritten(code: CodeType, names: tuple[str, ...]) -> CodeType:
    if id(code) not in _known:
        _known[id(code)] = code, _rewrite(code, names)
    return _known[id(code)][1]


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
