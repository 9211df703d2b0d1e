"""Verifier of unrolled programs by arrays: it tells whether a program is legal at LIVENESS, in a few operations per row, not per item.

The conditions are those of `program_faults`, for programs without sharded parameters, ties, slices, directions and overlaps. A program
that is not legal, or has something else, is left to `program_faults`, which names the faults.

An action reads the results of others as values, directly or through sums of gradients. So the actions are in a legal order if every action
reads and writes the values that the routes prescribe, every value is written before it is read, and all messages arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir import HOST, SHARDING, Instruction, Kind, Op, Program
from pipecompile.ir.instruction_rows import first_microbatch, later_instruction
from pipecompile.ir.program_arrays import KINDS, OPS, ProgramArrays, Templates, listed
from pipecompile.verifiers.array_waits import Meetings
from pipecompile.verifiers.operands import operand_faults
from pipecompile.verifiers.program import instruction_faults
from pipecompile.verifiers.routes import route_faults

__all__ = ["is_legal"]

Ints = NDArray[np.int64]

_KINDS = tuple(kind for kind in Kind if kind not in SHARDING)

_VARIANTS = 16
"""Kinds that the cells of a stage may have: B or I and W, with R, with OFFLOAD and RELOAD."""


def is_legal(arrays: ProgramArrays) -> bool:
    """Return True if a program is legal at LIVENESS in all models of communication; False if it is not, or has what is not looked at."""
    if not _has_form(arrays):
        return False
    templates = Templates(arrays.table.templates)
    return (
        _has_right_actions(arrays, templates)
        and _has_right_messages(arrays, templates)
        and all(_lives_are_right(*row, templates, arrays.n_microbatches) for row in arrays.rows)
        and Meetings.of(arrays, templates).end()
    )


def _has_form(arrays: ProgramArrays) -> bool:
    """Return whether counts, placement, routes and each instruction by itself are right, and of the kinds that are looked at."""
    n_stages, n_devices = arrays.n_stages, len(arrays.rows)
    if n_stages < 1 or arrays.n_microbatches < 1 or len(arrays.placement) != n_stages:
        return False
    if not all(0 <= device < n_devices for device in arrays.placement) or route_faults(arrays.routes, n_stages):
        return False
    microbatches = arrays.microbatches
    if not len(microbatches) or microbatches.min() < 0 or microbatches.max() >= arrays.n_microbatches:
        return False
    for device, (numbers, _) in enumerate(arrays.rows):
        for one in (arrays.table.templates[number] for number in np.unique(numbers).tolist()):
            if not _is_plain(one, n_stages) or any(instruction_faults(one, device, n_devices)):
                return False
    return True


def _is_plain(one: Instruction, n_stages: int) -> bool:
    """Return whether an instruction is of one micro-batch, and of a kind that is looked at."""
    action = one.action
    if one.overlaps or one.tie is not None or one.op in (Op.BROADCAST, Op.REDUCE):
        return False
    if action is not None and (action.kind not in _KINDS or not 0 <= action.stage < n_stages):
        return False
    return all(operand.value.microbatch == first_microbatch(one) for operand in (*one.reads, *one.writes))


def _has_right_actions(arrays: ProgramArrays, templates: Templates) -> bool:
    """Return whether each cell has the right actions, each once and on its device, with the operands that the routes prescribe."""
    numbers, microbatches, m = arrays.numbers, arrays.microbatches, arrays.n_microbatches
    is_action = templates.kind[numbers] >= 0
    numbers, microbatches, devices = numbers[is_action], microbatches[is_action], arrays.devices[is_action]
    stages, kinds = templates.stage[numbers], templates.kind[numbers]
    if (np.array(arrays.placement)[stages] != devices).any():
        return False
    cells, n_cells = stages * m + microbatches, arrays.n_stages * m
    f, b, i, w, r, out, back = (np.bincount(cells[kinds == KINDS[kind]], minlength=n_cells) for kind in _KINDS)
    is_trained = bool((kinds != KINDS[Kind.FORWARD]).any())
    is_right = (f == 1) & (b + i == is_trained) & (i == w) & (r + out <= b + i) & (out == back)
    pairs = np.unique(numbers * _VARIANTS + (b + 2 * i + 4 * r + 8 * out)[cells])
    return bool(is_right.all()) and not operand_faults(_one_of_each(arrays, pairs.tolist()))


def _one_of_each(arrays: ProgramArrays, pairs: Sequence[int]) -> Program:
    """Return a program with each template once for each variant of its cell: variant v is micro-batch v."""
    row = tuple(later_instruction(arrays.table.templates[pair // _VARIANTS], pair % _VARIANTS) for pair in pairs)
    return Program(arrays.n_stages, _VARIANTS, arrays.placement, arrays.routes, (row,))


def _has_right_messages(arrays: ProgramArrays, templates: Templates) -> bool:
    """Return whether each message has one SEND and one RECV, and messages between two devices are received in sending order."""
    numbers, m, n = arrays.numbers, arrays.n_microbatches, len(arrays.rows)
    at = np.flatnonzero(templates.message_class[numbers] >= 0)
    own, here = numbers[at], arrays.devices[at]
    is_send, peers = templates.op[own] == OPS[Op.SEND], templates.peer[own]
    values = templates.message_class[own] * m + arrays.microbatches[at]
    of_host = peers == HOST
    sends, receives = ~of_host & is_send, ~of_host & ~is_send
    sent = _in_order(here[sends] * n + peers[sends], values[sends])
    received = _in_order(peers[receives] * n + here[receives], values[receives])
    given = {templates.classes[name] for name in _from_host(arrays) if name in templates.classes}
    from_host, to_host = of_host & ~is_send, of_host & is_send
    return (
        np.array_equal(sent, received)
        and _are_distinct(sent[1] * n * n + sent[0])
        and set(np.unique(values[from_host] // m).tolist()) <= given
        and _are_distinct(values[from_host] * n + here[from_host])
        and _is_all_of_host(arrays, templates, values[to_host] * n + here[to_host])
    )


def _in_order(links: Ints, values: Ints) -> Ints:
    """Return (link, value) of messages, shape (2, messages), link by link, and in each in the order of the row."""
    order = np.argsort(links, kind="stable")
    return np.stack([links[order], values[order]])


def _are_distinct(values: Ints) -> bool:
    return len(np.unique(values)) == len(values)


def _from_host(arrays: ProgramArrays) -> Iterator[tuple[str, int | None]]:
    """Yield what the host sends: inputs of the model, and gradients of outputs."""
    for route in arrays.routes:
        if route.source == HOST:
            yield route.value, None
        if HOST in route.consumers and route.gradient:
            yield route.value, HOST


def _is_all_of_host(arrays: ProgramArrays, templates: Templates, sent: Ints) -> bool:
    """Return whether the host gets every output and every gradient of an input, once."""
    n, m, wanted = len(arrays.rows), arrays.n_microbatches, [np.zeros(0, dtype=np.int64)]
    is_trained = bool((templates.kind[np.unique(arrays.numbers)] > KINDS[Kind.FORWARD]).any())
    for route in arrays.routes:
        ends: list[tuple[int | None, int]] = (
            [(None, route.source)] if route.source != HOST and HOST in route.consumers else []
        )
        if route.source == HOST and route.gradient and is_trained:
            ends += [(consumer, consumer) for consumer in route.consumers if consumer != HOST]
        for consumer, stage in ends:
            of_class = templates.classes.get((route.value, consumer))
            if of_class is None:
                return False
            wanted.append((of_class * m + np.arange(m)) * n + arrays.placement[stage])
    return np.array_equal(np.sort(sent), np.sort(np.concatenate(wanted)))


def _lives_are_right(numbers: Ints, microbatches: Ints, templates: Templates, m: int) -> bool:
    """Return whether each value of a row is written once, then read, and then freed once."""
    (reads, read), (writes, written) = (listed(side, numbers) for side in (templates.reads, templates.writes))
    read, written = read * m + microbatches[reads], written * m + microbatches[writes]
    values, place = np.unique(written, return_inverse=True)
    if len(values) < len(written) or not np.isin(read, values).all():
        return False
    born = np.zeros(len(values), dtype=np.int64)
    born[place] = writes
    of = np.searchsorted(values, read)
    is_free = templates.op[numbers[reads]] == OPS[Op.FREE]
    if (np.bincount(of[is_free], minlength=len(values)) != 1).any():
        return False
    dies = np.zeros(len(values), dtype=np.int64)
    dies[of[is_free]] = reads[is_free]
    return bool((born[of] < reads).all() and (reads[~is_free] < dies[of[~is_free]]).all())
