"""Opcode and target of the node of a call: operators and attribute access are functions, Tensor methods are names."""

from __future__ import annotations

import operator
from keyword import iskeyword
from typing import Any

import torch
from torch import fx, nn

__all__ = ["NodeCall", "graph_path", "decides_rank", "model_path", "node_call"]

NodeCall = tuple[str, Any, Any]
"""The opcode, the target and the arguments of a node."""

_OF_MODEL, _KEYWORD = "_of_model", "_is_keyword"
_TAKEN = frozenset({*dir(fx.GraphModule(nn.Module(), fx.Graph())), "facts"})


def graph_path(name: str) -> str:
    """Return the path in the graph module of the model's attribute `name`.

    A name that a GraphModule has itself (`graph`, `code`) moves under `_of_model`, and a Python keyword gets a suffix, since the
    generated code cannot contain `self.heads.global`.
    """
    atoms = name.split(".")
    if atoms[0] not in _TAKEN and not any(map(iskeyword, atoms)):
        return name
    return ".".join([_OF_MODEL, *(f"{atom}{_KEYWORD}" if iskeyword(atom) else atom for atom in atoms)])


def model_path(target: str) -> str:
    """Return the path in the model of an attribute of the graph module."""
    return ".".join(atom.removesuffix(_KEYWORD) for atom in target.split(".") if atom != _OF_MODEL)


_BINARY = "add sub mul truediv floordiv mod pow matmul lshift rshift eq ne lt le gt ge"
_INPLACE = "iadd isub imul itruediv ifloordiv imod ipow ilshift irshift"
_OTHER = "neg pos invert abs getitem setitem"
_OPERATORS = {f"__{name}__": getattr(operator, name) for name in f"{_BINARY} {_INPLACE} {_OTHER}".split()}
_OPERATORS |= {f"__{name}__": getattr(operator, f"{name}_") for name in ("and", "or")} | {"__xor__": operator.xor}
_OPERATORS |= {f"__i{name}__": getattr(operator, f"i{name}") for name in ("and", "or", "xor")}

_METHODS: dict[Any, str] = {}
"""Names of the methods of torch.Tensor whose `__name__` differs (that of `Tensor.__pow__` is "pow")."""
for _name, _method in vars(torch.Tensor).items():
    if callable(_method) and getattr(_method, "__name__", _name) != _name:
        _METHODS.setdefault(_method, _name)


_BY_SIZE = (
    "squeeze",
    "unbind",
    "chunk",
    "split",
    "tensor_split",
    "hsplit",
    "vsplit",
    "dsplit",
    "unsafe_chunk",
    "unsafe_split",
)


def decides_rank(func: Any) -> bool:
    """Return whether the number of results, or of their dimensions, depends on the sizes of the arguments."""
    return str(func.__name__).strip("_").startswith(_BY_SIZE)


def node_call(func: Any, args: Any) -> NodeCall:
    """Return opcode, target and arguments for a call that reached a TorchFunctionMode."""
    name = _METHODS.get(func) or func.__name__
    if name in ("__get__", "__set__"):
        attribute = getattr(func.__self__, "__name__", None) or func.__self__.fget.__name__
        getting = name == "__get__"
        return "call_function", getattr if getting else setattr, (args[0], attribute, *([] if getting else args[1:2]))
    if name in _OPERATORS:
        return "call_function", _OPERATORS[name], args
    if getattr(torch.Tensor, name, None) == func:
        return "call_method", name, args
    return "call_function", func, args
