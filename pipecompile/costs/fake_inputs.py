"""Fake twins of a model's tensors: shape, strides and dtype on one common device, no memory.

parameter on meta, or real   ──►   fake on `device`, same object for every holder (tied weights stay tied)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from pipecompile.torch_private.dtensors import like, part_of
from pipecompile.tracing.fakes.unknown_data import with_unknown_data

__all__ = ["OneDevice", "FakeTwins"]


class FakeTwins:
    """Makes one fake twin per tensor. Use it inside a FakeTensorMode. Nothing is copied, not even to look at it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The twin; the original is kept, so that no other tensor can take its id."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._make(tensor)
        return self._made[id(tensor)][1]

    def replace_in(self, model: nn.Module) -> None:
        """Put twins in the place of the model's tensors, also in lists such as those of recurrent layers.

        What was there is lost: call it inside `untouched`.
        """
        for module in model.modules():
            attributes = vars(module)
            for key, value in attributes.items():
                if isinstance(value, Tensor):
                    attributes[key] = self.of(value)
                elif isinstance(value, dict | list):
                    self._replace_items(value)

    def _replace_items(self, held: dict[Any, Any] | list[Any]) -> None:
        items = held.items() if isinstance(held, dict) else enumerate(held)
        for key, value in list(items):
            if isinstance(value, Tensor):
                held[key] = self.of(value)

    def _make(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            made = like(tensor, self._make(part_of(tensor)))
            return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        shape, strides = [int(size) for size in tensor.shape], [int(step) for step in tensor.stride()]
        twin = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=self._device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)


class OneDevice(TorchFunctionMode):
    """Calls that name a device get `device` instead: a graph recorded on `meta` has `zeros(..., device="meta")`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.cuda, Tensor.cpu):
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = self._device
        if func is Tensor.to:
            args = (args[0], *(self._device if isinstance(arg, str) else arg for arg in args[1:]))
        args = tuple(self._device if isinstance(arg, torch.device) else arg for arg in args)
        return with_unknown_data(func, args, kwargs)(*args, **kwargs)
