"""The names that the code of a function loads and binds, read from its instructions without running it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dis import Instruction, get_instructions, opmap
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

__all__ = [
    "attribute_names",
    "bound_attributes",
    "bound_globals",
    "imported_modules",
    "left_names",
    "loaded_globals",
    "may_write_tensors",
    "names_in",
]

_LOAD_GLOBAL, _LOAD_NAME, _IMPORT_NAME = opmap["LOAD_GLOBAL"], opmap["LOAD_NAME"], opmap["IMPORT_NAME"]
_EXTENDED = opmap["EXTENDED_ARG"]
_BIND_GLOBAL, _BIND_ATTRIBUTE = (
    frozenset({opmap[f"STORE_{kind}"], opmap[f"DELETE_{kind}"]}) for kind in ("GLOBAL", "ATTR")
)

_known: dict[int, tuple[CodeType, frozenset[str]]] = {}
"""Cache of `names_in` by id: the code object, which stays alive here, and its names."""

_known_attributes: dict[int, tuple[CodeType, frozenset[str]]] = {}
"""Cache of `attribute_names` by id: the code object, which stays alive here, and its names."""

_known_loads: dict[int, tuple[CodeType, frozenset[str], frozenset[str]]] = {}
"""Cache by id: the code object, which stays alive here, the globals that it loads, and the modules that it imports."""


def names_in(code: CodeType) -> frozenset[str]:
    """Return the globals and attributes that code names, also in the functions inside it."""
    if id(code) not in _known:
        inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
        _known[id(code)] = code, frozenset(code.co_names).union(*inner)
    return _known[id(code)][1]


def may_write_tensors(code: CodeType) -> bool:
    """Return whether code names a method that writes in place (`mul_`), or what shows the memory of a tensor (`data`)."""
    names = names_in(code)
    return not _MEMORY.isdisjoint(names) or any(name.endswith("_") and not name.endswith("__") for name in names)


_MEMORY = frozenset(("data", "numpy", "storage", "untyped_storage"))
"""Names of what shows the memory of a tensor, which is then written without a new version."""


def attribute_names(code: CodeType) -> frozenset[str]:
    """Return the names by which code may reach an attribute: `names_in`, and its texts, as in getattr(x, "scale", 1)."""
    if id(code) not in _known_attributes:
        inner = [attribute_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
        _known_attributes[id(code)] = code, frozenset((*code.co_names, *_texts(code))).union(*inner)
    return _known_attributes[id(code)][1]


def loaded_globals(code: CodeType) -> frozenset[str]:
    """Return the names of the globals that code loads, without names of attributes."""
    return _loads_of(code)[0]


def bound_globals(code: CodeType) -> frozenset[str]:
    """Return the globals that code binds or deletes, also in the functions inside it: `global LAST`, `LAST = h`."""
    return _bound(code, _BIND_GLOBAL)


def bound_attributes(code: CodeType) -> frozenset[str]:
    """Return the attributes that code sets or deletes, whatever has them, also in the functions inside it."""
    return _bound(code, _BIND_ATTRIBUTE)


_known_bound: dict[tuple[int, frozenset[int]], tuple[CodeType, frozenset[str]]] = {}
"""Cache of `_bound` by id and operations: the code object, which stays alive here, and the names."""


def _bound(code: CodeType, binding: frozenset[int]) -> frozenset[str]:
    """Return the names that operations of one kind have as their argument."""
    if (id(code), binding) not in _known_bound:
        inner = [_bound(constant, binding) for constant in code.co_consts if isinstance(constant, CodeType)]
        binds = not binding.isdisjoint(code.co_code[::2])  # most code binds nothing outside
        found = (code.co_names[argument] for operation, argument in _operations(code) if operation in binding)
        _known_bound[id(code), binding] = code, frozenset(found if binds else ()).union(*inner)
    return _known_bound[id(code), binding][1]


class LeftNames(NamedTuple):
    """Names in code: of attributes, items and variables that it reads; of attributes and items that it sets; of containers that it changes
    by a method.
    """

    read: frozenset[str]
    bound: frozenset[str]
    changed: frozenset[str]


@lru_cache(maxsize=4096)
def left_names(code: CodeType) -> LeftNames:
    """Return the names that code reads, sets and changes, also in the functions inside it.

    `self.n += 1` does not count as a read of n, nor `self.seen.append(h)` as one of seen: what they leave does not depend on who else does
    so. A text may be a name, as in getattr(self, "n").
    """
    read, bound, changed = set[str](), set[str](), set[str]()
    for before, one, after in _triples(code):
        is_name = one.opname == "LOAD_CONST" and isinstance(one.argval, str) and one.argval.isidentifier()
        if one.opname in ("STORE_ATTR", "DELETE_ATTR") or (is_name and after.opname in _ITEM_SET):
            bound.add(one.argval)
        elif one.opname in _LOADS and after.opname in _LOADS_ATTRIBUTE and after.argval in _CHANGES:
            changed.add(one.argval)
            read |= {one.argval} if after.argval.startswith("pop") else set()
        elif (one.opname in _LOADS and before.opname != "COPY") or is_name:
            read.add(one.argval)
    bound |= {*_texts(code)} if {"setattr", "delattr", "__setattr__"} & {*code.co_names} else set()
    inner = [left_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    own = LeftNames(frozenset(read), frozenset(bound), frozenset(changed))
    return LeftNames(*(frozenset[str]().union(*parts) for parts in zip(own, *inner, strict=True)))


_LOADS_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}
_LOADS = {*_LOADS_ATTRIBUTE, "LOAD_DEREF", "LOAD_GLOBAL"}
_ITEM_SET = {"STORE_SUBSCR", "DELETE_SUBSCR", "COPY"}
"""Operations behind a key if its item is set; COPY in `d["n"] += 1`."""

_CHANGES = frozenset(
    "append appendleft extend insert add update setdefault clear remove discard pop popleft popitem".split()
)
"""Methods of containers that change them."""


def _triples(code: CodeType) -> Iterator[tuple[Instruction, Instruction, Instruction]]:
    """Yield each instruction with the ones before and behind it; at the ends with itself."""
    found = [one for one in get_instructions(code) if one.opname not in ("CACHE", "EXTENDED_ARG", "NOP")]
    return zip([*found[:1], *found], found, [*found[1:], *found[-1:]], strict=False)


def imported_modules(function: FunctionType) -> list[ModuleType]:
    """Return the modules that a function imports when it runs, and the packages around them, as far as they are loaded."""
    package, own = function.__globals__.get("__package__") or "", str(function.__globals__.get("__name__"))
    loads = [own if name == "__name__" else name for name in _loads_of(function.__code__)[1]]
    names = {inner for name in loads for inner in _packages(_absolute(name, package))}
    return [module for name in sorted(names) if isinstance(module := sys.modules.get(name), ModuleType)]


def _loads_of(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the globals that code loads and the modules that it imports, with a dot for each level of a relative import."""
    if id(code) not in _known_loads:
        inner = [_loads_of(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
        loads, imports = frozenset(_loads(code)), frozenset(_imports(code))
        _known_loads[id(code)] = (
            code,
            loads.union(*(names for names, _ in inner)),
            imports.union(*(names for _, names in inner)),
        )
    return _known_loads[id(code)][1:]


def _loads(code: CodeType) -> list[str]:
    """Return the globals that one code object loads. The argument of LOAD_GLOBAL has a flag in bit 0."""
    names = []
    for operation, argument in _operations(code):
        if operation == _LOAD_GLOBAL:
            names.append(code.co_names[argument >> 1])
        elif operation == _LOAD_NAME:
            names.append(code.co_names[argument])
    return names + (_texts(code) if "globals" in code.co_names else [])  # globals()["gain"]


def _imports(code: CodeType) -> list[str]:
    """Return the modules that one code object imports. Two instructions before, their level and names are loaded."""
    operations, names = list(_operations(code)), []
    for position, (operation, argument) in enumerate(operations):
        if operation == _IMPORT_NAME:
            level = _loaded_number(code, *operations[position - 2]) if position >= 2 else 0
            names.append("." * level + code.co_names[argument])
    if _BY_TEXT & {*code.co_names}:  # import_module("settings"), sys.modules[__name__]
        names += [*_texts(code), *(["__name__"] if "__name__" in code.co_names else [])]
    return names


_BY_TEXT = {"import_module", "__import__", "modules"}
"""Names of what finds a module by its name."""


def _texts(code: CodeType) -> list[str]:
    """Return the texts of one code object that may be names of variables or modules."""
    texts = [constant for constant in code.co_consts if isinstance(constant, str)]
    return [text for text in texts if all(part.isidentifier() for part in text.split("."))]


def _loaded_number(code: CodeType, operation: int, argument: int) -> int:
    """Return the number that an instruction loads, from the constants or from its own argument."""
    if operation == opmap.get("LOAD_SMALL_INT"):  # Python 3.14
        return argument
    constant = code.co_consts[argument] if operation == opmap["LOAD_CONST"] else 0
    return constant if isinstance(constant, int) else 0


def _operations(code: CodeType) -> Iterator[tuple[int, int]]:
    body, extended = code.co_code, 0
    for position in range(0, len(body), 2):
        operation, argument = body[position], body[position + 1] | extended
        extended = argument << 8 if operation == _EXTENDED else 0
        if operation != _EXTENDED:
            yield operation, argument


def _absolute(name: str, package: str) -> str:
    try:
        return importlib.util.resolve_name(name, package)
    except ImportError:
        return name


def _packages(name: str) -> Iterator[str]:
    """Yield the names of a module and of all packages around it."""
    parts = name.split(".")
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)))
