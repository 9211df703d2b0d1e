"""Fake twins of a model's tensors: same shape, strides and dtype, on one common device, without memory.

parameter on meta, or real   ──►   fake on `device`; one twin per tensor, so that tied weights stay tied
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from pipecompile.torch_private.dtensors import like, part_of
from pipecompile.tracing.fakes.fake_tensors import with_unknown_data

__all__ = ["FakeTwins", "OneDevice"]


class FakeTwins:
    """One fake twin per tensor. Use inside a FakeTensorMode. No data are copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the twin of a tensor. The original is kept alive, so that no other tensor can take its id."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._make(tensor)
        return self._made[id(tensor)][1]

    def replace_in(self, model: nn.Module) -> None:
        """Replace the model's tensors by twins, also in lists such as those of recurrent layers.

        The originals are not restored: call inside `untouched`.
        """
        for module in model.modules():
            attributes = vars(module)
            for key, value in attributes.items():
                if isinstance(value, Tensor):
                    attributes[key] = self.of(value)
                elif isinstance(value, dict | list):
                    self._replace_items(value)

    def _replace_items(self, container: dict[Any, Any] | list[Any]) -> None:
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in list(items):
            if isinstance(value, Tensor):
                container[key] = self.of(value)

    def _make(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            twin = like(tensor, self._make(part_of(tensor)))
            return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
        shape, strides = [int(size) for size in tensor.shape], [int(step) for step in tensor.stride()]
        twin = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=self._device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)


class OneDevice(TorchFunctionMode):
    """Replaces the device of calls that name one by `device`: a graph recorded on `meta` has `zeros(...,
    device="meta")`.
    """

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
