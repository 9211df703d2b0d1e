"""Random schedules of slices, damages to them, and a judgement that is independent of the verifier's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from damages import damaged_schedule

from pipecompile.ir import NO_SLICE, SHARDING, Action, Kind, Schedule
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.passes.early_recompute import advance_recompute
from pipecompile.passes.overlapping import insert_overlap
from pipecompile.passes.split_backward import split_backward
from pipecompile.schedules import CATALOGUE, build_schedule

SLICED = [name for name, entry in CATALOGUE.items() if entry.has_slices]


def random_sliced(rng: Random) -> Schedule:
    """Of the catalogue, overlapped, split, recomputed and offloaded here and there."""
    name = rng.choice(SLICED)
    chunks, n_devices = CATALOGUE[name].chunks or rng.randint(1, 2), rng.randint(1, 3)
    counts = n_devices * chunks, rng.randint(1, 3)
    schedule = build_schedule(name, *counts, n_devices=n_devices, n_slices=rng.randint(2, 4))
    if rng.random() < 0.4:
        pairs = sorted(insert_overlap(schedule).overlaps, key=str)
        schedule = replace(schedule, overlaps=frozenset(pair for pair in pairs if rng.random() < 0.7))
    if rng.random() < 0.4:
        schedule = split_backward(schedule, rng.choice([0, 1, 3]))
    if rng.random() < 0.4:
        schedule = insert_recompute(schedule, [rng.random() < 0.6 for _ in range(schedule.n_stages)])
        return advance_recompute(schedule, rng.randint(1, 3))
    return offloaded(rng, schedule) if rng.random() < 0.6 and not schedule.overlaps else schedule


def offloaded(rng: Random, schedule: Schedule) -> Schedule:
    """Move some cells to the host, after the last forward of their micro-batch, and back before its first backward."""
    wanted = {action.cell for row in schedule.rows for action in row if rng.random() < 0.3}
    rows = []
    for row in schedule.rows:
        new: list[Action] = []
        for action in row:
            cells = [replace(action, slice=place) for place in range(schedule.n_slices)]
            moved = [each for each in cells if each.cell in wanted]
            is_last = action.slice == schedule.n_slices - 1
            if is_last and action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
                new += [replace(each, kind=Kind.RELOAD) for each in moved]
            new.append(action)
            if is_last and action.kind is Kind.FORWARD:
                new += [replace(each, kind=Kind.OFFLOAD) for each in moved]
        rows.append(tuple(new))
    return replace(schedule, rows=tuple(rows))


SLICE_DAMAGES = ("drop", "duplicate", "swap", "move", "elsewhere", "overlap", "slice", "neighbours", "microbatch")


def damaged_slices(rng: Random, schedule: Schedule, how: str) -> Schedule:
    """Return the schedule with one damage."""
    if how not in ("slice", "neighbours", "microbatch"):
        return damaged_schedule(rng, schedule, how)
    rows = [list(row) for row in schedule.rows]
    row = rng.choice([row for row in rows if row])
    index = rng.randrange(len(row))
    action = row[index]
    if how == "slice":
        row[index] = replace(action, slice=rng.choice([NO_SLICE, rng.randint(0, schedule.n_slices)]))
    elif how == "microbatch":
        row[index] = replace(action, microbatch=rng.randint(0, schedule.n_microbatches))
    else:  # two actions of a kind on different slices of one micro-batch
        same = [i for i, other in enumerate(row) if replace(other, slice=action.slice) == action]
        other = rng.choice(same)
        row[index], row[other] = row[other], row[index]
    return replace(schedule, rows=tuple(map(tuple, rows)))


def sliced_works(schedule: Schedule) -> bool:
    """Run it over a chain, each device as far as it gets: what an action reads must be there, and all runs once."""
    everything = Counter(action for row in schedule.rows for action in row)
    ran: set[Action] = set()
    at, paired, moved = [0] * schedule.n_devices, 0, True
    while moved:
        moved = False
        for device, row in enumerate(schedule.rows):
            while at[device] < len(row):
                pair = row[at[device] : at[device] + 2]
                together = pair if pair in schedule.overlaps else pair[:1]
                if not all(_may_run(schedule, device, action, ran, everything) for action in together):
                    break
                ran.update(together)
                paired += len(together) > 1
                at[device] += len(together)
                moved = True
    has_ended = at == [len(row) for row in schedule.rows] and paired == len(schedule.overlaps)
    is_pair = all(f.kind.value + b.kind.value in ("FB", "FI") for f, b in schedule.overlaps)
    return has_ended and is_pair and _has_all_once(schedule, everything)


def _has_all_once(schedule: Schedule, everything: Counter[Action]) -> bool:
    left = Counter(everything)
    trained = any(action.kind is not Kind.FORWARD for action in everything)
    for s in range(schedule.n_stages):
        for m in range(schedule.n_microbatches):
            for c in range(schedule.n_slices):
                count = {kind.value: left.pop(Action(s, kind, m, c), 0) for kind in Kind if kind not in SHARDING}
                backward = count["B"], count["I"], count["W"]
                if count["F"] != 1 or backward not in ([(1, 0, 0), (0, 1, 1)] if trained else [(0, 0, 0)]):
                    return False
                if count["OFFLOAD"] != count["RELOAD"] or count["OFFLOAD"] + count["R"] > trained:
                    return False
    return not left


def _may_run(schedule: Schedule, device: int, action: Action, ran: set[Action], everything: Counter[Action]) -> bool:
    """Say whether keys and values, gradients and inputs of an action are where it needs them."""
    s, m, c, last = action.stage, action.microbatch, action.slice, schedule.n_slices - 1
    if not (s < schedule.n_stages and 0 <= m < schedule.n_microbatches and 0 <= c <= last):
        return False
    if schedule.placement[s] != device:
        return False

    def has(kind: Kind, place: int, stage: int = s) -> bool:
        return Action(stage, kind, m, place) in ran

    def is_there(place: int) -> bool:
        """Say whether the keys and values of a slice are on the device for the backwards."""
        moves = Action(s, Kind.RELOAD, m, place) in everything
        return has(Kind.FORWARD, place) and (has(Kind.RELOAD, place) or not moves)

    match action.kind:
        case Kind.FORWARD:
            before = all(has(Kind.FORWARD, place) and not has(Kind.OFFLOAD, place) for place in range(c))
            return before and (s == 0 or has(Kind.FORWARD, c, s - 1))
        case Kind.OFFLOAD:
            return all(has(Kind.FORWARD, place) for place in range(c, last + 1))
        case Kind.RELOAD:
            return has(Kind.OFFLOAD, c)
        case Kind.RECOMPUTE:
            return has(Kind.FORWARD, c)
        case Kind.WEIGHT_GRAD:
            return has(Kind.INPUT_GRAD, c)
    restored = has(Kind.RECOMPUTE, c) or Action(s, Kind.RECOMPUTE, m, c) not in everything
    after = s + 1 == schedule.n_stages or has(Kind.BACKWARD, c, s + 1) or has(Kind.INPUT_GRAD, c, s + 1)
    later = all(has(Kind.BACKWARD, place) or has(Kind.INPUT_GRAD, place) for place in range(c + 1, last + 1))
    return restored and after and later and all(is_there(place) for place in range(c + 1))
