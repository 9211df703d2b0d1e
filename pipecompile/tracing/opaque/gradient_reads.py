"""Reads of gradients of the model's parameters by pieces kept whole: their values depend on the steps and micro-batches before."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pipecompile.errors import TraceError
from pipecompile.tracing.user_source import caller, is_foreign

__all__ = ["GradientReads"]

_READ = getattr(torch.Tensor, "grad").__get__  # noqa: B009


class GradientReads(TorchFunctionMode):
    """Notes where the user's code reads `.grad` of a parameter of the model that requires one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = {id(weight) for weight in model.parameters()}
        self.line = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _READ and id(args[0]) in self.weights and args[0].requires_grad and not is_foreign(sys._getframe(1)):
            self.line = self.line or caller()
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """Raise TraceError if a gradient was read."""
        if self.line:
            raise TraceError(code="PC113", where=self.line)
