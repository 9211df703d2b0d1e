"""The properties of a tensor that a recording depends on, compared for many tensors at once.

The address of the memory stands for dtype and device: all three change when a tensor's `data` is exchanged, and the dtype and the
device are compared only then. An optimizer writes in place, so the address stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch

from pipecompile.torch_private.modes import FakeTensor

__all__ = ["TensorMetadata"]

_flag, _shape = attrgetter("requires_grad"), attrgetter("shape")
_all = attrgetter("requires_grad", "shape", "dtype", "device", "layout")
_address = torch.Tensor.data_ptr

_NAMES = ("requires_grad", "shape", "dtype", "device", "layout", "strides")


class TensorMetadata:
    """The metadata of tensors at the time of construction; each tensor has a label."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        labelled = [(label, tensor) for label, tensor in tensors if not isinstance(tensor, FakeTensor)]
        self.labels = [label for label, _ in labelled]
        self.tensors = [tensor for _, tensor in labelled]
        self._plain = [tensor for tensor in self.tensors if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided]  # fmt: skip
        self.properties = list(map(_properties, self.tensors))
        self._take()

    def _take(self) -> None:
        self._flags, self._shapes = list(map(_flag, self.tensors)), list(map(_shape, self.tensors))
        self._addresses = list(map(_address, self._plain))

    def holds(self) -> bool:
        """Return whether all metadata are as they were."""
        tensors = self.tensors
        if (
            list(map(_flag, tensors)) == self._flags
            and list(map(_shape, tensors)) == self._shapes
            and list(map(_address, self._plain)) == self._addresses
        ):
            return True
        if list(map(_properties, tensors)) != self.properties:
            return False
        self._take()
        return True

    def changes(self) -> list[tuple[str, str, Any, Any]]:
        """Return (label, property, value then, value now) of each property that changed."""
        rows = zip(self.labels, self.tensors, self.properties, strict=True)
        return [
            (label, name, before, now)
            for label, tensor, then in rows
            for name, before, now in zip(_NAMES, then, _properties(tensor), strict=True)
            if before != now
        ]


def _properties(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return (*_all(tensor), strides)
