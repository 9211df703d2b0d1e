"""The schedule for given costs: the best of the catalogue and of many list schedules, improved by local search.

    catalogue ─────────────────────┐
                                   ├─▶ what fits the memory ─▶ the fastest ─▶ swaps on its critical path
    tastes, placements, R or not ───┘                           (simulated)

So it is never slower than what the catalogue has for these counts, and mostly at the bound. List schedules count what
stages save; where the buffers of values do not fit beside that, they are made anew in less room. All is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Unpack

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir import Action, Kind, Route, Schedule, chain
from pipecompile.ir.gc_pause import without_collection
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.schedules.catalogue import CATALOGUE
from pipecompile.schedules.placement import loop, vee
from pipecompile.schedules.search.critical_swaps import improve
from pipecompile.schedules.search.evaluate import Judge, Limit
from pipecompile.schedules.search.list_search import Found, Lister
from pipecompile.schedules.search.lower_bound import shortest_step
from pipecompile.schedules.search.recompute_choices import flag_sets
from pipecompile.simulation.costs import CostOptions, Costs, make_costs

__all__ = ["auto_schedule"]

PerDevice = float | Sequence[float]


@without_collection
def auto_schedule(
    n_stages: int,
    n_microbatches: int,
    *,
    n_devices: int | None = None,
    placement: Sequence[int] | None = None,
    routes: Sequence[Route] | None = None,
    memory_limit: PerDevice | None = None,
    in_flight: PerDevice | None = None,
    checkpoint: str | Sequence[bool] = "never",
    split: bool = True,
    effort: float = 1.0,
    **costs: Unpack[CostOptions],
) -> Schedule:
    """A schedule whose simulated step is as short as can be found, and never longer than the catalogue's best.

    Stages are on devices as `placement` says, or else in a loop or a V, whichever is faster; values move along `routes`,
    a chain when None. `memory_limit` (bytes, as `simulate` counts them) or `in_flight` (micro-batches) bound what a device
    may hold, one number or one per device. `checkpoint`: which stages are recomputed, "never", "always", a flag per stage,
    or "auto", which recomputes where memory asks for it. `split` False keeps backwards whole. `effort` is how long to
    search; 1 takes some seconds for 16 devices and 64 micro-batches. `costs` are those of `simulate`.

    Raises ScheduleError when nothing fits the memory, with what is needed; InputError for arguments that make no sense.
    """
    ways = chain(n_stages) if routes is None else tuple(routes)
    places = _placements(n_stages, n_devices, placement)
    devices = max(map(max, places)) + 1
    search = _Search(
        n_microbatches,
        ways,
        make_costs(n_stages, devices, ways, **costs),
        _limit(memory_limit, in_flight, devices),
        checkpoint,
        split,
        effort,
    )
    return search.run(places)


def _placements(n_stages: int, n_devices: int | None, placement: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    if placement is not None:
        if len(placement) != n_stages or set(placement) != set(range(max(placement) + 1)):
            raise InputError(
                f"placement={tuple(placement)} does not say a device for each of {n_stages} stages",
                hint="devices are 0, 1, 2 ... and each has a stage",
            )
        return (tuple(placement),)
    devices = n_stages if n_devices is None else n_devices
    if not 1 <= devices <= n_stages:
        raise InputError(f"{n_stages} stages cannot be placed on {devices} devices")
    return (loop(n_stages, devices), *((vee(devices),) if n_stages == 2 * devices else ()))


def _limit(memory_limit: PerDevice | None, in_flight: PerDevice | None, n_devices: int) -> Limit | None:
    if memory_limit is None and in_flight is None:
        return None
    if memory_limit is not None and in_flight is not None:
        raise InputError("memory_limit and in_flight cannot both be given", hint="the one in bytes says more")
    given = in_flight if memory_limit is None else memory_limit
    room = (float(given),) * n_devices if isinstance(given, int | float) else tuple(map(float, given or ()))
    if len(room) != n_devices:
        raise InputError(f"the limit has {len(room)} numbers for {n_devices} devices")
    return Limit(room, in_bytes=memory_limit is not None)


_LIST_ACTIONS, _SWAP_ACTIONS = 600_000, 300_000
"""How many actions are scheduled by lists, and walked by swaps, at effort 1."""


@dataclass(frozen=True, slots=True)
class _Search:
    n_microbatches: int
    routes: tuple[Route, ...]
    costs: Costs
    limit: Limit | None
    checkpoint: str | Sequence[bool]
    split: bool
    effort: float

    def run(self, placements: Sequence[tuple[int, ...]]) -> Schedule:
        judges = [Judge(place, self.routes, self.costs, self.limit) for place in placements]
        found = [each for judge in judges for each in self._from_catalogue(judge)]
        found += [lister.found for lister in self._listers(judges) if lister.found]
        if not found:
            raise self._nothing_fits(judges[0])
        best = min(found, key=lambda each: each.seconds)
        return replace(self._improved(best), name="auto")

    def _listers(self, judges: Sequence[Judge]) -> list[Lister]:
        """A little for every choice, more for the three most promising, and the rest for climbing from the best two."""
        listers = [
            Lister(judge, judge.work(flags, split=self.split), self.n_microbatches)
            for judge in judges
            for flags in self._flags(judge)
        ]
        for share, number, spend in ((0.4, len(listers), Lister.spend), (0.2, 3, Lister.spend), (0.4, 2, Lister.climb)):
            listers.sort(key=lambda lister: lister.seconds)
            for lister in listers[:number]:
                spend(lister, share * self.effort * _LIST_ACTIONS / number)
        return listers

    def _from_catalogue(self, judge: Judge) -> Iterator[Found]:
        n_stages, n_devices = len(judge.placement), max(judge.placement) + 1
        for name, entry in CATALOGUE.items():
            if name == "forward" or not entry.suits(n_stages, n_devices):
                continue
            schedule = entry.build(n_stages, self.n_microbatches, n_devices)
            if schedule.placement == judge.placement and (self.split or not _is_split(schedule)):
                yield from self._fitting(schedule, judge)
        yield from self._fitting(_one_by_one(judge.placement, self.n_microbatches), judge)

    def _fitting(self, schedule: Schedule, judge: Judge) -> Iterator[Found]:
        """As it is, or with as little recomputed as it needs."""
        candidates = (insert_recompute(schedule, flags) for flags in self._flags(judge))
        fitting = next((candidate for candidate in candidates if not any(judge.excess(candidate))), None)
        if fitting is not None:
            yield Found(judge.seconds(fitting), fitting, judge)

    def _flags(self, judge: Judge) -> Iterator[tuple[bool, ...]]:
        return flag_sets(judge.work(split=self.split), judge.room, self.checkpoint)

    def _improved(self, found: Found) -> Schedule:
        """By swaps that leave every device the room that it has."""
        schedule, judge = found.schedule, found.judge
        again = {a.stage for row in schedule.rows for a in row if a.kind is Kind.RECOMPUTE}
        work = judge.work([stage in again for stage in range(schedule.n_stages)], split=self.split)
        slack = (inf,) * schedule.n_devices
        if self.limit is not None:
            slack = tuple(room - peak for room, peak in zip(self.limit.room, judge.peaks(schedule), strict=True))
        room = [judge.held(row) + more for row, more in zip(schedule.rows, slack, strict=True)]
        better = improve(
            schedule,
            self.routes,
            self.costs,
            lambda device, row: judge.held(row) <= room[device],
            target=shortest_step(work, self.n_microbatches, judge.room),
            walks=int(self.effort * _SWAP_ACTIONS / sum(map(len, schedule.rows))),
        )
        return schedule if any(judge.excess(better)) else better

    def _nothing_fits(self, judge: Judge) -> ScheduleError:
        """Says what one micro-batch after the other would need."""
        assert self.limit is not None
        serial = _one_by_one(judge.placement, self.n_microbatches)
        candidates = [insert_recompute(serial, flags) for flags in self._flags(judge)]
        peaks = min((judge.peaks(candidate) for candidate in candidates), key=max)
        device = max(range(len(peaks)), key=lambda d: peaks[d] - self.limit.room[d] if self.limit else 0.0)
        unit = "bytes" if self.limit.in_bytes else "micro-batches in flight"
        return ScheduleError(
            f"no schedule of {len(judge.placement)} stages on {len(peaks)} devices fits the memory",
            why=f"one micro-batch after another needs {peaks[device]:.6g} {unit} on device {device}, "
            f"{self.limit.room[device]:.6g} are allowed",
            hint="more memory, more devices, smaller micro-batches"
            + ", checkpoint='auto'" * (self.checkpoint == "never"),
        )


def _is_split(schedule: Schedule) -> bool:
    return any(action.kind is Kind.INPUT_GRAD for row in schedule.rows for action in row)


def _one_by_one(placement: Sequence[int], n_microbatches: int) -> Schedule:
    """A micro-batch after the other: nothing needs less memory."""
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for m in range(n_microbatches):
        for stage, device in enumerate(placement):
            rows[device].append(Action(stage, Kind.FORWARD, m))
        for stage, device in reversed(list(enumerate(placement))):
            rows[device].append(Action(stage, Kind.BACKWARD, m))
    return Schedule(len(placement), n_microbatches, tuple(placement), tuple(map(tuple, rows)), "one by one")
