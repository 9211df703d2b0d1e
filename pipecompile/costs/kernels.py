"""The kernels that a piece of work launches, as seen by the dispatcher: FLOPs and bytes of each.

FLOPs are by the formulas of `torch.utils.flop_counter`. Bytes are what a kernel reads and writes when it reads each
operand once. Views launch nothing; a gather reads only what it takes; a write-only kernel does not read its target.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipecompile.costs.devices import DeviceSpec
from pipecompile.torch_private.modes import TorchDispatchMode
from pipecompile.torch_private.operators import packet_of, schema_of
from pipecompile.torch_private.pytree import tree_leaves
from pipecompile.torch_private.storages import storage_key

__all__ = ["Kernel", "KernelLog"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: its FLOPs, the bytes it moves, and the dtype it computes in."""

    flops: float
    moved: float
    dtype: torch.dtype

    def seconds(self, spec: DeviceSpec) -> float:
        """Its time under the roofline of a device."""
        return spec.seconds(self.flops, self.moved, self.dtype)


_aten = torch.ops.aten


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, _bias: object, *geometry: Any, **_result: object
) -> float:
    """As many FLOPs as the forward for each of the two gradients asked for. Torch's formula counts that of a grouped
    convolution's weight as if it were dense, in a depthwise one hundreds of times too many (seen in 2.15).
    """
    *shape, asked = geometry
    forward = FlopCounterMode(display=False).flop_registry[_aten.convolution]
    return float(forward(x, weight, None, *shape, out_val=gradient) * sum(asked[:2]))


class KernelLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, notes every kernel. `take` gives what was noted and starts anew."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._formulas = {
            **FlopCounterMode(display=False).flop_registry,
            _aten.convolution_backward: _convolution_backward,
        }
        self._kernels: list[Kernel] = []

    def take(self) -> tuple[Kernel, ...]:
        taken, self._kernels = tuple(self._kernels), []
        return taken

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":  # questions about a tensor's device or layout
            return result
        read, made = _tensors((args, kwargs)), _tensors(result)
        if _launches(func, read, made):
            formula = self._formulas.get(packet_of(func))
            flops = float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
            self._kernels.append(Kernel(flops, _moved(func, args, read, made), _dtype(read, made)))
        return result


_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_GATHERS = frozenset({"embedding", "index", "index_select", "gather", "take"})
_SCATTERS = frozenset({"index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_"})
_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})


def _launches(func: Any, read: list[Tensor], made: list[Tensor]) -> bool:
    """Whether a kernel runs: no tensor made, memory only reserved, or only a view taken, and there is none."""
    if not made or packet_of(func).__name__ in _ALLOCATIONS:
        return False
    homes = {storage_key(tensor) for tensor in read}
    return bool(schema_of(func).is_mutable or any(storage_key(tensor) not in homes for tensor in made))


def _moved(func: Any, args: tuple[Any, ...], read: list[Tensor], made: list[Tensor]) -> float:
    name = packet_of(func).__name__
    written = sum(map(_bytes, made))
    if name in _GATHERS:
        return 2 * written + sum(_bytes(tensor) for tensor in read[1:])
    if name in _SCATTERS:
        return 2 * sum(_bytes(tensor) for tensor in read[1:])
    skipped = args[0] if name in _OVERWRITES else None
    return written + sum(_bytes(tensor) for tensor in read if tensor is not skipped)


def _bytes(tensor: Tensor) -> int:
    """What a tensor occupies, a dimension along which it is expanded counted as one."""
    return tensor.element_size() * prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size
    )


def _dtype(read: list[Tensor], made: list[Tensor]) -> torch.dtype:
    """The type of the first floating-point operand."""
    tensors = [*read, *made]
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), tensors[0].dtype)


def _tensors(value: object) -> list[Tensor]:
    leaves: Iterable[object] = tree_leaves(value)
    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided}
    return list(found.values())
