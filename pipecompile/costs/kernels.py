"""The kernels that a call launches, as the dispatcher sees them: FLOPs and bytes of each.

FLOPs follow the formulas of `torch.utils.flop_counter`. Bytes are those that a kernel reads and writes if it reads each
operand once. Views launch nothing; a gather reads only the selected rows; a write-only kernel does not read its target.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipecompile.costs.device_specs import DeviceSpec
from pipecompile.torch_private.modes import TorchDispatchMode
from pipecompile.torch_private.operators import packet_of, schema_of
from pipecompile.torch_private.pytree import tree_leaves
from pipecompile.torch_private.storages import storage_key

__all__ = ["Kernel", "KernelLog"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: its FLOPs, the bytes that it moves, and the dtype in which it computes."""

    flops: float
    moved: float
    dtype: torch.dtype

    def seconds(self, spec: DeviceSpec) -> float:
        """Return the roofline time on a device."""
        return spec.seconds(self.flops, self.moved, self.dtype)


_aten = torch.ops.aten


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, _bias: object, *geometry: Any, **_result: object
) -> float:
    """Return as many FLOPs as the forward for each requested gradient.

    torch's formula counts the weight gradient of a grouped convolution as if it were dense; in a depthwise convolution
    that is hundreds of times too many (seen in 2.15).
    """
    *shape, requested = geometry
    forward = FlopCounterMode(display=False).flop_registry[_aten.convolution]
    return float(forward(x, weight, None, *shape, out_val=gradient) * sum(requested[:2]))


class KernelLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records every kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._formulas = {
            **FlopCounterMode(display=False).flop_registry,
            _aten.convolution_backward: _convolution_backward,
        }
        self._kernels: list[Kernel] = []

    def take(self) -> tuple[Kernel, ...]:
        """Return the kernels recorded since the last call."""
        taken, self._kernels = tuple(self._kernels), []
        return taken

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":  # queries of a tensor's device or layout
            return result
        read, results = _tensors((args, kwargs)), _tensors(result)
        if _launches(func, read, results):
            formula = self._formulas.get(packet_of(func))
            flops = float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
            self._kernels.append(Kernel(flops, _moved(func, args, read, results), _dtype(read, results)))
        return result


_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_GATHERS = frozenset({"embedding", "index", "index_select", "gather", "take"})
_SCATTERS = frozenset({"index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_"})
_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})


def _launches(func: Any, read: list[Tensor], results: list[Tensor]) -> bool:
    """Return whether a kernel runs: not if no tensor results, memory is only reserved, or the result is only a view."""
    if not results or packet_of(func).__name__ in _ALLOCATIONS:
        return False
    storages = {storage_key(tensor) for tensor in read}
    return bool(schema_of(func).is_mutable or any(storage_key(tensor) not in storages for tensor in results))


def _moved(func: Any, args: tuple[Any, ...], read: list[Tensor], results: list[Tensor]) -> float:
    name = packet_of(func).__name__
    written = sum(map(_bytes, results))
    if name in _GATHERS:
        return 2 * written + sum(_bytes(tensor) for tensor in read[1:])
    if name in _SCATTERS:
        return 2 * sum(_bytes(tensor) for tensor in read[1:])
    skipped = args[0] if name in _OVERWRITES else None
    return written + sum(_bytes(tensor) for tensor in read if tensor is not skipped)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor occupies; an expanded dimension counts as one."""
    return tensor.element_size() * prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size
    )


def _dtype(read: list[Tensor], results: list[Tensor]) -> torch.dtype:
    """Return the type of the first floating-point operand."""
    tensors = [*read, *results]
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), tensors[0].dtype)


def _tensors(value: object) -> list[Tensor]:
    leaves: Iterable[object] = tree_leaves(value)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided}
    return list(tensors.values())
