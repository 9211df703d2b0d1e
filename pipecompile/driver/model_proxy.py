"""A module that acts as another: same parameters under the same names, same state_dict, same modes.

The model stays the owner of everything. It is not registered as a submodule, so no key gets a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn

from pipecompile.errors import InputError
from pipecompile.torch_private.device_functions import requested_device
from pipecompile.torch_private.modules import apply_to_tensors

__all__ = ["ModelProxy"]


class ModelProxy(nn.Module):
    """Forwards all that nn.Module does with parameters, buffers and modes to `model`."""

    model: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)
        self.training = model.training

    def _forget(self) -> None:
        """Drop what depends on the model's tensors, after they were replaced or changed their dtype."""

    def _place_names(self) -> str:
        """Return where the stages are, for the message that refuses to move them."""
        return ""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        result = self.model.load_state_dict(state_dict, strict=strict, assign=assign)
        if assign:
            self._forget()
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
        """Change the dtype. Raises InputError for a device, since the plan places the stages."""
        if requested_device(*args, **kwargs) is not None:
            self._refuse()
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> Self:  # noqa: ARG002 as nn.Module has it
        """Raise InputError: the plan places the stages."""
        return self._refuse()

    def cpu(self) -> Self:
        """Raise InputError: the plan places the stages."""
        return self._refuse()

    def _refuse(self) -> Self:
        raise InputError(
            "a pipeline cannot be moved to a device", where=self._place_names(), hint="compile again with devices="
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        apply_to_tensors(self.model, fn, recurse)
        self._forget()
        return self
