"""The settings of an optimizer as the ranks of a pipeline compare them: what it was made with, and how its learning rates have moved.

AdamW([{"params": head, "lr": 1e-2}, {"params": body}], lr=1e-3), after a scheduler     "AdamW(lr=0.001, ...), lr x 0.5"

Learning rates of single groups may differ between ranks, for a rank has the layers of its own stages; they move alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["OptimizerSettings"]

_NO_RESULT = {"foreach", "fused", "capturable", "differentiable"}
"""Settings that change no result, or its roundings alone."""


class OptimizerSettings:
    """The settings of one optimizer, and the learning rates that its groups had first."""

    def __init__(self, optimizer: Optimizer) -> None:
        given = {name: _plain(value) for name, value in optimizer.defaults.items() if name not in _NO_RESULT}
        plain = [f"{name}={value}" for name, value in given.items() if value is not None]
        self._name = f"{type(optimizer).__name__}({', '.join(plain)})"
        self._first: dict[int, float] = {}

    def of_step(self, optimizer: Optimizer) -> set[str]:
        """Return the settings of a step, in words: one text for each factor of learning rates."""
        return {self._text(place, group) for place, group in enumerate(optimizer.param_groups) if group["params"]}

    def _text(self, place: int, group: dict[str, Any]) -> str:
        rate, begun = _plain(group.get("lr")), _plain(group.get("initial_lr"))
        if not isinstance(rate, (int, float)):
            return self._name
        first = begun or self._first.get(place) or rate
        self._first[place] = first
        return self._name + (f", lr x {rate / first:.3g}" if first else ", lr x 0")


def _plain(value: Any) -> Any:
    """Return a number, or a tuple of them, of a setting; None for one that is not compared."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    return value if isinstance(value, (bool, int, float, str, tuple)) else None
