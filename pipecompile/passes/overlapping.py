"""Overlap: a forward and the backward after it on a device run at the same time, each hiding the communication of the other.

    before   0F2 1B0 1F0 0B0                                 after   (0F2;1B0)OVERLAP_F_B (1F0;0B0)OVERLAP_F_B

A pair begins when all that both need is there, and others get what both compute when it ends. So two neighbours do not overlap if
one needs the other, directly or through other devices. DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1, overlaps
the all-to-all of experts so; NVIDIA calls it "combined 1F1B" in Megatron Core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from pipecompile.errors import InputError
from pipecompile.ir import Instruction, Route, Schedule
from pipecompile.ir.overlap import Pair, is_pair
from pipecompile.text.shown_value import type_text
from pipecompile.verifiers import verify
from pipecompile.verifiers.routes import checked_routes
from pipecompile.verifiers.schedule import schedule_faults

__all__ = ["grouped_by_overlap", "insert_overlap"]


def insert_overlap(schedule: Schedule, *, routes: Sequence[Route] | None = None) -> Schedule:
    """Return the schedule in which every F overlaps with the B or I directly after it on its device, where both can.

    Raise InputError if `schedule` is not a Schedule, and VerifyError if it is not legal.
    """
    if not isinstance(schedule, Schedule):
        hint = 'a schedule, such as pc.build_schedule("1f1b", 4, 16)'
        raise InputError(f"{type_text(schedule)} is not a Schedule", hint=hint)
    all_routes = checked_routes(routes, schedule.n_stages)
    verify(schedule, routes=all_routes)
    wanted = [frozenset(pair for pair in pairwise(row) if _may_overlap(pair)) for row in schedule.rows]
    everywhere = replace(schedule, overlaps=frozenset().union(*wanted), certificate=None)
    if not schedule_faults(everywhere, all_routes):
        return everywhere
    return _those_that_can(schedule, all_routes, [pair for own in wanted for pair in sorted(own, key=_microbatches)])


def _may_overlap(pair: Pair) -> bool:
    """Return whether two neighbours are a forward and a backward of two cells."""
    first, second = pair
    return is_pair(pair) and first.cell != second.cell


def _microbatches(pair: Pair) -> tuple[int, int]:
    return pair[1].microbatch, pair[1].stage


def _those_that_can(schedule: Schedule, routes: Sequence[Route], pairs: Sequence[Pair]) -> Schedule:
    """Return the schedule with as many of the pairs as stay legal together, found by halves: O(n log n) per pair that cannot."""
    legal = schedule
    todo = [list(pairs)]
    while todo:
        some = todo.pop()
        candidate = replace(legal, overlaps=legal.overlaps.union(some), certificate=None)
        if not schedule_faults(candidate, routes):
            legal = candidate
        elif len(some) > 1:
            half = len(some) // 2
            todo += [some[half:], some[:half]]
    return legal


def grouped_by_overlap(row: Sequence[Instruction]) -> Iterator[tuple[Instruction, ...]]:
    """Yield the instructions of a row one by one, and those that overlap together."""
    waiting: tuple[Instruction, ...] = ()
    for instruction in row:
        if instruction.overlaps:
            waiting += (instruction,)
        elif waiting:
            yield (*waiting, instruction)
            waiting = ()
        else:
            yield (instruction,)
    if waiting:
        yield waiting
