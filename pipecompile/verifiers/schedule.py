"""Verifier of schedules.

1. Every (stage, micro-batch) has one F, and either one B or one I and one W; or no stage has any of B, I, W. At most
   one R precedes the backward, or one OFFLOAD and one RELOAD.
2. An action is on the device of its stage.
3. On its own device R and OFFLOAD come after F, RELOAD after OFFLOAD, B and I after F, R and RELOAD, W after I, and a stage
   after the stages that it reads from.
4. Two actions that overlap are neighbours in a row, F and then B or I, and neither needs the other: a pair begins when all that
   both need is there.
5. Between devices no waits form a cycle.
6. Parameters that are sharded are there when their stage computes, and gradients are reduced once (`sharding.py`).

Actions are encoded as integers, so that a need is at a constant distance from its action: every check is linear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from pipecompile.ir import SHARDING, Action, Kind, Route, Schedule
from pipecompile.ir.overlap import is_pair
from pipecompile.verifiers.deadlock import Step, deadlocks
from pipecompile.verifiers.sharding import microbatch_fault, sharding_faults

__all__ = ["schedule_faults", "schedule_needs", "schedule_waits", "shape_faults"]

LETTERS = F, B, I, W, R, OFFLOAD, RELOAD = tuple(kind for kind in Kind if kind not in SHARDING)  # noqa: E741 the letters of the schedule
N_KINDS = len(LETTERS)
SHOWN = 4


def schedule_faults(schedule: Schedule, routes: Sequence[Route]) -> list[str]:
    """Return all faults of `schedule` if values move along `routes`, which must be legal."""
    if faults := shape_faults(schedule):
        return faults
    faults = [*_place_faults(schedule), *_overlap_faults(schedule)]
    if any(action.kind in SHARDING for row in schedule.rows for action in row):
        faults += sharding_faults(schedule)
        computed = (tuple(action for action in row if action.kind not in SHARDING) for row in schedule.rows)
        schedule = replace(schedule, rows=tuple(computed))
    numbers = _Numbers(schedule.n_microbatches)
    rows = [numbers.row(row) for row in schedule.rows]
    counts = Counter(number for row in rows for number in row)
    needs = _needs(schedule.n_stages, numbers, routes, {LETTERS[number % N_KINDS] for number in counts})
    return [
        *_count_faults(schedule, numbers, counts),
        *faults,
        *_order_faults(schedule, rows, needs, counts),
    ]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Actions encoded as integers: N_KINDS * (stage * n_microbatches + micro-batch) + index of the kind in LETTERS."""

    n_microbatches: int

    def row(self, row: Iterable[Action]) -> list[int]:
        order, m = {kind: place for place, kind in enumerate(LETTERS)}, self.n_microbatches
        return [(a.stage * m + a.microbatch) * N_KINDS + order[a.kind] for a in row]

    def action(self, number: int) -> Action:
        cell, kind = divmod(number, N_KINDS)
        stage, microbatch = divmod(cell, self.n_microbatches)
        return Action(stage, LETTERS[kind], microbatch)

    def step(self, kind: Kind, need: Kind, stages: int = 0) -> int:
        """Return the distance from an action to the action of kind `need`, same micro-batch, `stages` stages later."""
        return N_KINDS * self.n_microbatches * stages + LETTERS.index(need) - LETTERS.index(kind)


def shape_faults(schedule: Schedule) -> list[str]:
    """Return contradictions among counts, placement and actions. If there are any, no other check is meaningful."""
    return [*_count_and_placement_faults(schedule), *_range_faults(schedule)]


def _count_and_placement_faults(schedule: Schedule) -> Iterator[str]:
    if schedule.n_stages < 1 or schedule.n_microbatches < 1:
        yield f"{schedule.n_stages} stages and {schedule.n_microbatches} micro-batches: at least one of each is needed"
    if len(schedule.placement) != schedule.n_stages:
        yield f"{len(schedule.placement)} stages are placed, there are {schedule.n_stages}"
    for stage, device in enumerate(schedule.placement):
        if not 0 <= device < schedule.n_devices:
            yield f"stage {stage} is placed on device {device}, devices are 0 to {schedule.n_devices - 1}"


