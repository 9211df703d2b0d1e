"""What a legal schedule is.

1. Every (stage, micro-batch) has its F once, and its B once or its I and its W once; or nobody has any of B, I, W.
2. An action is on the device of its stage.
3. On its own device B and I come after F, W after I, and a stage after those that it reads from.
4. Between devices no waits form a cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from pipecompile.checks.deadlock import Wait, deadlocks
from pipecompile.ir import Action, Kind, Route, Schedule

__all__ = ["schedule_faults", "shape_faults"]

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = Kind
SHOWN = 4


def schedule_faults(schedule: Schedule, routes: Sequence[Route]) -> list[str]:
    """All faults of `schedule` when values move along `routes`, which must be legal."""
    if faults := shape_faults(schedule):
        return faults
    counts = Counter(action for row in schedule.rows for action in row)
    needs = _needs(counts, routes)
    return [*_count_faults(schedule, counts), *_place_faults(schedule), *_order_faults(schedule, needs)]


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
    for device, row in enumerate(schedule.rows):
        for action in row:
            if not 0 <= action.stage < schedule.n_stages:
                yield f"{action} on device {device}: stages are 0 to {schedule.n_stages - 1}"
            if not 0 <= action.microbatch < schedule.n_microbatches:
                yield f"{action} on device {device}: micro-batches are 0 to {schedule.n_microbatches - 1}"


def _count_faults(schedule: Schedule, counts: Counter[Action]) -> Iterator[str]:
    yield from (f"{action} is run {count} times, once is right" for action, count in counts.items() if count > 1)
    have: dict[tuple[int, Kind], set[int]] = {(s, kind): set() for s in range(schedule.n_stages) for kind in Kind}
    for action in counts:
        have[action.stage, action.kind].add(action.microbatch)
    trained = any(kind is not FORWARD and found for (_, kind), found in have.items())
    for stage in range(schedule.n_stages):
        f, b, i, w = (have[stage, kind] for kind in Kind)
        yield from _missing(f"stage {stage} never runs F", f, schedule.n_microbatches)
        if trained:
            yield from _missing(f"stage {stage} never runs B, nor I and W,", b | i | w, schedule.n_microbatches)
        yield from _listed(f"stage {stage} runs B and also I or W", b & (i | w))
        yield from _listed(f"stage {stage} runs I without W", i - w)
        yield from _listed(f"stage {stage} runs W without I", w - i)


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
    for device, row in enumerate(schedule.rows):
        for action in row:
            if (home := schedule.placement[action.stage]) != device:
                yield f"{action} is on device {device}, stage {action.stage} lives on device {home}"


def _needs(actions: Iterable[Action], routes: Sequence[Route]) -> dict[Action, tuple[Action, ...]]:
    """What each action waits for: values on the way forward, gradients on the way back."""
    found = set(actions)
    sources = {(c, r.source) for r in routes for c in r.consumers if r.source >= 0}
    sinks = {(r.source, c) for r in routes for c in r.consumers if r.gradient and c >= 0}
    before: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}
    for ends, table in ((sources, before), (sinks, after)):
        for stage, other in sorted(ends):
            table.setdefault(stage, []).append(other)

    def of(action: Action) -> tuple[Action, ...]:
        s, m = action.stage, action.microbatch
        if action.kind is FORWARD:
            return tuple(Action(source, FORWARD, m) for source in before.get(s, ()))
        if action.kind is WEIGHT_GRAD:
            return (Action(s, INPUT_GRAD, m),)
        grads = (Action(sink, kind, m) for sink in after.get(s, ()) for kind in (BACKWARD, INPUT_GRAD))
        return (Action(s, FORWARD, m), *grads)

    return {action: tuple(need for need in of(action) if need in found) for action in found}


def _order_faults(schedule: Schedule, needs: dict[Action, tuple[Action, ...]]) -> list[str]:
    """Order within each row first; the waits between rows are then looked at as if rows were in order."""
    faults: list[str] = []
    rows = []
    for device, row in enumerate(schedule.rows):
        position: dict[Action, int] = {}
        for index, action in enumerate(row):
            position.setdefault(action, index)
        for action, index in position.items():
            late = (need for need in needs[action] if position.get(need, -1) > index)
            faults += (_early(device, action, need) for need in late)
        rows.append([Wait(a, tuple(n for n in needs[a] if n not in position), a) for a in row])
    return faults + deadlocks(rows)


def _early(device: int, action: Action, need: Action) -> str:
    return f"{action} runs before {need}, which it needs\n      device {device} │ … {action} … {need} …"
