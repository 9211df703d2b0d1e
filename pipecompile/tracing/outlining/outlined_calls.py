"""Outlined blocks in the functions of a model: inside a `with`, each call of a block goes to a handler.

    F.__code__ = outlined code          for every function of the model that has a block
    a block runs  ──►  handle(BlockCall)  ──►  what the block writes

The module that a block belongs to is the innermost module of the model that runs at the time.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from pipecompile.batching.containers import flatten_containers, hides_tensors
from pipecompile.torch_private.modules import buffers_of, children_of, parameters_of
from pipecompile.tracing.emit.value_nodes import PLAIN
from pipecompile.tracing.outlining.code_blocks import Block, CodeBlock, find_block
from pipecompile.tracing.outlining.function_source import source_of
from pipecompile.tracing.outlining.outlined_code import RETURNED, Route, close_routes, outlined_code
from pipecompile.tracing.reachable_code import reachable

__all__ = ["BlockCall", "UnsuitableBlock", "code_outlined", "owner_in", "owner_of"]

_VALUES = (torch.Tensor, *PLAIN, torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of the leaves that a node takes as arguments."""


class UnsuitableBlock(Exception):
    """A block cannot be one node. `why` completes the sentence "the block cannot be opaque: "."""

    def __init__(self, place: CodeBlock, why: str) -> None:
        super().__init__(why)
        self.place, self.why = place, why


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of a block, with the path of its module, and the tensors and plain values that it reads, by name.

    Call it with such values: it returns what the block writes, by name. `fixed` are the other objects that it reads, `before` what
    it may leave as it was. Of the lists and dicts that it changes it changes copies, and returns these, too.
    """

    path: str
    place: CodeBlock
    values: dict[str, Any]
    function: Callable[..., Mapping[str, Any]]
    fixed: dict[str, Any]
    writes: tuple[str, ...]
    changed: tuple[str, ...]
    before: dict[str, Any]
    attributes: frozenset[tuple[str, ...]] = frozenset()
    written: frozenset[str] = frozenset()

    def may_write(self, leaf: Any) -> bool:
        """Return whether the block may write a tensor among its values in place, in this call or in another one."""
        held = (one for name in self.written & self.values.keys() for one in flatten_containers(self.values[name])[0])
        return any(leaf is one for one in held if isinstance(one, torch.Tensor))

    @property
    def kept(self) -> BlockCall:
        """The call without the values of the recording, for the runs of the graph."""
        return replace(self, values={}, before={})

    def __call__(self, values: dict[str, Any]) -> dict[str, Any]:
        changed = {name: copy.copy(values[name]) for name in self.changed}
        after = {**self.function(**self.fixed, **{**values, **changed}), **changed}
        return {name: after[name] for name in self.writes if after.get(name, _UNSET) is not _UNSET}

    def check(self, result: Mapping[str, Any]) -> None:
        """Raise UnsuitableBlock if a result of this call is not a possible result of every call."""
        for name, value in self.before.items():
            if name in result and _kinds(value) != _kinds(result[name]):
                raise UnsuitableBlock(
                    self.place, f"it leaves `{name}` as it was, or replaces it by another kind of value"
                )
        hidden = [name for name, value in self.fixed.items() if value is not _UNSET and hides_tensors(value)]
        if hidden:
            raise UnsuitableBlock(self.place, f"`{hidden[0]}` may hide tensors of this call")
        advanced = [name for name, value in self.fixed.items() if hasattr(value, "__next__")]
        if advanced:
            raise UnsuitableBlock(self.place, f"it may advance the iterator `{advanced[0]}`")

    def is_alike(self, other: BlockCall) -> bool:
        """Return whether a call in another run reads the same objects. An object that each call makes is another one."""
        return all(_is_same(value, other.fixed.get(name)) for name, value in self.fixed.items())

    def tensors(self, model: nn.Module) -> Iterator[torch.Tensor]:
        """Yield the tensors that the block names, and those of modules that it names and that do not contain the block itself."""
        enclosing, path = {id(model)}, self.path
        while path:
            enclosing.add(id(model.get_submodule(path)))
            path = path.rpartition(".")[0]
        attributes = (_attribute(self.fixed.get(name), chain) for name, *chain in self.attributes)
        for value in (*self.fixed.values(), *attributes):
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, nn.Module) and id(value) not in enclosing:
                yield from (*value.parameters(), *value.buffers())


class _Unset:
    """The value of a name that is not assigned yet."""


_UNSET = _Unset()

BlockHandler = Callable[[BlockCall], dict[str, Any]]


@contextmanager
def code_outlined(model: nn.Module, places: Iterable[CodeBlock], handle: BlockHandler) -> Iterator[None]:
    """Send the calls of blocks to `handle` inside the block of the `with`. Raise UnsuitableBlock."""
    by_function: dict[tuple[str, int, str], list[CodeBlock]] = {}
    for place in places:
        by_function.setdefault((place.file, place.first_line, place.function), []).append(place)
    paths = {id(module): path for path, module in model.named_modules()}
    originals: list[tuple[FunctionType, CodeType]] = []
    try:
        for function in _functions(model, by_function) if by_function else ():
            code = function.__code__
            own = by_function[_key(code)]
            new = outlined_code(code, {place: _route(code, place, paths, handle) for place in own})
            if new is None:
                raise UnsuitableBlock(own[-1], "its function closes over other names without it")
            originals.append((function, code))
            function.__code__ = new
        yield
    finally:
        for function, code in originals:
            close_routes(function.__code__)
            function.__code__ = code


def owner_of(frame: FrameType | None, paths: Mapping[int, str]) -> str:
    """Return the path of the innermost module of the model that runs a frame or calls it; "" if there is none."""
    while frame is not None:
        if (owner := owner_in(frame, paths)) is not None:
            return paths[id(owner)]
        frame = frame.f_back
    return ""


def owner_in(frame: FrameType, paths: Mapping[int, str]) -> nn.Module | None:
    """Return the module of the model whose method a frame runs. A plain function that takes a module is not a method of it."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    is_method = code.co_argcount and (code.co_varnames[0] == "self" or hasattr(type(owner), code.co_name))
    return owner if is_method and isinstance(owner, nn.Module) and id(owner) in paths else None


