"""Periods of programs by arrays: whether each row is in order in all repetitions, and how far apart messages are sent and received.

    RECV v0#7 from 0 │ 1F7 │ FREE v0#6        repetition j frees v0#(6 + j): v0#7 is freed one period after it is read

An item of a row is as many periods later for another micro-batch as the step goes into the difference.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir import Op
from pipecompile.ir.instruction_rows import InstructionTable
from pipecompile.ir.periodic_program import PeriodicProgram
from pipecompile.ir.program_arrays import OPS, ProgramArrays, Templates, listed

__all__ = ["are_ordered", "distance", "period_arrays"]

Ints = NDArray[np.int64]


def period_arrays(program: PeriodicProgram) -> ProgramArrays:
    """Return the period of each row."""
    table = InstructionTable()
    rows = [(row.numbers, row.microbatches) for row in map(table.row, program.period)]
    counts = program.n_stages, program.n_microbatches, program.placement
    return ProgramArrays(*counts, program.routes, table, rows)


def are_ordered(period: ProgramArrays, step: int) -> bool:
    """Return whether each row reads and frees what it has written in this repetition or before, and reads nothing after its FREE."""
    operands = (operand for one in period.table.templates for operand in (*one.reads, *one.writes))
    if any(operand.value.microbatch for operand in operands):
        return False
    templates = Templates(period.table.templates)
    return all(_is_ordered(*row, templates, step) for row in period.rows)


def _is_ordered(numbers: Ints, microbatches: Ints, templates: Templates, step: int) -> bool:
    (reads, read), (writes, written) = (listed(side, numbers) for side in (templates.reads, templates.writes))
    read, written = _values(read, microbatches[reads], step), _values(written, microbatches[writes], step)
    is_free = templates.op[numbers[reads]] == OPS[Op.FREE]
    values, first = np.unique(written, return_index=True)
    freed, last = np.unique(read[is_free], return_index=True)
    if not (len(values) == len(written) == is_free.sum() and np.array_equal(values, freed)):
        return False
    if not np.isin(read, values).all():
        return False
    of = np.searchsorted(values, read)
    born, dies = writes[first][of], reads[is_free][last][of]
    is_born = reads + len(numbers) * ((microbatches[born] - microbatches[reads]) // step) > born
    is_alive = dies + len(numbers) * ((microbatches[reads] - microbatches[dies]) // step) > reads
    return bool(is_born.all() and is_alive[~is_free].all())


def _values(classes: Ints, microbatches: Ints, step: int) -> Ints:
    """Return one number per value of a micro-batch of a step."""
    values: Ints = classes * step + microbatches % step
    return values


def distance(period: ProgramArrays, step: int) -> int | None:
    """Return the most repetitions between a send and its receive; None if a period receives other messages, or in another order."""
    templates, n = Templates(period.table.templates), len(period.rows)
    numbers, microbatches, here = period.numbers, period.microbatches, period.devices
    op, peer, classes = templates.op[numbers], templates.peer[numbers], templates.message_class[numbers]
    lengths = np.bincount(here, minlength=n)
    place = np.arange(len(here)) - (np.cumsum(lengths) - lengths)[here]
    if (peer >= n).any():
        return None
    ways = {Op.SEND: here * n + peer, Op.RECV: peer * n + here}
    sends, receives = (
        np.stack([links, _values(classes, microbatches, step), microbatches, place])[
            :, (op == OPS[of]) & (classes >= 0) & (peer >= 0)
        ]
        for of, links in ways.items()
    )
    sends, receives = (each[:, np.lexsort(each[1::-1])] for each in (sends, receives))
    if not np.array_equal(sends[:2], receives[:2]) or (np.diff(sends[:2]) == 0).all(axis=0).any():
        return None
    each = lengths[sends[0] % n]
    places = receives[3] + each * ((sends[2] - receives[2]) // step)
    order = np.lexsort((sends[3], sends[0]))
    if not _is_ascending(sends[0][order], places[order], each[order]):
        return None
    return int(abs(sends[2] - receives[2]).max(initial=0)) // step


def _is_ascending(links: Ints, places: Ints, lengths: Ints) -> bool:
    """Return whether the places of each link ascend, also from one period of that length to the next. `links` are sorted."""
    first = places[np.searchsorted(links, links)]
    is_next = (np.diff(places) > 0) | (np.diff(links) > 0)
    return bool(is_next.all() and (places < first + lengths).all())
