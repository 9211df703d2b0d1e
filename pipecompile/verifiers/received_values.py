"""Verifier of received values where copies run beside compute: a value stays until its readers have freed what they saved.

    RECV v#0   1F0 v#0 -> @1#0   FREE v#0         fault: autograd may have saved v#0 in @1#0, and the next copy overwrites it
    RECV v#0   1F0 v#0 -> @1#0   1B0 @1#0   FREE @1#0   FREE v#0        no fault

In one memory, and where a copy is a step of the row, Python keeps what autograd has saved: there the rule is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipecompile.ir import HOST, Instruction, Op, Program, Value, saved, weight_saved

__all__ = ["received_faults"]


def received_faults(program: Program) -> Iterator[str]:
    """Yield every FREE of a received value that comes before a FREE of what a reader of the value has saved. Linear."""
    for device, row in enumerate(program.rows):
        for value, index, late in _early_frees(row):
            yield (
                f"device {device}, step {index}, FREE {value}: copies run beside compute here, and "
                f"{row[late].reads[0].value}, freed at step {late}, may hold {value}"
            )


def _early_frees(row: Sequence[Instruction]) -> Iterator[tuple[Value, int, int]]:
    """Yield a received value, the step of its FREE, and the step of the last FREE that has to come before."""
    frees = {one.reads[0].value: index for index, one in enumerate(row) if one.op is Op.FREE}
    received = {one.writes[0].value for one in row if one.op is Op.RECV and one.peer != HOST}
    last: dict[Value, int] = {}
    for action, reads in ((one.action, one.reads) for one in row):
        if action is None:
            continue
        cell = action.stage, action.microbatch
        until = max(frees.get(saved(*cell), -1), frees.get(weight_saved(*cell), -1))
        for value in received.intersection(operand.value for operand in reads):
            last[value] = max(until, last.get(value, -1))
    for value, late in last.items():
        if frees.get(value, late) < late:
            yield value, frees[value], late
