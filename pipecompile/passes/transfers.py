"""Insert the communication: SEND right after the compute that made a value, RECV right before its first reader.

    before   device 0   0F0 -> v0#0            device 1   1F0 v0#0 ->
    after    device 0   0F0 -> v0#0            device 1   RECV v0#0 from 0
                        SEND v0#0 to 1                    1F0 v0#0 ->

A value goes straight from where it is made to each device that needs it, once per device: two stages on one device
read the same copy, a stage on the producer's device reads the original. The host is a peer like any device. Linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipecompile.ir import HOST, Instruction, Op, Operand, Program, Route

__all__ = ["insert_transfers"]


def insert_transfers(program: Program) -> Program:
    """Every value that a device reads and does not make is received once; every receive from a device has its send."""
    ways = _ways(program.routes, program.placement)
    rows = tuple(tuple(_row(row, device, ways)) for device, row in enumerate(program.rows))
    return replace(program, rows=rows)


Way = tuple[int, tuple[int, ...]]
"""The device (or HOST) that makes a value, and the others that need it, in the order of the consumers."""


def _ways(routes: Sequence[Route], placement: Sequence[int]) -> dict[tuple[str, int | None], Way]:
    """The way of every activation (name, None) and of every gradient (name, consumer)."""
    device = {HOST: HOST, **dict(enumerate(placement))}
    ways: dict[tuple[str, int | None], Way] = {}
    for route in routes:
        source = device[route.source]
        ends = dict.fromkeys(device[consumer] for consumer in route.consumers)
        ways[route.value, None] = source, tuple(end for end in ends if end != source)
        for consumer in route.consumers if route.gradient else ():
            maker = device[consumer]
            ways[route.value, consumer] = maker, (source,) if source != maker else ()
    return ways


def _row(row: Sequence[Instruction], device: int, ways: dict[tuple[str, int | None], Way]) -> Iterator[Instruction]:
    received: set[Operand] = set()
    for instruction in row:
        for operand in instruction.reads:
            value = operand.value
            maker, _ = ways.get((value.name, value.consumer), (device, ()))
            if maker != device and operand not in received:
                received.add(operand)
                yield Instruction(Op.RECV, writes=(operand,), peer=maker)
        yield instruction
        for operand in instruction.writes:
            _, ends = ways.get((operand.value.name, operand.value.consumer), (device, ()))
            for end in ends:
                yield Instruction(Op.SEND, reads=(operand,), peer=end)
