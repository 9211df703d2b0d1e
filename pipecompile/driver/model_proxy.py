"""A module that stands in for another: same parameters under the same names, same state_dict, same modes.

The model stays the owner of everything. It is not registered as a submodule, so no key gets a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn

from pipecompile.errors import InputError
from pipecompile.torch_private.devices import requested_device
from pipecompile.torch_private.modules import apply_to_tensors

__all__ = ["StandIn"]


class StandIn(nn.Module):
    """Everything that nn.Module does with parameters, buffers and modes goes to `model`."""

    model: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)
        self.training = model.training

    def forget(self) -> None:
        """Called when tensors of the model were replaced or changed their dtype."""

    def place_names(self) -> str:
        """Where the model's parts are, for the message that refuses to move them."""
        return ""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        result = self.model.load_state_dict(state_dict, strict=strict, assign=assign)
        if assign:
            self.forget()
        return result

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield from self.model.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.model.named_children()

    def train(self, mode: bool = True) -> Self:
        self.model.train(mode)
        self.training = mode
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        self.model.apply(fn)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the dtype. A device is refused: the stages are placed by the plan. Raises InputError."""
        if requested_device(*args, **kwargs) is not None:
            self._refuse()
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> Self:  # noqa: ARG002 as nn.Module has it
        """Refused, like any move to a device. Raises InputError."""
        return self._refuse()

    def cpu(self) -> Self:
        """Refused, like any move to a device. Raises InputError."""
        return self._refuse()

    def _refuse(self) -> Self:
        raise InputError(
            "a pipeline cannot be moved to a device", where=self.place_names(), hint="compile again with devices="
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        apply_to_tensors(self.model, fn, recurse)
        self.forget()
        return self
