"""Lower bounds on the makespan of every schedule of a workload.

    device d  │ head │ F F F F │ ......  │ I W I W I W I W │ tail      head     until an action can start
              └──────┴─────────┴─────────┴─────────────────┴─────▶     tail     after its end, until the step can end

The bound is the longest of
  chains           head + seconds + tail of an action: fill, turn, drain, and forwards that wait for the release of memory
  one machine      over all devices: its actions with their heads and tails, one after another (`one_machine_bound`)
  energy           over all devices: bytes x seconds that all stages of the device have to hold, divided by its bytes

If stages may be recomputed, each device takes the best choice for its own stages, beside others whose recomputation takes no time; of large
problems, only the devices with the least room.

`host_lower_bound` is the bound from what devices share: a step ends no earlier than the last launch of a host thread, and devices on
one stream compute one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import product
from math import inf

from pipecompile.ir import Kind
from pipecompile.schedules.search.action_times import ActionTimes, action_times
from pipecompile.schedules.search.cell_seconds import CellSeconds, least_held, least_seconds
from pipecompile.schedules.search.release_lags import release_lags
from pipecompile.schedules.search.workload import Workload, with_free_recompute
from pipecompile.simulation.costs import Costs, Hosts

__all__ = ["host_lower_bound", "makespan_lower_bound", "one_machine_bound"]

_CHOICE_CELLS = 500_000
"""Stages x micro-batches of the bounds with choices of recomputed stages, some seconds: the devices with least room come first."""

_KINDS = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD


def makespan_lower_bound(
    workload: Workload, n_microbatches: int, capacity: Sequence[float] | None = None, *, recompute: bool = False
) -> float:
    """Return a lower bound on the makespan in seconds. `capacity` is the memory per device, in the unit of the workload; None
    for unlimited memory. `recompute`: every stage may recompute or not; else the flags of the workload hold.

    O(stages x micro-batches x (log + transfers)), with `recompute` times the choices of each device.
    """
    limits = (inf,) * workload.n_devices if capacity is None else tuple(capacity)
    return _cached_bound(workload, n_microbatches, limits, recompute)


@lru_cache(maxsize=16)
def _cached_bound(workload: Workload, n_microbatches: int, limits: tuple[float, ...], recompute: bool) -> float:
    """Return the bound; searches ask for that of a workload several times."""
    if not recompute or all(limit == inf for limit in limits):
        kept = replace(workload, is_recomputed=(False,) * workload.n_stages) if recompute else workload
        return _bound(kept, n_microbatches, limits, range(workload.n_devices))
    relaxed = with_free_recompute(workload)
    longest = _bound(relaxed, n_microbatches, limits, range(workload.n_devices))
    left = _CHOICE_CELLS
    for device in _tightest_first(workload, limits):
        left -= 2 ** workload.placement.count(device) * workload.n_stages * n_microbatches
        if left < 0:
            break
        choices = (_bound(each, n_microbatches, limits, (device,)) for each in _choices(workload, relaxed, device))
        longest = max(longest, min(choices))
    return longest


def _tightest_first(workload: Workload, limits: Sequence[float]) -> list[int]:
    """Return the devices by how many micro-batches without recomputation they have room for."""
    saved = [0.0] * workload.n_devices
    for s, device in enumerate(workload.placement):
        saved[device] += workload.saved[s]
    return sorted(range(workload.n_devices), key=lambda device: limits[device] / max(saved[device], 1e-300))


def _choices(workload: Workload, relaxed: Workload, device: int) -> Iterator[Workload]:
    """Yield the relaxed workload with every choice of the recomputed stages of a device."""
    own = [s for s in range(workload.n_stages) if workload.placement[s] == device]
    for flags in product((False, True), repeat=len(own)):
        saved, is_recomputed = list(relaxed.saved), [False] * workload.n_stages
        for s, flag in zip(own, flags, strict=True):
            saved[s], is_recomputed[s] = workload.saved[s], flag
        yield replace(relaxed, saved=tuple(saved), is_recomputed=tuple(is_recomputed))


def _bound(workload: Workload, n: int, capacity: Sequence[float], devices: Sequence[int]) -> float:
    """Return the bound from all chains, and from the actions and the memory of `devices`."""
    cell, times = least_seconds(workload), action_times(workload, n, release_lags(workload, capacity, n))
    longest = max(
        head + seconds + tail for s in range(workload.n_stages) for head, seconds, tail in _jobs(cell, times, s)
    )
    for device in devices:
        own = [s for s in range(workload.n_stages) if workload.placement[s] == device]
        longest = max(longest, one_machine_bound(job for s in own for job in _jobs(cell, times, s)))
        if 0 < capacity[device] < inf:
            longest = max(longest, _memory_seconds(workload, cell, times, own, capacity[device]))
    return longest


def _jobs(cell: CellSeconds, times: ActionTimes, s: int) -> Iterator[Job]:
    """Yield head, seconds and tail of all actions of stage s."""
    parts = cell.forward[s], cell.input_grad[s], cell.weight_grad[s]
    for kind, seconds in zip(_KINDS, parts, strict=True):
        for head, tail in zip(times.head[kind][s], times.tail[kind][s], strict=True):
            yield head, seconds, tail
    if cell.recompute[s]:
        pairs = zip(times.head[Kind.FORWARD][s], times.tail[Kind.INPUT_GRAD][s], strict=True)
        for head, tail in pairs:
            yield head + cell.forward[s], cell.recompute[s], cell.input_grad[s] + tail


def _memory_seconds(
    workload: Workload, cell: CellSeconds, times: ActionTimes, own: Sequence[int], capacity: float
) -> float:
    """Return the bound from the memory of a device over time: what its stages hold from F to I, and with I to W."""
    forward = times.head[Kind.FORWARD]
    until_i = until_w = 0.0
    for s in own:
        held = least_held(workload, cell, s)
        if workload.is_recomputed[s]:
            restored = cell.recompute[s] + cell.input_grad[s]
            size = min(workload.recipe[s], workload.saved[s]) * (held - restored) + workload.saved[s] * restored
        else:
            size = workload.saved[s] * held
        until_i += size * len(forward[s])
        left = min(workload.saved[s], workload.weight_saved[s]) if workload.split else 0.0
        until_w += left * cell.weight_grad[s] * len(forward[s])
    first = min(forward[s][0] for s in own)
    last = min(times.tail[Kind.INPUT_GRAD][s][-1] for s in own)
    return first + max(until_i / capacity + last, (until_i + until_w) / capacity)


Job = tuple[float, float, float]
"""Head, duration and tail in seconds."""


def one_machine_bound(jobs: Iterable[Job]) -> float:
    """Return the makespan in seconds of the preemptive schedule of one machine: it always runs the released job with the longest tail.

    The makespan is a lower bound on that of every schedule: Jackson, 1955; Carlier, "The One-Machine Sequencing Problem", 1982.
    O(n log n).
    """
    ordered = sorted(jobs)
    released: list[list[float]] = []  # [minus the tail, seconds left]
    count, following = len(ordered), 0
    now = longest = 0.0
    while following < count or released:
        if not released:
            now = max(now, ordered[following][0])
        while following < count and ordered[following][0] <= now:
            _, seconds, tail = ordered[following]
            heappush(released, [-tail, seconds])
            following += 1
        until = ordered[following][0] if following < count else inf
        urgent = released[0]
        if now + urgent[1] <= until:
            heappop(released)
            now += urgent[1]
            longest = max(longest, now - urgent[0])
        else:
            urgent[1] -= until - now
            now = until
    return longest


def host_lower_bound(workload: Workload, n_microbatches: int, costs: Costs, *, recompute: bool = False) -> float:
    """Return a lower bound on the makespan in seconds; 0 if launching takes no time and no devices share a stream.

    `recompute`: every stage may recompute or not; else the flags of the workload hold.
    """
    again = [flag and not recompute for flag in workload.is_recomputed]
    by_thread, by_stream = dict[int, float](), dict[int, float]()
    cell = least_seconds(workload)
    for s, device in enumerate(workload.placement):
        if any(costs.launch) and costs.hosts is not Hosts.STEP:
            thread = device if costs.hosts is Hosts.DEVICE else 0
            launches = 3 + again[s]  # F, I, W and perhaps R; B launches as much as I and W
            by_thread[thread] = by_thread.get(thread, 0.0) + launches * costs.launch[s]
        if costs.streams:
            work = cell.forward[s] + again[s] * cell.recompute[s] + cell.input_grad[s] + cell.weight_grad[s]
            by_stream[costs.streams[device]] = by_stream.get(costs.streams[device], 0.0) + work
    return n_microbatches * max((*by_thread.values(), *by_stream.values()), default=0.0)