def _key(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_qualname


def _functions(model: nn.Module, wanted: Mapping[tuple[str, int, str], Any]) -> list[FunctionType]:
    """Return the functions with these codes: those that names lead to from the model, or any in memory."""
    found = [function for function in reachable(model).functions if _key(function.__code__) in wanted]
    missing = wanted.keys() - {_key(function.__code__) for function in found}
    if missing:
        found += [one for one in gc.get_objects() if type(one) is FunctionType and _key(one.__code__) in missing]
    return found


def _route(code: CodeType, place: CodeBlock, paths: Mapping[int, str], handle: BlockHandler) -> Route:
    source = source_of(code)
    block = find_block(source, place) if source is not None else None
    assert block is not None

    def route(function: Callable[..., Mapping[str, Any]], scope: Mapping[str, Any]) -> Mapping[str, Any]:
        path = owner_of(sys._getframe(2), paths)  # the frame of the function that contains the block
        call = _block_call(path, place, block, function, scope)
        written = handle(call)
        for name in call.changed:
            _fill(scope[name], written[name])
        return written

    return route


def _block_call(
    path: str, place: CodeBlock, block: Block, function: Callable[..., Mapping[str, Any]], scope: Mapping[str, Any]
) -> BlockCall:
    """Return the call of a block with the local names around it."""
    code: CodeType = function.__code__
    reads = code.co_varnames[: code.co_argcount]
    values = {name: scope[name] for name in reads if name in scope and _is_value(scope[name])}
    fixed = {name: scope.get(name, _UNSET) for name in reads if name not in values}
    changed = tuple(name for name in sorted(block.changed) if type(values.get(name)) in (list, dict))
    writes = [RETURNED] if block.has_return else [n for n in block.writes if n in scope or n not in block.uncertain]
    writes = [*dict.fromkeys((*writes, *changed))]
    before = {name: scope[name] for name in writes if name in block.uncertain and name in scope}
    return BlockCall(
        path, place, values, function, fixed, tuple(writes), changed, before, block.attributes, block.written
    )


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two objects are one, or functions that do the same."""
    if isinstance(value, FunctionType) and isinstance(other, FunctionType):
        return value.__code__ is other.__code__
    return value is other or (isinstance(value, (MethodType, range, slice)) and value == other)


def _fill(container: Any, content: Any) -> None:
    """Give a list or a dict another content."""
    if isinstance(container, list):
        container[:] = content
    else:
        items = dict(content)
        container.clear()
        container.update(items)


def _attribute(value: Any, chain: Sequence[str]) -> Any:
    """Return the submodule, parameter or buffer at the end of a chain of attributes, or the module whose method is there."""
    for name in chain:
        if not isinstance(value, nn.Module):
            return None
        tables: tuple[Mapping[str, Any], ...] = (children_of(value), parameters_of(value), buffers_of(value))
        found = next((table[name] for table in tables if name in table), None)
        if found is None:
            return value if hasattr(type(value), name) else None
        value = found
    return value


def _kinds(value: Any) -> tuple[Any, ...]:
    """Return the structure of a value, and shapes and dtypes of its tensors."""
    leaves, structure = flatten_containers(value)
    kinds = [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves
    ]
    return structure, kinds


def _is_value(value: Any) -> bool:
    """Return whether a value can be an argument of a node: tensors and plain values in containers."""
    return all(isinstance(leaf, _VALUES) for leaf in flatten_containers(value)[0])
