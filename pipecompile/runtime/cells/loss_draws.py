"""Random draws of a loss function. The function is not recorded, so no graph shows them.

checkpoint="always"         the loss runs again with its stage, on the random numbers of its forward
draws of other stages       draws follow the order of the schedule; a warning says so if the loss draws as well
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipecompile.runtime.cells.forward_backward import Function
from pipecompile.torch_private.device_functions import is_capturing
from pipecompile.tracing.interception.randomness import RandomDrawCounter
from pipecompile.tracing.state.function_state import generators_near
from pipecompile.tracing.state.random_states import RandomSource, RandomStates, random_sources

__all__ = ["LossDraws"]


class LossDraws:
    """The sources of random numbers of a loss function, and whether its first call drew from any; None before that call."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self.sources: tuple[RandomSource, ...] = tuple(random_sources(generators_near(loss_fn)))
        self.drew: bool | None = None

    def may_draw_on(self, device: torch.device) -> bool:
        """Return whether a call may draw: any, but those within a capture. A loss that has not drawn in its first call can be captured."""
        return self.drew is not False or not is_capturing(device)

    def watched(self, losses: Function) -> Function:
        """Return the function that computes losses, with its first call watched."""

        def function(*arguments: Any) -> Any:
            return losses(*arguments) if self.drew is not None else self._watched_call(losses, arguments)

        return function

    def _watched_call(self, losses: Function, arguments: tuple[Any, ...]) -> Any:
        before, counter = RandomStates(self.sources).of_python(), RandomDrawCounter()
        with counter:
            result = losses(*arguments)
        self.drew = counter.count > 0 or bool(before.changed())
        return result
