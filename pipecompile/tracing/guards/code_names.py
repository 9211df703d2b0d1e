"""The names in the code of a function: globals that it loads, attributes that it names, functions inside it included."""

from __future__ import annotations

import dis
from types import CodeType

__all__ = ["loaded_globals"]

_LOAD_GLOBAL, _LOAD_NAME, _EXTENDED = dis.opmap["LOAD_GLOBAL"], dis.opmap["LOAD_NAME"], dis.opmap["EXTENDED_ARG"]

_known: dict[int, tuple[CodeType, frozenset[str]]] = {}
"""Cache by id: the code object, which stays alive here, and the globals that it loads."""


def loaded_globals(code: CodeType) -> frozenset[str]:
    """Return the names of the globals that code loads, without names of attributes."""
    if id(code) not in _known:
        inner = [loaded_globals(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
        _known[id(code)] = code, frozenset(_loads(code)).union(*inner)
    return _known[id(code)][1]


def _loads(code: CodeType) -> list[str]:
    """Return the globals that one code object loads. The argument of LOAD_GLOBAL has a flag in bit 0."""
    body, names, extended = code.co_code, [], 0
    for position in range(0, len(body), 2):
        operation, argument = body[position], body[position + 1] | extended
        extended = argument << 8 if operation == _EXTENDED else 0
        if operation == _LOAD_GLOBAL:
            names.append(code.co_names[argument >> 1])
        elif operation == _LOAD_NAME:
            names.append(code.co_names[argument])
    return names
