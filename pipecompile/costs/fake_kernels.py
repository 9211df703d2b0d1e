"""Kernels on fake tensors where the CPU stands for the device of a model: what it refuses, and what compares values, has a result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipecompile.torch_private.modes import ObservingMode, fake_tensor_log_disabled, unset_fake_temporarily
from pipecompile.torch_private.pytree import tree_map

__all__ = ["FakeKernels"]

_REFUSED = "not implemented for"
"""Part of torch's message for a dtype that an operator does not take on the CPU."""


class FakeKernels(ObservingMode):  # type: ignore[no-untyped-call]
    """Runs operators on fake tensors of `device`. Enter inside a FakeTensorMode.

    A model that was recorded on `meta` may choose what only a GPU takes, as `torch.histc` of integers. The CPU stands for
    `meta`, so such an operator runs on `meta` tensors, without values.
    """

    supports_higher_order_operators = False

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._is_stand_in = device.type == "cpu"

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten.equal.default:  # `istft` asks whether its window's sum is zero somewhere
            return False
        if not self._is_stand_in:
            return func(*args, **kwargs)
        try:
            with fake_tensor_log_disabled():
                return func(*args, **kwargs)
        except RuntimeError as error:
            if _REFUSED not in str(error):
                raise
        return self._on_meta(func, args, kwargs)

    def _on_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with unset_fake_temporarily():
            result = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
        return tree_map(self._fake, result)

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self._device)


def _meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
