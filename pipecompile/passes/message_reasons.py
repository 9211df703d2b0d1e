"""Reasons of messages and frees: why the lowering puts each of them where it is. Dumps show them below the change of a pass.

    transfers   SEND after the computation of its value, RECV before its first reader
    meetings    RECV moved, to break a cycle of waits, or ahead of its reader
    liveness    FREE after the last use
    lingering   FREE moved, until a copy is over, or until what may hold a received value is freed

A reason is read off the programs before and after the pass; a cycle of waits is found again by the walk of `order_meetings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pipecompile.ir import HOST, Instruction, Op, Operand, Program, Value, place, saved, weight_saved
from pipecompile.passes.communication_order import broken_cycles

__all__ = ["free_reasons", "lingering_reasons", "meeting_reasons", "transfer_reasons"]


def transfer_reasons(_before: Program, after: Program) -> Iterator[str]:
    """Yield a line per SEND and RECV."""
    for device, row in enumerate(after.rows):
        for index, one in enumerate(row):
            if one.op is Op.SEND:
                yield _line(device, one, f"after {_computation(row[index::-1], one.reads[0])}, which computes it")
            elif one.op is Op.RECV:
                yield _line(device, one, f"before {_computation(row[index:], one.writes[0])}, its first reader")


def meeting_reasons(before: Program, after: Program, ahead: int = 0) -> Iterator[str]:
    """Yield a line per RECV that was moved. `ahead` is the number of receives that may be posted before their values are needed."""
    if ahead:
        yield from _posted_early(after, ahead)
        return
    for (value, source, target), (cycle, stuck) in broken_cycles(before).items():
        waits = " -> ".join(f"device {device} at {_bare(before.rows[device][index])}" for device, index in cycle)
        where = f"before {_bare(before.rows[target][stuck])}"
        yield f"device {target}, RECV {value} from {source}: {where}, else each waits for the next if sends wait: {waits}"


def free_reasons(_before: Program, after: Program) -> Iterator[str]:
    """Yield a line per FREE."""
    for device, row in enumerate(after.rows):
        last = before = None
        for one in row:
            if one.op is not Op.FREE:
                last, before = one, last
            elif last is not None:
                yield _line(device, one, f"after {_bare(last)}, {_role(one.reads[0], last, before)}")


def _role(operand: Operand, last: Instruction, before: Instruction | None) -> str:
    """Return what the last instruction before a FREE, or the one with which it overlaps, has to do with the value."""
    if operand in last.reads:
        return "its last use"
    if operand in last.writes or before is None or not before.overlaps:
        return "which writes it: nothing reads it"
    return f"which overlaps with {_bare(before)}, {_role(operand, before, None)}"


def lingering_reasons(before: Program, after: Program) -> Iterator[str]:
    """Yield a line per FREE that was moved."""
    for device, (old, row) in enumerate(zip(before.rows, after.rows, strict=True)):
        was, held, ends = {value: previous for value, previous, _ in _frees(old)}, _held(row), _ends(row)
        for value, previous, index in _frees(row):
            if previous is was[value]:
                continue
            freed = (row[i].reads[0].value for i in range(index, -1, -1) if row[i].op is Op.FREE)
            if value in held and (holder := next((other for other in freed if other in held[value]), None)):
                reason = f"after FREE {holder}, which may hold it where autograd saved it"
            else:
                reason = (
                    f"after {_bare(previous)}: until then its copy to {' and '.join(ends.get(value, ['host']))} may run"
                )
            yield _line(device, row[index], reason)


def _posted_early(after: Program, ahead: int) -> Iterator[str]:
    """Yield a line per RECV that stands before other work than its reader."""
    for device, row in enumerate(after.rows):
        for index, one in enumerate(row):
            if one.op is not Op.RECV or one.peer == HOST:
                continue
            later = range(index + 1, len(row))
            following = next((row[i] for i in later if row[i].op is not Op.RECV), one)
            if one.writes[0] not in following.reads:
                reader = next(row[i] for i in later if one.writes[0] in row[i].reads)
                room = f"up to {ahead} received value{'s' * (ahead > 1)} may be unread beside it"
                yield _line(device, one, f"before {_bare(following)}, ahead of its reader {_bare(reader)}: {room}")


def _frees(row: Sequence[Instruction]) -> Iterator[tuple[Value, Instruction, int]]:
    """Yield the value of each FREE, the last instruction before it that is not a FREE, and its index."""
    previous = row[0] if row else None
    for index, one in enumerate(row):
        if one.op is Op.FREE and previous is not None:
            yield one.reads[0].value, previous, index
        else:
            previous = one


def _held(row: Sequence[Instruction]) -> dict[Value, set[Value]]:
    """Return, per value that a device receives from another, what its readers have saved."""
    held: dict[Value, set[Value]] = {i.writes[0].value: set() for i in row if i.op is Op.RECV and i.peer != HOST}
    for action, reads in ((one.action, one.reads) for one in row):
        for operand in reads if action is not None else ():
            if action is not None and operand.value in held:
                held[operand.value] |= {make(action.stage, action.microbatch) for make in (saved, weight_saved)}
    return held


def _ends(row: Sequence[Instruction]) -> dict[Value, list[str]]:
    """Return, per value that a device sends, where to."""
    ends: dict[Value, list[str]] = {}
    for one in row:
        if one.op is Op.SEND:
            ends.setdefault(one.reads[0].value, []).append(place(one.peer))
    return ends


def _computation(row: Iterable[Instruction], operand: Operand) -> str:
    """Return the first action of these instructions that reads or writes an operand."""
    actions = (str(one.action) for one in row if one.action is not None and operand in (*one.reads, *one.writes))
    return next(actions, "its computation")


def _bare(one: Instruction) -> str:
    """Return an instruction without operands: an action, or a message."""
    return str(one if one.action is None else one.action)


def _line(device: int, one: Instruction, reason: str) -> str:
    return f"device {device}, {one}: {reason}"
