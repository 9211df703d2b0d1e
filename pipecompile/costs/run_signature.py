"""The signature of a run: all that decides which kernels a node launches. The nodes of repeated blocks have equal signatures.

call         a function of torch, a method of a tensor, or a module of torch.nn without hooks, by all that the module holds
arguments    structure and constants; of each tensor its sizes, strides, dtype, and the other tensors that share its memory
modes        grad mode, inference mode, default dtype

A run has no signature if anything else may decide: code of the user, an opaque piece, a tensor of another kind, autocast, which
casts a weight once and reuses the result in later nodes.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from pipecompile.costs.graph_walk import MethodCall
from pipecompile.costs.node_run import NodeRun
from pipecompile.torch_private.modes import FakeTensor
from pipecompile.torch_private.modules import has_any_global_hook
from pipecompile.torch_private.storages import storage_key

__all__ = ["run_signature"]


def run_signature(run: NodeRun) -> Hashable | None:
    """Return the signature of a run that is to come on fake tensors; None if it has none."""
    if has_any_global_hook() or any(map(torch.is_autocast_enabled, _DEVICE_TYPES)):
        return None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    describe = _Description()
    try:
        return modes, _call(run.call, describe), describe.value(tuple(run.args)), describe.value(dict(run.kwargs))
    except _UndecidedError:
        return None


class _UndecidedError(Exception):
    """A value may decide more than its description says."""


_DEVICE_TYPES = ("cpu", "cuda")

_PLAIN = (
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

_SEQUENCES = (tuple, list, torch.Size, immutable_list)
_MAPPINGS = (dict, OrderedDict, immutable_dict)


def _call(call: Any, describe: _Description) -> Any:
    if isinstance(call, nn.Module):
        return describe.value(call)
    if isinstance(call, MethodCall) and hasattr(Tensor, call.name):
        return call
    name = getattr(call, "__name__", "")
    if any(getattr(library, name, None) is call for library in (torch, F, operator)) and _is_torchs(call):
        return call
    raise _UndecidedError


def _is_torchs(function: Any) -> bool:
    """Return whether the code of a function is that of torch or of Python: a user may put others in their places."""
    return (getattr(function, "__module__", None) or "torch").split(".")[0] in ("torch", "_operator")


class _Description:
    """Describes the values of one run. Tensors and their memory are numbered in the order in which they come."""

    def __init__(self) -> None:
        self._tensors: dict[int, int] = {}
        self._storages: dict[int, int] = {}

    def value(self, value: Any) -> Hashable:
        """Return the description of a value. Raise _UndecidedError for a value of an unknown type."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is FakeTensor:
            return self._tensor(value)
        if kind in _SEQUENCES:
            return kind, *map(self.value, value)
        if kind in _MAPPINGS:
            return kind, *((self.value(key), self.value(item)) for key, item in value.items())
        if kind is slice:
            return kind, *map(self.value, (value.start, value.stop, value.step))
        if kind is set:
            return kind, frozenset(map(self.value, value))
        if isinstance(value, nn.Module):
            return self._module(value)
        raise _UndecidedError

    def _tensor(self, tensor: FakeTensor) -> Hashable:
        geometry = *tensor.shape, *tensor.stride()
        is_known = tensor.constant is None and all(type(size) is int for size in geometry)
        if not is_known or tensor.layout is not torch.strided:
            raise _UndecidedError
        return (
            tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.requires_grad,
            isinstance(tensor, nn.Parameter), tensor.is_conj(), tensor.is_neg(),
            self._tensors.setdefault(id(tensor), len(self._tensors)),
            self._storages.setdefault(storage_key(tensor), len(self._storages)),
        )  # fmt: skip

    def _module(self, module: nn.Module) -> Hashable:
        """Return the class and all attributes. Hooks and a `forward` of the instance are functions, so they have no description."""
        kind = type(module)
        codes = (kind.__module__, kind.forward.__module__)
        if not all(name.startswith("torch.nn.modules.") for name in codes):
            raise _UndecidedError
        return kind, *((name, self.value(item)) for name, item in vars(module).items())
