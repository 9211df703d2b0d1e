"""The objects of a micro-batch are the same in all its forwards and recomputations, and are let go with its last backward."""

from __future__ import annotations

from typing import Any

from pipecompile.ir import Action, Kind
from pipecompile.runtime.cells.call_memos import CallMemos
from pipecompile.runtime.registers import Frame
from pipecompile.tracing.emit import call_objects


def test_objects_of_a_micro_batch_last_until_its_last_backward() -> None:
    memos, seen = CallMemos(frozenset({0, 2})), dict[tuple[int, int, Kind], Any]()

    def run(stage: int, microbatch: int, kind: Kind) -> None:
        def cell(_frame: Frame) -> None:
            seen[stage, microbatch, kind] = getattr(call_objects._present, "memos", None)

        memos.around(cell, Action(stage, kind, microbatch))(frame)

    frame = Frame([], [])
    for stage, microbatch in ((0, 0), (1, 0), (2, 0), (0, 1), (2, 1)):
        run(stage, microbatch, Kind.FORWARD)
    first = seen[0, 0, Kind.FORWARD]
    assert first is seen[2, 0, Kind.FORWARD]
    assert first is not seen[0, 1, Kind.FORWARD]
    assert seen[1, 0, Kind.FORWARD] is None
    run(2, 0, Kind.BACKWARD)
    run(0, 0, Kind.RECOMPUTE)
    assert first is seen[0, 0, Kind.RECOMPUTE]
    run(0, 0, Kind.INPUT_GRAD)
    assert first is seen[0, 0, Kind.INPUT_GRAD]
    assert [*frame.objects] == [1]
