"""Calls of `int`, `float` and `type` in the user's functions, led elsewhere for as long as a recording lasts.

    int(n // 2)            asks Python for a number: of a size that depends on the batch there is none
    type(x) is Tensor      asks what the author sees in x, not what stands for it here

These names are types, so nobody can stand in for them: `x is int`, `dtype=int` must mean what they say. Calls alone can be
told apart in the bytecode, where a global that is loaded to be called is marked; only those load another name.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from pipecompile.tracing.reachable_code import names_in

__all__ = ["calls_led_to"]

_PREFIX = "_pipecompile_"
_LOAD, _EXTENDED = dis.opmap["LOAD_GLOBAL"], dis.opmap["EXTENDED_ARG"]

_known: dict[int, tuple[CodeType, CodeType]] = {}
"""What has been rewritten before, and as what."""


@contextmanager
def calls_led_to(substitutes: Mapping[str, Callable[..., Any]], functions: Iterable[FunctionType]) -> Iterator[None]:
    """While the block lasts, a call of a builtin named in `substitutes` by one of the functions goes to what stands there."""
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
    inner = tuple(_rewrite(c, names) if isinstance(c, CodeType) else c for c in code.co_consts)
    wanted = {index: name for index, name in enumerate(code.co_names) if name in names}
    calls = list(_calls(code.co_code, wanted)) if wanted else []
    if not calls and all(a is b for a, b in zip(inner, code.co_consts, strict=True)):
        return code
    table, body = list(code.co_names), bytearray(code.co_code)
    for place, name in calls:
        if _PREFIX + name not in table:
            table.append(_PREFIX + name)
        argument = table.index(_PREFIX + name) << 1 | 1
        if argument > 255:  # it would need an instruction more
            return code
        body[place] = argument
    return code.replace(co_consts=inner, co_names=tuple(table), co_code=bytes(body))


def _calls(body: bytes, wanted: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """Where the argument of a LOAD_GLOBAL stands that loads a wanted name to call it: bit 0 says so."""
    extended = 0
    for place in range(0, len(body), 2):
        operation, argument = body[place], body[place + 1] | extended
        extended = argument << 8 if operation == _EXTENDED else 0
        if operation == _LOAD and argument & 1 and argument >> 1 in wanted:
            yield place + 1, wanted[argument >> 1]
