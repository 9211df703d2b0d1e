"""What a legal schedule is.

1. Every (stage, micro-batch) has its F once, and its B once or its I and its W once; or nobody has any of B, I, W. Before a
   backward there may be one R.
2. An action is on the device of its stage.
3. On its own device R comes after F, B and I come after F and R, W after I, and a stage after those that it reads from.
4. Between devices no waits form a cycle.

Actions are numbered, so that what one needs is a fixed step away from it: every check is linear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pipecompile.ir import Action, Kind, Route, Schedule
from pipecompile.verifiers.deadlock import deadlocks

__all__ = ["schedule_faults", "shape_faults"]

LETTERS = F, B, I, W, R = tuple(Kind)  # noqa: E741 the letters of the schedule
SHOWN = 4


def schedule_faults(schedule: Schedule, routes: Sequence[Route]) -> list[str]:
    """All faults of `schedule` when values move along `routes`, which must be legal."""
    if faults := shape_faults(schedule):
        return faults
    numbers = _Numbers(schedule.n_microbatches)
    rows = [numbers.row(row) for row in schedule.rows]
    counts = Counter(number for row in rows for number in row)
    needs = _needs(schedule.n_stages, numbers, routes)
    return [
        *_count_faults(schedule, numbers, counts),
        *_place_faults(schedule),
        *_order_faults(schedule, rows, needs, counts),
    ]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Actions as numbers: kind, then micro-batch, then stage."""

    n_microbatches: int

    def row(self, row: Iterable[Action]) -> list[int]:
        order, m = {kind: place for place, kind in enumerate(LETTERS)}, self.n_microbatches
        return [(a.stage * m + a.microbatch) * 5 + order[a.kind] for a in row]

    def action(self, number: int) -> Action:
        cell, kind = divmod(number, 5)
        stage, microbatch = divmod(cell, self.n_microbatches)
        return Action(stage, LETTERS[kind], microbatch)

    def step(self, kind: Kind, need: Kind, stages: int = 0) -> int:
        """From an action to the one of kind `need`, on the same micro-batch, so many stages away."""
        return 5 * self.n_microbatches * stages + LETTERS.index(need) - LETTERS.index(kind)


def shape_faults(schedule: Schedule) -> list[str]:
    """Counts, placement and actions that do not fit together; while there are any, nothing else can be said."""
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
            if not 0 <= action.microbatch < n_microbatches:
                yield f"{action} on device {device}: micro-batches are 0 to {n_microbatches - 1}"


def _count_faults(schedule: Schedule, numbers: _Numbers, counts: Counter[int]) -> Iterator[str]:
    if len(counts) < counts.total():
        for number, count in counts.items():
            if count > 1:
                yield f"{numbers.action(number)} is run {count} times, once is right"
    have: list[list[set[int]]] = [[set() for _ in LETTERS] for _ in range(schedule.n_stages)]
    per_stage = 5 * schedule.n_microbatches
    for number in counts:
        have[number // per_stage][number % 5].add(number // 5 % schedule.n_microbatches)
    trained = any(any(found[1:]) for found in have)
    for stage, (f, b, i, w, r) in enumerate(have):
        yield from _missing(f"stage {stage} never runs F", f, schedule.n_microbatches)
        if trained:
            yield from _missing(f"stage {stage} never runs B, nor I and W,", b | i | w, schedule.n_microbatches)
        yield from _listed(f"stage {stage} runs B and also I or W", b & (i | w))
        yield from _listed(f"stage {stage} runs I without W", i - w)
        yield from _listed(f"stage {stage} runs W without I", w - i)
        yield from _listed(f"stage {stage} runs R without B or I", r - b - i)


def _missing(what: str, found: set[int], expected: int) -> Iterator[str]:
    """Looks at no more than it shows: the expected count may be a typing error in the billions."""
    if count := expected - len(found):
        yield from _listed(what, islice((m for m in range(expected) if m not in found), SHOWN), count)


def _listed(what: str, microbatches: Iterable[int], count: int | None = None) -> Iterator[str]:
    found = sorted(microbatches)
    count = len(found) if count is None else count
    if count:
        more = f" and {count - SHOWN} more" if count > SHOWN else ""
        yield f"{what} for micro-batch{'es' * (count > 1)} {', '.join(map(str, found[:SHOWN]))}{more}"


def _place_faults(schedule: Schedule) -> Iterator[str]:
    placement = schedule.placement
    for device, row in enumerate(schedule.rows):
        for action in row:
            if placement[action.stage] != device:
                yield f"{action} is on device {device}, stage {action.stage} lives on device {placement[action.stage]}"


Needs = list[dict[int, tuple[int, ...]]]
"""Per stage and place of the kind among LETTERS: the steps from an action to those that it waits for."""


def _needs(n_stages: int, numbers: _Numbers, routes: Sequence[Route]) -> Needs:
    """Values on the way forward, gradients on the way back."""
    sources = {(c, r.source) for r in routes for c in r.consumers if r.source >= 0}
    sinks = {(r.source, c) for r in routes for c in r.consumers if r.gradient and c >= 0}
    needs: Needs = []
    for stage in range(n_stages):
        before = [a - stage for s, a in sorted(sources) if s == stage]
        after = [c - stage for s, c in sorted(sinks) if s == stage]
        own = {
            kind: [numbers.step(kind, F), numbers.step(kind, R)]
            + [numbers.step(kind, other, distance) for distance in after for other in (B, I)]
            for kind in (B, I)
        }
        own[F] = [numbers.step(F, F, distance) for distance in before if distance]
        own |= {W: [numbers.step(W, I)], R: [numbers.step(R, F)]}
        needs.append({LETTERS.index(kind): tuple(steps) for kind, steps in own.items()})
    return needs


def _order_faults(schedule: Schedule, rows: list[list[int]], needs: Needs, counts: Counter[int]) -> list[str]:
    """Order within each row first; the waits between rows are then looked at as if rows were in order."""
    faults: list[str] = []
    waits = []
    per_stage = 5 * schedule.n_microbatches
    for device, row in enumerate(rows):
        position: dict[int, int] = {}
        for index, number in enumerate(row):
            position.setdefault(number, index)
        steps = []
        for index, number in enumerate(row):
            elsewhere = []
            for step in needs[number // per_stage][number % 5]:
                need = number + step
                if need in position:
                    if position[need] > position[number] == index:
                        faults.append(_early(schedule.rows[device], device, index, position[need]))
                elif need in counts:
                    elsewhere.append(need)
            steps.append((tuple(elsewhere), number))
        waits.append(steps)
    return faults + deadlocks(waits, lambda device, index: schedule.rows[device][index])


def _early(row: Sequence[Action], device: int, index: int, late: int) -> str:
    action, need = row[index], row[late]
    return f"{action} runs before {need}, which it needs\n      device {device} │ … {action} … {need} …"
