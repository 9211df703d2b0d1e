"""Random draws of Python of the user's in forwards: of pieces kept whole and of hooks of layers, which draw in some calls alone.

    self.dropout.train(self.calls > 100)     no trial run has drawn, and no node of the graph shows it

So every forward of a stage with such Python is watched until it draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipecompile.runtime.registers import Frame, Run
from pipecompile.tracing.state.random_states import RandomSource, RandomStates

__all__ = ["ForwardDraws"]


class ForwardDraws:
    """The stages whose forward was seen to draw random numbers though no node of their graph does."""

    def __init__(self) -> None:
        self.stages: set[int] = set()

    def watched(self, run: Run, stage: int, sources: Sequence[RandomSource]) -> Run:
        """Return the function of a forward of a stage, which looks whether these sources and torch's are drawn from."""

        def function(frame: Frame) -> None:
            if stage in self.stages:
                run(frame)
                return
            torch_state, states = torch.get_rng_state(), RandomStates(sources)
            run(frame)
            if not torch.equal(torch.get_rng_state(), torch_state) or states.changed():
                self.stages.add(stage)

        return function
