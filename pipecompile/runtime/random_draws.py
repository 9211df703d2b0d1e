"""Random draws of forwards, and the order in which the stages of a program draw, compared with that of the plain loop.

loop         0F0 1F0 1B0 0B0 0F1 1F1       micro-batch by micro-batch, the backward after the forward
schedule     0F0 1F0 0F1 1B0 1F1 0B0       the same numbers if only forwards draw and each stage has a device
copies       0F0 0F2 0F1 0F3               other numbers, even if only one stage draws

User code may draw although no trial run has, and no node of the graph shows the draw: `self.dropout.train(self.calls > 100)`. So every
forward of a stage with pieces kept whole or hooks of layers is watched until it draws. `backward_draws` watches backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from pipecompile.ir import UNTRAINED, Action, Kind
from pipecompile.runtime.registers import Frame, Run
from pipecompile.tracing.state.random_states import RandomSource, RandomStates

__all__ = ["Draws", "ForwardDraws"]

_A_DEVICE_EACH = "a device for each stage, as devices=['cpu'] * n_stages, with schedule='1f1b'"


@dataclass(frozen=True, slots=True)
class Draws:
    """The stages whose forward, loss included, and whose backward draw random numbers."""

    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()

    def is_that_of_the_loop(self, actions: Iterable[Action]) -> bool:
        """Return whether these actions, in the order in which they run, draw in the order of the plain loop."""
        order = []
        for one in actions:
            if one.kind is Kind.FORWARD and one.stage in self.forward:
                order.append((one.microbatch, 0, one.stage))
            elif one.kind not in UNTRAINED and one.kind is not Kind.RECOMPUTE and one.stage in self.backward:
                order.append((one.microbatch, 1, -one.stage))
        return order == sorted(order)

    def warning(self, *, threaded: bool, in_order: bool = False) -> str:
        """Return a warning that these stages draw in another order than the plain loop. `in_order`: one thread draws in that order."""
        numbers = sorted({*self.forward, *self.backward})
        has_more = len(numbers) > 1
        stages = f"stage{'s' * has_more} {', '.join(map(str, numbers))}"
        where, verb = f"the backward of {stages}" if self.backward else stages, "run" if has_more else "runs"
        why = f"threads of {'their' if has_more else 'its'} own" if threaded else "the order of the schedule"
        orders = ["dispatch='inline'"] * threaded + [_A_DEVICE_EACH] * (not in_order)
        cure = "n_microbatches=1" if self.backward else ", with ".join(orders)
        return (
            f"random numbers are drawn in {where}, which {verb} in {why}: a step draws others than the"
            f" plain loop over its micro-batches. Try {cure}, if the same numbers matter"
        )


class ForwardDraws:
    """The stages whose forward has drawn random numbers although no node of their graph does."""

    def __init__(self) -> None:
        self.stages: set[int] = set()

    def watched(self, run: Run, stage: int, sources: Sequence[RandomSource]) -> Run:
        """Wrap the forward of a stage, to note whether it draws from these sources or torch's generator."""

        def function(frame: Frame) -> None:
            if stage in self.stages:
                run(frame)
                return
            torch_state, states = torch.get_rng_state(), RandomStates(sources)
            run(frame)
            if not torch.equal(torch.get_rng_state(), torch_state) or states.changed():
                self.stages.add(stage)

        return function
