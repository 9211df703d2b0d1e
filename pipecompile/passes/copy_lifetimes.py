"""Extend lifetimes until copies on other streams are over, if copies overlap with compute.

    before   0F0 -> v#0    SEND v#0 to 1   FREE v#0                0F1 ...           sent: the copy may last until
    after    0F0 -> v#0    SEND v#0 to 1              0F1 -> v#1   FREE v#0          the end of the next compute

    before   RECV v#0 from 0   1F0 v#0 -> @1#0   FREE v#0   ...   1B0 @1#0   FREE @1#0             received: autograd
    after    RECV v#0 from 0   1F0 v#0 -> @1#0              ...   1B0 @1#0   FREE @1#0   FREE v#0  may have saved it;
                                                                             a gradient is kept until after W

    before   0OFFLOAD0   FREE @0.o#0   0F1   0OFFLOAD1                 offloaded: the copy may last until the next OFFLOAD, which
    after    0OFFLOAD0                 0F1   0OFFLOAD1   FREE @0.o#0   waits for it anyway, or until the RELOAD of the same cell

The caching allocator returns memory to the stream of its allocation, and this stream waits for the last reader. For a
sent value, compute waits for the copy, which is over by then. For a received value, copies wait for the backward.
Linear.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipecompile.ir import HOST, Instruction, Kind, Op, Program, Route, Value

__all__ = ["let_linger"]


def let_linger(program: Program) -> Program:
    """Return the same instructions with the FREEs of values that cross between devices moved later."""
    routes = {route.value: route for route in program.routes}
    return replace(program, rows=tuple(tuple(_row(list(_until_stored(row)), routes)) for row in program.rows))


def _row(row: Sequence[Instruction], routes: dict[str, Route]) -> Iterator[Instruction]:
    sent = {i.reads[0].value for i in row if i.op is Op.SEND and i.peer != HOST}
    received = {i.writes[0].value for i in row if i.op is Op.RECV and i.peer != HOST}
    last = _last_frees(row)
    sent_frees: list[Instruction] = []
    delayed_frees: defaultdict[int, list[Instruction]] = defaultdict(list)
    for index, instruction in enumerate(row):
        value = instruction.reads[0].value if instruction.op is Op.FREE else None
        if value in sent:
            sent_frees.append(instruction)
        elif value in received and (until := _last_use(value, routes, last)) > index:
            delayed_frees[until].append(instruction)
        else:
            yield instruction
        yield from delayed_frees.pop(index, ())
        if instruction.action is not None and instruction.action.kind not in _COPIES and not instruction.overlaps:
            yield from sent_frees
            sent_frees.clear()
    yield from sent_frees


_COPIES = Kind.OFFLOAD, Kind.RELOAD


def _until_stored(row: Sequence[Instruction]) -> Iterator[Instruction]:
    """Yield a row with the FREE of what an OFFLOAD copies after the next OFFLOAD, or before the RELOAD of the cell."""
    waiting: Instruction | None = None
    stores = {
        one.reads[0].value: one.action for one in row if one.action is not None and one.action.kind is Kind.OFFLOAD
    }
    for instruction in row:
        action = instruction.action
        if instruction.op is Op.FREE and instruction.reads[0].value in stores:
            waiting, instruction = instruction, waiting  # noqa: PLW2901
        elif waiting is not None and action == replace(stores[waiting.reads[0].value], kind=Kind.RELOAD):
            yield waiting
            waiting = None
        if instruction is not None:
            yield instruction
    if waiting is not None:
        yield waiting


def _last_frees(row: Sequence[Instruction]) -> dict[tuple[int, int], int]:
    """Return, per (stage, micro-batch), the index of the last FREE of a value that the cell saved."""
    last = {}
    for index, instruction in enumerate(row):
        if instruction.op is Op.FREE and (value := instruction.reads[0].value).name[0] == "@":
            stage = value.name[1:].split(".")[0]
            if stage.isdigit():
                last[int(stage), value.microbatch] = index
    return last


def _last_use(value: Value | None, routes: dict[str, Route], last: dict[tuple[int, int], int]) -> int:
    """Return the index until which a received value may be part of what its readers save; -1 if they save nothing."""
    assert value is not None
    route = routes[value.name]
    stages = route.consumers if value.consumer is None else (route.source,)
    return max((last.get((stage, value.microbatch), -1) for stage in stages), default=-1)
