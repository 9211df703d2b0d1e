"""Random draws of user code in forwards: pieces kept whole and hooks of layers, which may draw in some calls only.

    self.dropout.train(self.calls > 100)     no trial run has drawn, and no node of the graph shows the draw

So every forward of a stage with such code is watched until it draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipecompile.runtime.registers import Frame, Run
from pipecompile.tracing.state.random_states import RandomSource, RandomStates

__all__ = ["ForwardDraws"]


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
