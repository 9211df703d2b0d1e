"""Verifier of schedules.

1. Every (stage, micro-batch) has one F, and either one B or one I and one W; or no stage has any of B, I, W. At most
   one R precedes the backward, or one OFFLOAD and one RELOAD.
2. An action is on the device of its stage, in the direction of its micro-batch (`directions.py`).
3. On its own device R and OFFLOAD come after F, RELOAD after OFFLOAD, B and I after F, R and RELOAD, W after I, and a stage
   after the stages that it reads from.
4. Two actions that overlap are neighbours in a row, F and then B or I, and neither needs the other: a pair begins when all that
   both need is there.
5. Between devices no waits form a cycle.
6. In a schedule of slices every (stage, micro-batch, slice) has these actions, and slices wait for each other as `ir/slices.py` says.
7. Parameters that are sharded are there when their stage computes, and gradients are reduced once (`sharding.py`).

Actions are encoded as integers, so that a need is at a constant distance from its action: every check is linear. The units of a
schedule are its micro-batches, or the slices of all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from pipecompile.ir import SHARDING, Action, Kind, Route, Schedule
from pipecompile.ir.overlap import is_pair
from pipecompile.ir.slices import unit_text
from pipecompile.text.units import counted
from pipecompile.verifiers.deadlock import Step, deadlocks
from pipecompile.verifiers.directions import direction_faults, place_faults
from pipecompile.verifiers.sharding import microbatch_fault, sharding_faults
from pipecompile.verifiers.slices import slice_fault, slice_needs, slice_reason

__all__ = ["schedule_faults", "schedule_needs", "schedule_waits", "shape_faults"]

LETTERS = F, B, I, W, R, OFFLOAD, RELOAD = tuple(kind for kind in Kind if kind not in SHARDING)  # noqa: E741 the letters of the schedule
N_KINDS = len(LETTERS)
SHOWN = 4


def schedule_faults(schedule: Schedule, routes: Sequence[Route]) -> list[str]:
    """Return all faults of `schedule` if values move along `routes`, which must be legal."""
    if faults := shape_faults(schedule):
        return faults
    faults = [*place_faults(schedule), *_overlap_faults(schedule)]
    if any(action.kind in SHARDING for row in schedule.rows for action in row):
        faults += sharding_faults(schedule)
        computed = (tuple(action for action in row if action.kind not in SHARDING) for row in schedule.rows)
        schedule = replace(schedule, rows=tuple(computed))
    numbers = _Numbers(schedule.n_units, schedule.n_slices)
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
    """Actions encoded as integers: N_KINDS * (stage * n_units + unit) + index of the kind in LETTERS."""

    n_units: int
    n_slices: int = 1

    def row(self, row: Iterable[Action]) -> list[int]:
        order, n, n_slices = {kind: place for place, kind in enumerate(LETTERS)}, self.n_units, self.n_slices
        if n_slices == 1:
            return [(a.stage * n + a.microbatch) * N_KINDS + order[a.kind] for a in row]
        return [(a.stage * n + a.unit(n_slices)) * N_KINDS + order[a.kind] for a in row]

    def action(self, number: int) -> Action:
        cell, kind = divmod(number, N_KINDS)
        stage, unit = divmod(cell, self.n_units)
        parts = (unit,) if self.n_slices == 1 else divmod(unit, self.n_slices)
        return Action(stage, LETTERS[kind], *parts)

    def step(self, kind: Kind, need: Kind, stages: int = 0, slices: int = 0) -> int:
        """Return the distance from an action to the action of kind `need`, `stages` stages and `slices` slices later."""
        return N_KINDS * (self.n_units * stages + slices) + LETTERS.index(need) - LETTERS.index(kind)

    def slice_steps(self, place: int, kind: Kind, kinds: Collection[Kind]) -> tuple[int, ...]:
        """Return the distances from an action on slice `place` to the actions of other slices that it needs, if they are of `kinds`."""
        needs = slice_needs(kind, place, self.n_slices)
        return tuple(self.step(kind, need, slices=other - place) for other, need in needs if need in kinds)


def shape_faults(schedule: Schedule) -> list[str]:
    """Return contradictions among counts, placement and actions. If there are any, no other check is meaningful."""
    return [*_count_and_placement_faults(schedule), *_range_faults(schedule), *direction_faults(schedule)]


def _count_and_placement_faults(schedule: Schedule) -> Iterator[str]:
    if schedule.n_stages < 1 or schedule.n_microbatches < 1:
        counts = f"{counted(schedule.n_stages, 'stage')} and {counted(schedule.n_microbatches, 'micro-batch')}"
        yield f"{counts}: at least one of each is needed"
    if schedule.n_slices < 1:
        yield f"{counted(schedule.n_slices, 'slice')} per micro-batch: at least one is needed"
    elif schedule.n_slices > max(1, n_actions := sum(map(len, schedule.rows))):
        yield f"{schedule.n_slices} slices per micro-batch, and the schedule has {counted(n_actions, 'action')}"
    if len(schedule.placement) != schedule.n_stages:
        n_placed = len(schedule.placement)
        yield f"{counted(n_placed, 'stage')} {'is' if n_placed == 1 else 'are'} placed, there are {schedule.n_stages}"
    for stage, device in enumerate(schedule.placement):
        if not 0 <= device < schedule.n_devices:
            yield f"stage {stage} is placed on device {device}, devices are 0 to {schedule.n_devices - 1}"


def _range_faults(schedule: Schedule) -> Iterator[str]:
    n_stages, n_microbatches = schedule.n_stages, schedule.n_microbatches
    for device, row in enumerate(schedule.rows):
        for action in row:
            if not 0 <= action.stage < n_stages:
                yield f"{action} on device {device}: stages are 0 to {n_stages - 1}"
            if fault := microbatch_fault(action, n_microbatches) or slice_fault(action, schedule.n_slices):
                yield f"{action} on device {device}: {fault}"


def _count_faults(schedule: Schedule, numbers: _Numbers, counts: Counter[int]) -> Iterator[str]:
    if len(counts) < counts.total():
        for number, count in counts.items():
            if count > 1:
                yield f"{numbers.action(number)} is run {count} times, once is right"
    have: list[list[set[int]]] = [[set() for _ in LETTERS] for _ in range(schedule.n_stages)]
    n_units = schedule.n_units
    for number in counts:
        have[number // (N_KINDS * n_units)][number % N_KINDS].add(number // N_KINDS % n_units)
    trained = any(any(units[1:]) for units in have)
    listed = partial(_listed, n_slices=schedule.n_slices)
    for stage, (f, b, i, w, r, out, back) in enumerate(have):
        yield from listed(f"stage {stage} never runs F", *_missing(f, n_units))
        if trained:
            yield from listed(f"stage {stage} never runs B, nor I and W,", *_missing(b | i | w, n_units))
        yield from listed(f"stage {stage} runs B and also I or W", b & (i | w))
        yield from listed(f"stage {stage} runs I without W", i - w)
        yield from listed(f"stage {stage} runs W without I", w - i)
        yield from listed(f"stage {stage} runs R without B or I", r - b - i)
        yield from listed(f"stage {stage} runs OFFLOAD without RELOAD", out - back)
        yield from listed(f"stage {stage} runs RELOAD without OFFLOAD", back - out)
        yield from listed(f"stage {stage} runs OFFLOAD without B or I", (out & back) - b - i)
        yield from listed(f"stage {stage} runs R and also OFFLOAD or RELOAD", r & (out | back))


def _missing(present: set[int], expected: int) -> tuple[Iterable[int], int]:
    """Return units below `expected` that are not in `present`, and their number. Look at no more than are shown: `expected` may
    be huge.
    """
    count = expected - len(present)
    return islice((unit for unit in range(expected) if unit not in present), min(count, SHOWN)), count


def _listed(what: str, units: Iterable[int], count: int | None = None, *, n_slices: int) -> Iterator[str]:
    """Yield a fault of these units, with the numbers of the first; `count` is how many there are, by default those of `units`."""
    shown = sorted(units)
    count = len(shown) if count is None else count
    if count:
        one, many = ("micro-batch", "micro-batches") if n_slices == 1 else ("slice", "slices")
        texts = (unit_text(unit, n_slices) for unit in shown[:SHOWN])
        more = f" and {count - SHOWN} more" if count > SHOWN else ""
        yield f"{what} for {one if count == 1 else many} {', '.join(texts)}{more}"


def _overlap_faults(schedule: Schedule) -> Iterator[str]:
    """Yield the pairs that are not neighbours or no forward with a backward, and the actions of two pairs."""
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
    numbers = _Numbers(schedule.n_units, schedule.n_slices)
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
    per_stage, n_slices = N_KINDS * schedule.n_units, schedule.n_slices
    of_slices = _slice_steps(schedule, counts)
    for device, (row, begins) in enumerate(zip(rows, _pair_begins(schedule), strict=True)):
        position = dict(zip(reversed(row), range(len(row) - 1, -1, -1), strict=True))
        steps: list[Step] = []
        for index, number in enumerate(row):
            elsewhere: tuple[Hashable, ...] = ()
            begin = index - 1 if index - 1 in begins else index
            steps_of = needs[number // per_stage][number % N_KINDS]
            if of_slices:
                steps_of += of_slices[number // N_KINDS % n_slices][number % N_KINDS]
            for distance in steps_of:
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


def _slice_steps(schedule: Schedule, counts: Collection[int]) -> list[list[tuple[int, ...]]]:
    """Return, per slice and index of the kind in LETTERS, the distances to what the action needs of other slices; [] without slices."""
    if schedule.n_slices == 1:
        return []
    numbers, kinds = _Numbers(schedule.n_units, schedule.n_slices), {LETTERS[number % N_KINDS] for number in counts}
    return [[numbers.slice_steps(place, kind, kinds) for kind in LETTERS] for place in range(schedule.n_slices)]


def _early(row: Sequence[Action], device: int, index: int, late: int) -> str:
    action, need = row[index], row[late]
    why = slice_reason(action, need) or "which it needs"
    if late < index:
        return f"{action} overlaps with {need}, {why}"
    return f"{action} runs before {need}, {why}\n      device {device} │ … {action} … {need} …"
