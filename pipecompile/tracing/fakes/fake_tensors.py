"""Fake twins: the fake tensors that stand for parameters, constants and inputs while a model is recorded.

All twins are on one device, wherever the real tensors are. So a model whose stages are already spread over GPUs, or that
takes its inputs from the CPU, is recorded like a model on one device. A tied parameter has one twin.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private.modes import FakeTensorMode, disable_current_modes

__all__ = ["Twins", "recording_device"]


def recording_device(model: nn.Module, leaves: Iterable[Any]) -> torch.device:
    """Return the device of all twins: that of the first parameter, else of the first input tensor, else the CPU."""
    tensors = (*model.parameters(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
    return tensors[0].device if tensors else torch.device("cpu")


class Twins:
    """The twins of one recording, under one FakeTensorMode."""

    def __init__(self, fake: FakeTensorMode, device: torch.device) -> None:
        self.fake, self.device = fake, device
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._classes: dict[int, type] = {}

    @property
    def device_contexts(self) -> tuple[torch.device, ...]:
        """The contexts in which calls without `device=` make tensors on the device of the twins."""
        return () if self.device == torch.get_default_device() else (self.device,)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the twin of a parameter, buffer or constant; every time the same."""
        if id(tensor) not in self._twins:
            is_here = tensor.device == self.device
            with disable_current_modes():
                twin = self.fake.from_tensor(tensor, static_shapes=True) if is_here else self._moved(tensor)
            self._twins[id(tensor)] = tensor, twin  # keeps the tensor alive, so that its id is not used again
            self._classes[id(twin)] = type(tensor)
        return self._twins[id(tensor)][1]

    def tensor_class(self, twin: torch.Tensor) -> type:
        """Return the class of the tensor that `twin` stands for."""
        plain = nn.Parameter if isinstance(twin, nn.Parameter) else torch.Tensor
        return self._classes.get(id(twin), plain)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a twin on another device than the tensor's."""
        with self.fake:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)

    def of_input(self, leaf: torch.Tensor, dim: Any, size: Any) -> torch.Tensor:
        """Return a new twin of an input, with `size` samples along its batch dimension `dim`."""
        shape = tuple(size if index == dim else length for index, length in enumerate(leaf.shape))
        is_channels_last = (
            leaf.dim() == 4 and not leaf.is_contiguous() and leaf.is_contiguous(memory_format=torch.channels_last)
        )
        layout = torch.channels_last if is_channels_last else torch.contiguous_format
        with self.fake:
            twin = torch.empty(shape, dtype=leaf.dtype, device=self.device, memory_format=layout)
        self._classes[id(twin)] = type(leaf)
        return twin.requires_grad_(leaf.requires_grad)
