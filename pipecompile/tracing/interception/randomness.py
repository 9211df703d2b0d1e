"""Random numbers in a recording: which calls draw, and calls that set the state that they draw from.

    torch.manual_seed(3)      ──►   manual_seed(3)              one node; it writes the state, and the draws around it
    h + torch.rand(4)               rand(4)                     stay in its stage

Draws without a seed only keep their order, so that a pipeline draws what the plain loop does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from pipecompile.torch_private.modes import TorchDispatchMode, active_fake_mode

__all__ = ["SETTERS", "Draws", "settable"]

SETTERS = ("manual_seed", "seed", "get_rng_state", "set_rng_state")
"""Functions of torch, and of torch.random, about the state of the default generator."""


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that draw random numbers."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))


@cache
def settable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A setter as it stands in the graph: where tensors are fake it gives a state without content, or nothing."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if active_fake_mode() is None:
            return function(*args, **kwargs)
        states = function.__name__ == "get_rng_state"
        return torch.empty(torch.default_generator.get_state().numel(), dtype=torch.uint8) if states else None

    return call
