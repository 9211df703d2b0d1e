"""Verifier of programs, by levels of the lowering.

    COMPUTE     the actions are a legal schedule, and each reads and writes what the routes prescribe
    TRANSFERS   every RECV has one SEND and every SEND one RECV; no device waits forever; no value is read too early
    MEETINGS    no device waits forever if sends wait for their receives, and messages are received in sending order
    TIES        copies of tied parameters are refreshed once, and their gradients are reduced once
    LIVENESS    every value is freed once and not read after
    SLOTS       every operand has a slot, and a slot is written only when it is free

Each pass of the lowering adds one level to those before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from pipecompile.ir import HOST, Instruction, Op, Program, Schedule
from pipecompile.ir.slices import in_slices
from pipecompile.verifiers.lifetimes import lifetime_faults
from pipecompile.verifiers.message_models import ALL_MODELS, MessageModel
from pipecompile.verifiers.operands import operand_faults
from pipecompile.verifiers.pairing import pairing_faults
from pipecompile.verifiers.routes import route_faults
from pipecompile.verifiers.schedule import schedule_faults, shape_faults
from pipecompile.verifiers.tied_parameters import exchange_faults, tie_faults

__all__ = ["Level", "instruction_faults", "program_faults"]


class Level(IntEnum):
    """The level of the lowering that a program has reached."""

    COMPUTE = 0
    TRANSFERS = 1
    MEETINGS = 2
    TIES = 3
    LIVENESS = 4
    SLOTS = 5


def program_faults(program: Program, level: Level, models: frozenset[MessageModel] = ALL_MODELS) -> list[str]:
    """Return all faults of `program` at `level` and below; from MEETINGS on under all of `models`."""
    malformed = [*_slice_faults(program)]
    if malformed := [*malformed]:
        return malformed
    schedule = _schedule_of(program)
    malformed = [*route_faults(program.routes, program.n_stages), *tie_faults(program.ties, program.n_stages)]
    if malformed := [*malformed, *_form_faults(program), *shape_faults(schedule)]:
        return malformed
    faults = [*schedule_faults(schedule, program.routes), *operand_faults(program)]
    if level >= Level.TRANSFERS:
        faults += pairing_faults(program, models if level >= Level.MEETINGS else frozenset({MessageModel.BUFFERED}))
        faults += lifetime_faults(program, frees=level >= Level.LIVENESS, slots=level >= Level.SLOTS)
    if level >= Level.TIES:
        faults += exchange_faults(program)
    return faults


def _schedule_of(program: Program) -> Schedule:
    n_slices = program.n_slices
    rows = tuple(tuple(in_slices(i.action, n_slices) for i in row if i.action is not None) for row in program.rows)
    pairs = frozenset((in_slices(one, n_slices), in_slices(two, n_slices)) for one, two in program.overlaps)
    counts = program.n_stages, program.n_microbatches // max(n_slices, 1), program.placement
    return Schedule(*counts, rows, overlaps=pairs, n_slices=n_slices, directions=program.directions)


def _slice_faults(program: Program) -> Iterator[str]:
    if program.n_slices < 1 or program.n_microbatches % program.n_slices:
        yield f"{program.n_microbatches} slices are not whole micro-batches of {program.n_slices} slices"


_FORM = {Op.SEND: (1, 0), Op.RECV: (0, 1), Op.FREE: (1, 0), Op.BROADCAST: (0, 0), Op.REDUCE: (0, 0)}
"""The numbers of operands that an instruction reads and writes."""


def _form_faults(program: Program) -> Iterator[str]:
    for device, row in enumerate(program.rows):
        for index, instruction in enumerate(row):
            for fault in instruction_faults(instruction, device, program.n_devices):
                yield f"device {device}, step {index}: {instruction}: {fault}"
            if instruction.overlaps and not (instruction.action and index + 1 < len(row) and row[index + 1].action):
                yield f"device {device}, step {index}: {instruction}: an action overlaps with that of the next instruction"


def instruction_faults(instruction: Instruction, device: int, n_devices: int) -> Iterator[str]:
    """Yield what is wrong with an instruction of a device by itself: parts that its kind does not have, or lacks."""
    if (instruction.op is Op.COMPUTE) != (instruction.action is not None):
        yield "a compute instruction has an action, and no other has"
    counts = len(instruction.reads), len(instruction.writes)
    expected = _FORM.get(instruction.op, counts)
    if expected != counts:
        yield f"{instruction.op.value} reads {counts[0]} and writes {counts[1]} operands, expected {expected[0]} and {expected[1]}"
    if (instruction.op in (Op.BROADCAST, Op.REDUCE)) != (instruction.tie is not None):
        yield "BROADCAST and REDUCE name a tie, and no other does"
    talks = instruction.op in (Op.SEND, Op.RECV)
    if talks != (instruction.peer is not None):
        yield "SEND and RECV have a peer, and no other has"
    elif talks and (instruction.peer == device or instruction.peer not in range(HOST, n_devices)):
        yield "the peer must be another device, or the host"