def _range_faults(schedule: Schedule) -> Iterator[str]:
    n_stages, n_microbatches = schedule.n_stages, schedule.n_microbatches
    for device, row in enumerate(schedule.rows):
        for action in row:
            if not 0 <= action.stage < n_stages:
                yield f"{action} on device {device}: stages are 0 to {n_stages - 1}"
            if fault := microbatch_fault(action, n_microbatches):
                yield f"{action} on device {device}: {fault}"


def _count_faults(schedule: Schedule, numbers: _Numbers, counts: Counter[int]) -> Iterator[str]:
    if len(counts) < counts.total():
        for number, count in counts.items():
            if count > 1:
                yield f"{numbers.action(number)} is run {count} times, once is right"
    have: list[list[set[int]]] = [[set() for _ in LETTERS] for _ in range(schedule.n_stages)]
    per_stage = N_KINDS * schedule.n_microbatches
    for number in counts:
        have[number // per_stage][number % N_KINDS].add(number // N_KINDS % schedule.n_microbatches)
    trained = any(any(microbatches[1:]) for microbatches in have)
    for stage, (f, b, i, w, r, out, back) in enumerate(have):
        yield from _missing(f"stage {stage} never runs F", f, schedule.n_microbatches)
        if trained:
            yield from _missing(f"stage {stage} never runs B, nor I and W,", b | i | w, schedule.n_microbatches)
        yield from _listed(f"stage {stage} runs B and also I or W", b & (i | w))
        yield from _listed(f"stage {stage} runs I without W", i - w)
        yield from _listed(f"stage {stage} runs W without I", w - i)
        yield from _listed(f"stage {stage} runs R without B or I", r - b - i)
        yield from _listed(f"stage {stage} runs OFFLOAD without RELOAD", out - back)
        yield from _listed(f"stage {stage} runs RELOAD without OFFLOAD", back - out)
        yield from _listed(f"stage {stage} runs OFFLOAD without B or I", (out & back) - b - i)
        yield from _listed(f"stage {stage} runs R and also OFFLOAD or RELOAD", r & (out | back))


def _missing(what: str, present: set[int], expected: int) -> Iterator[str]:
    """Yield the micro-batches below `expected` that are not in `present`. Look at no more than are shown: `expected` may
    be huge.
    """
    if count := expected - len(present):
        yield from _listed(what, islice((m for m in range(expected) if m not in present), SHOWN), count)


def _listed(what: str, microbatches: Iterable[int], count: int | None = None) -> Iterator[str]:
    shown = sorted(microbatches)
    count = len(shown) if count is None else count
    if count:
        more = f" and {count - SHOWN} more" if count > SHOWN else ""
        yield f"{what} for micro-batch{'es' * (count > 1)} {', '.join(map(str, shown[:SHOWN]))}{more}"


def _place_faults(schedule: Schedule) -> Iterator[str]:
    placement = schedule.placement
    for device, row in enumerate(schedule.rows):
        for action in row:
            if placement[action.stage] != device:
                yield f"{action} is on device {device}, stage {action.stage} is placed on device {placement[action.stage]}"


def _overlap_faults(schedule: Schedule) -> Iterator[str]:
    """Yield the pairs that are no neighbours or no forward with a backward, and the actions of two pairs."""
    begins = _pair_begins(schedule)
    found = {row[index : index + 2] for row, own in zip(schedule.rows, begins, strict=True) for index in own}
    for first, second in sorted(schedule.overlaps, key=str):
        if (first, second) not in found:
            yield f"{first} overlaps with {second}, which is not the next action of a row"
        elif not is_pair((first, second)):
            yield f"{first} overlaps with {second}: the first has to be F, and the other B or I"


def _pair_begins(schedule: Schedule) -> list[frozenset[int]]:
    """Return, per device, the indices of actions that overlap with the next."""
    overlaps = schedule.overlaps
    places = (range(len(row) - 1) if overlaps else () for row in schedule.rows)
    return [
        frozenset(i for i in own if row[i : i + 2] in overlaps) for row, own in zip(schedule.rows, places, strict=True)
    ]


Cell = tuple[int, Kind]
"""A stage and a kind of action."""

Needs = list[dict[int, tuple[int, ...]]]
"""Per stage and index of the kind in LETTERS: the distances from an action to the actions that it waits for."""


def _needs(n_stages: int, numbers: _Numbers, routes: Sequence[Route], kinds: Collection[Kind]) -> Needs:
    """Return the needs of every action: values on the way forward, gradients on the way back. Only actions of `kinds` are needed."""
    sources = {(c, r.source) for r in routes for c in r.consumers if r.source >= 0}
    sinks = {(r.source, c) for r in routes for c in r.consumers if r.gradient and c >= 0}
    needs: Needs = []
    for stage in range(n_stages):
        before = [a - stage for s, a in sorted(sources) if s == stage]
        after = [c - stage for s, c in sorted(sinks) if s == stage]
        needs_of = {
            kind: [numbers.step(kind, other) for other in (F, R, RELOAD) if other in kinds]
            + [numbers.step(kind, other, distance) for distance in after for other in (B, I) if other in kinds]
            for kind in (B, I)
        }
        needs_of[F] = [numbers.step(F, F, distance) for distance in before if distance]
        needs_of |= {W: [numbers.step(W, I)], R: [numbers.step(R, F)]}
        needs_of |= {OFFLOAD: [numbers.step(OFFLOAD, F)], RELOAD: [numbers.step(RELOAD, OFFLOAD)]}
        needs.append({LETTERS.index(kind): tuple(steps) for kind, steps in needs_of.items()})
    return needs


def _order_faults(schedule: Schedule, rows: list[list[int]], needs: Needs, counts: Counter[int]) -> list[str]:
    """Return the faults of order within each row, then deadlocks between rows as if each row were in order."""
    faults: list[str] = []
    waits = _waits(schedule, rows, needs, counts, faults)
    return faults + deadlocks(waits, lambda device, index: schedule.rows[device][index])


def schedule_waits(schedule: Schedule, routes: Sequence[Route]) -> list[list[Step]]:
    """Return, per row and action, what it waits for on other devices, and its own number, for which others wait."""
    numbers = _Numbers(schedule.n_microbatches)
    rows = [numbers.row(row) for row in schedule.rows]
    counts = Counter(number for row in rows for number in row)
    needs = _needs(schedule.n_stages, numbers, routes, {LETTERS[number % N_KINDS] for number in counts})
    return _waits(schedule, rows, needs, counts, [])


def schedule_needs(n_stages: int, routes: Sequence[Route], kinds: Collection[Kind]) -> list[dict[Kind, list[Cell]]]:
    """Return, per stage and kind, the (stage, kind) of each action of the same micro-batch that may be needed."""
    needs = _needs(n_stages, _Numbers(1), routes, kinds)
    return [
        {
            LETTERS[kind]: [
                (cell // N_KINDS, LETTERS[cell % N_KINDS]) for cell in (stage * N_KINDS + kind + d for d in all_of)
            ]
            for kind, all_of in of_stage.items()
        }
        for stage, of_stage in enumerate(needs)
    ]


def _waits(
    schedule: Schedule, rows: list[list[int]], needs: Needs, counts: Counter[int], faults: list[str]
) -> list[list[Step]]:
    """Return what each action waits for on other devices, and its number. Append the faults of order within each row."""
    waits: list[list[Step]] = []
    per_stage = N_KINDS * schedule.n_microbatches
    for device, (row, begins) in enumerate(zip(rows, _pair_begins(schedule), strict=True)):
        position = dict(zip(reversed(row), range(len(row) - 1, -1, -1), strict=True))
        steps: list[Step] = []
        for index, number in enumerate(row):
            elsewhere: tuple[Hashable, ...] = ()
            begin = index - 1 if index - 1 in begins else index
            for distance in needs[number // per_stage][number % N_KINDS]:
                need = number + distance
                if (at := position.get(need)) is not None:
                    if at >= begin and position[number] == index:
                        faults.append(_early(schedule.rows[device], device, index, at))
                elif need in counts:
                    elsewhere += (need,)
            if begin < index:
                steps[-1], elsewhere = (steps[-1][0] + elsewhere, steps[-1][1]), ()
            steps.append((elsewhere, number))
        waits.append(steps)
    return waits


def _early(row: Sequence[Action], device: int, index: int, late: int) -> str:
    action, need = row[index], row[late]
    if late < index:
        return f"{action} overlaps with {need}, which it needs"
    return f"{action} runs before {need}, which it needs\n      device {device} │ … {action} … {need} …"
