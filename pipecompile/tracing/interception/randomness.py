"""Random numbers in a recording: operators that draw, and functions about the state that they draw from.

    torch.manual_seed(3)      ──►   manual_seed(3)              one node, which counts as writing the state
    h + torch.rand(4)               rand(4)                     a draw; stays in the stage of its seed

Draws without a seed in the model only keep their order, so that a pipeline draws what the plain loop draws.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from pipecompile.torch_private.modes import TorchDispatchMode, active_fake_mode

__all__ = ["RNG_FUNCTIONS", "RandomDrawCounter", "rng_function"]

RNG_FUNCTIONS = ("manual_seed", "seed", "get_rng_state", "set_rng_state")
"""Functions of torch, and of torch.random, that read or set the state of the default generator."""


class RandomDrawCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that draw random numbers, in `count`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))


@cache
def rng_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as the graph calls it: on fake tensors it leaves the state alone, and returns an empty state or None."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if active_fake_mode() is None:
            return function(*args, **kwargs)
        returns_state = function.__name__ == "get_rng_state"
        return torch.empty(torch.default_generator.get_state().numel(), dtype=torch.uint8) if returns_state else None

    return call
