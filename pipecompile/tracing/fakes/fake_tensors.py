"""Fake twins: what the model computes on while it is recorded, instead of its parameters, constants and inputs.

All twins live on one device, wherever the real tensors are: a model whose stages are already spread over GPUs, or that
gets its inputs from the CPU, is recorded like one that sits in one place. A tied parameter has one twin.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private.modes import FakeTensorMode, disable_current_modes

__all__ = ["Twins", "recording_device"]


def recording_device(model: nn.Module, leaves: Iterable[Any]) -> torch.device:
    """Where all twins live: the device of the first parameter, else of the first input tensor, else the CPU."""
    tensors = (*model.parameters(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
    return tensors[0].device if tensors else torch.device("cpu")


class Twins:
    """Makes the twins of one recording, under one FakeTensorMode."""

    def __init__(self, fake: FakeTensorMode, device: torch.device) -> None:
        self.fake, self.device = fake, device
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._kinds: dict[int, type] = {}

    @property
    def device_contexts(self) -> tuple[torch.device, ...]:
        """The contexts that make tensors where the twins are when nobody says where."""
        return () if self.device == torch.get_default_device() else (self.device,)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The twin of a parameter, buffer or constant: always the same one."""
        if id(tensor) not in self._made:
            here = tensor.device == self.device
            with disable_current_modes():
                twin = self.fake.from_tensor(tensor, static_shapes=True) if here else self._moved(tensor)
            self._made[id(tensor)] = tensor, twin  # the tensor too, so that its id stays its own
            self._kinds[id(twin)] = type(tensor)
        return self._made[id(tensor)][1]

    def tensor_class(self, twin: torch.Tensor) -> type:
        """The class of what `twin` stands for."""
        plain = nn.Parameter if isinstance(twin, nn.Parameter) else torch.Tensor
        return self._kinds.get(id(twin), plain)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.fake:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(twin, requires_grad=tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)

    def of_input(self, leaf: torch.Tensor, dim: Any, size: Any) -> torch.Tensor:
        """The twin of an input, with `size` samples along its batch dimension."""
        shape = tuple(size if index == dim else length for index, length in enumerate(leaf.shape))
        last = leaf.dim() == 4 and not leaf.is_contiguous() and leaf.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if last else torch.contiguous_format
        with self.fake:
            twin = torch.empty(shape, dtype=leaf.dtype, device=self.device, memory_format=layout)
        self._kinds[id(twin)] = type(leaf)
        return twin.requires_grad_(leaf.requires_grad)
