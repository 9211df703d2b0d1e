"""Objects that a forward makes for its hooks, per micro-batch: all stages of a micro-batch, and its recomputations, find the same.

1F0  hook on k: seen 0     0F1, 1F1  hooks of micro-batch 1: seen 1     1B0  seen 0 gets a gradient     0B0  reads it
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir import Action, Kind
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell
from pipecompile.runtime.registers import Frame, Run
from pipecompile.tracing.emit.call_objects import with_objects

__all__ = ["CallMemos"]

_LAST = (Kind.BACKWARD, Kind.INPUT_GRAD)


class CallMemos:
    """Keeps the objects of the micro-batches in `Frame.objects`, from the first forward of a stage that has such objects to the last
    backward of one. A W makes no objects.
    """

    def __init__(self, stages: frozenset[int]) -> None:
        self._stages = stages

    @classmethod
    def of(cls, cells: Sequence[Cell | VariantCell]) -> CallMemos:
        """Return what keeps the objects of the stages of these cells."""
        return cls(frozenset(stage for stage, cell in enumerate(cells) if any(one.remakes for one in cell.all_effects)))

    def around(self, run: Run, action: Action) -> Run:
        """Return the function of an action, in which functions are made anew for its micro-batch."""
        if action.stage not in self._stages or action.kind is Kind.WEIGHT_GRAD:
            return run
        microbatch, is_last = action.microbatch, action.kind in _LAST

        def remaking(frame: Frame) -> None:
            memos, ended = frame.objects.setdefault(microbatch, ({}, []))
            with with_objects(memos):
                run(frame)
            if is_last:
                ended.append(action.stage)
                if len(ended) == len(self._stages):
                    frame.objects.pop(microbatch, None)

        return remaking
