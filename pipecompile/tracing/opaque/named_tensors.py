"""Tensors of a model that user code names, and so may read or write, even in branches that no trial run takes.

    self.count += 1                  names `count`: the buffer
    self.book.update(x)              names `book` and `update`: what the code of that method names of the submodule, and so on

Names are followed into the attributes of modules and into the methods that code names. The items of containers of modules are left
out: a statement of a loop over layers would name the tensors of all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private.modes import FakeTensor
from pipecompile.torch_private.modules import STATE_TABLES, buffers_of, children_of
from pipecompile.tracing.container_items import CONTAINERS, values_in
from pipecompile.tracing.loaded_names import attribute_names
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque.attribute_uses import is_only_read
from pipecompile.tracing.outlining.outlined_calls import BlockCall
from pipecompile.tracing.plain_functions import function_of
from pipecompile.tracing.reachable_code import is_foreign

__all__ = ["attribute_tensors", "named_by", "named_tensors", "tensors_within"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def named_by(
    piece: Piece, model: nn.Module, block: BlockCall | None, arguments: Iterable[Any]
) -> list[tuple[torch.Tensor, bool]]:
    """Return the tensors that a method, a plain function or a block of statements names, and whether it only reads them.

    A submodule has its own buffers.

    `arguments` are the leaves of those of a call, or the values that a block reads. Call this when no method of the model is replaced.
    """
    arguments = tuple(arguments)
    owners = [value for value in arguments if isinstance(value, nn.Module)]
    texts = frozenset(value for value in arguments if isinstance(value, str))
    codes: list[CodeType] = []
    if block is not None:
        codes = [block.function.__code__]
    elif piece.function:
        codes = [code for function in _functions(function_of(piece.function)) if (code := _code(function))]
    elif piece.is_part and not piece.is_module:
        owner = model.get_submodule(piece.path)
        owners, codes = [owner], list(_methods(owner, piece.method))
    named = [*named_tensors(owners, codes, texts)]
    written = {id(tensor) for tensor, only_read in named if not only_read}
    return [(tensor, id(tensor) not in written) for tensor, _ in named]


def named_tensors(
    owners: Iterable[nn.Module], codes: Iterable[CodeType], texts: frozenset[str] = frozenset()
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the buffers, and the tensors that are plain attributes, that code with these modules and names at hand names.

    Each comes with whether this code only reads it, which is known of buffers alone.
    """
    codes = tuple(codes)
    pending = [(owner, code) for owner in owners for code in codes]
    seen: set[tuple[int, int]] = set()
    while pending:
        owner, code = pending.pop()
        if (id(owner), id(code)) in seen:
            continue
        seen.add((id(owner), id(code)))
        names = attribute_names(code) | texts
        for module in _modules(owner, names):
            is_called = module is not owner
            if is_called and is_foreign(type(module)):
                yield from ((tensor, False) for tensor in module.buffers())
                continue
            named = names | {"forward"} if is_called else names
            yield from _tensors(module, named, code)
            pending += [(module, method) for name in sorted(named) for method in _methods(module, name)]


def _methods(module: nn.Module, name: str) -> Iterator[CodeType]:
    """Yield the code of the methods of the user's with this name in the class of a module and its bases, and of properties."""
    for base in type(module).__mro__:
        if name in vars(base) and not is_foreign(base):
            yield from (code for function in _functions(vars(base)[name]) if (code := _code(function)))


def _functions(value: Any) -> tuple[Any, ...]:
    """Return the functions of a method or a property, and what they wrap."""
    found = [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
    for function in found:
        if (inner := getattr(function, "__wrapped__", None)) is not None:
            found.append(inner)
    return tuple(found)


def _code(function: Any) -> CodeType | None:
    return function.__code__ if isinstance(function, FunctionType) else None


def _modules(owner: nn.Module, names: frozenset[str]) -> list[nn.Module]:
    """Return a module and the modules in it that the names lead to."""
    found = [owner]
    for module in found:
        children = children_of(module)
        inner = (children[name] for name in sorted(names & children.keys()))
        found += [one for one in inner if one is not None and not isinstance(one, _CONTAINERS) and one not in found]
    return found


def _tensors(module: nn.Module, names: frozenset[str], code: CodeType) -> Iterator[tuple[torch.Tensor, bool]]:
    buffers, attributes = buffers_of(module), vars(module)
    for name in sorted(names & buffers.keys()):
        yield from ((tensor, is_only_read(code, name)) for tensor in tensors_within(buffers[name]))
    found = tensors_within([attributes[name] for name in sorted(names & attributes.keys())])
    yield from ((tensor, False) for tensor in found)


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """Yield the strided tensors in nested containers and in user objects, but for modules. A list may hold itself."""
    pending, seen = [value], dict[int, Any]()
    while pending:
        one = pending.pop()
        if isinstance(one, torch.Tensor):
            if type(one) in (torch.Tensor, nn.Parameter) and one.layout is torch.strided:
                yield one
        elif id(one) not in seen and not isinstance(one, _WITHOUT):
            seen[id(one)] = one
            if isinstance(one, CONTAINERS):
                pending += values_in(one)
            elif not is_foreign(type(one)):
                pending += getattr(one, "__dict__", {}).values()


def attribute_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of attributes that are not parameters and buffers, also in lists, dicts and objects."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in STATE_TABLES:
                found = (one for one in tensors_within(value) if not isinstance(one, FakeTensor))
                yield from ((f"{path}.{name}".lstrip("."), one) for one in found)


_WITHOUT = (str, bytes, int, float, nn.Module, type, FunctionType, MethodType, ModuleType)
"""Types of values that hold no tensors, or that are searched elsewhere."""
