"""Insert the communication: SEND directly after the computation of a value, RECV directly before its first reader.

    before   device 0   0F0 -> v0#0            device 1   1F0 v0#0 ->
    after    device 0   0F0 -> v0#0            device 1   RECV v0#0 from 0
                        SEND v0#0 to 1                    1F0 v0#0 ->

A value is sent directly from its source to each device that needs it, once per device. Two stages on one device read
the same copy; a stage on the source's device reads the original. The host is a peer like any device. What two actions that overlap
read is received before both, and what they compute is sent after both. Linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pipecompile.ir import HOST, Instruction, Op, Operand, Program, Route, Value
from pipecompile.ir.directions import all_placements, placement_of
from pipecompile.passes.overlapping import grouped_by_overlap

__all__ = ["insert_transfers", "paths"]


def insert_transfers(program: Program) -> Program:
    """Return the program in which each device receives, once, every value that it reads and does not compute."""
    of_placements = {placement: paths(program.routes, placement) for placement in all_placements(program)}
    own, moved = of_placements[program.placement], placement_of(program)

    def path(value: Value, device: int) -> Path:
        ways = of_placements[moved[value.microbatch]] if value.microbatch in moved else own
        return ways.get((value.name, value.consumer), (device, ()))

    rows = tuple(tuple(_row(row, device, path)) for device, row in enumerate(program.rows))
    return replace(program, rows=rows)


Path = tuple[int, tuple[int, ...]]
"""The device (or HOST) that computes a value, and the other devices that need it, in the order of the consumers."""


def paths(routes: Sequence[Route], placement: Sequence[int]) -> dict[tuple[str, int | None], Path]:
    """Return the path of every activation (name, None) and of every gradient (name, consumer)."""
    device = {HOST: HOST, **dict(enumerate(placement))}
    ways: dict[tuple[str, int | None], Path] = {}
    for route in routes:
        source = device[route.source]
        ends = dict.fromkeys(device[consumer] for consumer in route.consumers)
        ways[route.value, None] = source, tuple(end for end in ends if end != source)
        for consumer in route.senders:
            producer = device[consumer]
            ways[route.value, consumer] = producer, (source,) if source != producer else ()
    return ways


def _row(row: Sequence[Instruction], device: int, path: Callable[[Value, int], Path]) -> Iterator[Instruction]:
    """Yield a row with its messages. `path` returns the way of a value; of what moves nowhere, the device alone."""
    received: set[Operand] = set()
    for together in grouped_by_overlap(row):
        for operand in (operand for instruction in together for operand in instruction.reads):
            producer, _ = path(operand.value, device)
            if producer != device and operand not in received:
                received.add(operand)
                yield Instruction(Op.RECV, writes=(operand,), peer=producer)
        yield from together
        for operand in (operand for instruction in together for operand in instruction.writes):
            _, ends = path(operand.value, device)
            for end in ends:
                yield Instruction(Op.SEND, reads=(operand,), peer=end)
