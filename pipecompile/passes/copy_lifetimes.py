"""Let values live until copies on other streams are over, where copies overlap with compute.

    before   0F0 -> v#0    SEND v#0 to 1   FREE v#0                0F1 ...           sent: the copy has until
    after    0F0 -> v#0    SEND v#0 to 1              0F1 -> v#1   FREE v#0          the end of the next compute

    before   RECV v#0 from 0   1F0 v#0 -> @1#0   FREE v#0   ...   1B0 @1#0   FREE @1#0             received: autograd
    after    RECV v#0 from 0   1F0 v#0 -> @1#0              ...   1B0 @1#0   FREE @1#0   FREE v#0  may have saved it;
                                                                                 a gradient, too, until after W

Memory goes back to the stream that it was taken from, and that stream waits for the last reader: for a sent value the compute
waits for the copy, which is over by then; for a received one the copies wait for the backward. Linear.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipecompile.ir import HOST, Instruction, Op, Program, Route, Value

__all__ = ["let_linger"]


def let_linger(program: Program) -> Program:
    """The same instructions; FREEs of what crosses between devices come later."""
    ways = {route.value: route for route in program.routes}
    return replace(program, rows=tuple(tuple(_row(row, ways)) for row in program.rows))


def _row(row: Sequence[Instruction], ways: dict[str, Route]) -> Iterator[Instruction]:
    sent = {i.reads[0].value for i in row if i.op is Op.SEND and i.peer != HOST}
    received = {i.writes[0].value for i in row if i.op is Op.RECV and i.peer != HOST}
    last = _last_frees(row)
    leaving: list[Instruction] = []
    held: defaultdict[int, list[Instruction]] = defaultdict(list)
    for index, instruction in enumerate(row):
        value = instruction.reads[0].value if instruction.op is Op.FREE else None
        if value in sent:
            leaving.append(instruction)
        elif value in received and (until := _kept(value, ways, last)) > index:
            held[until].append(instruction)
        else:
            yield instruction
        yield from held.pop(index, ())
        if instruction.op is Op.COMPUTE:
            yield from leaving
            leaving.clear()
    yield from leaving


def _last_frees(row: Sequence[Instruction]) -> dict[tuple[int, int], int]:
    """Per cell, where the last of what it saved is freed."""
    found = {}
    for index, instruction in enumerate(row):
        if instruction.op is Op.FREE and (value := instruction.reads[0].value).name[0] == "@":
            stage = value.name[1:].split(".")[0]
            if stage.isdigit():
                found[int(stage), value.microbatch] = index
    return found


def _kept(value: Value | None, ways: dict[str, Route], last: dict[tuple[int, int], int]) -> int:
    """Until where what was received may be part of what its readers keep."""
    assert value is not None
    way = ways[value.name]
    stages = way.consumers if value.consumer is None else (way.source,)
    return max((last.get((stage, value.microbatch), -1) for stage in stages), default=-1)
