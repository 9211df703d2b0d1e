"""Choose the gradients that a device adds up before it sends them: those of a value that several of its stages used.

    eager     value of 0, used in 1, 2, 3, 5        gradients add up as ((g5 + g3) + g2) + g1

    device a: 0    device b: 1 5    device c: 2 3          5 and 3 are the first of the order, but on two devices: four are sent
    device a: 0    device b: 3 5    device c: 1 2          b sends g5 + g3, c sends both of its own: three are sent
                                    with "device"          c sends g2 + g1: two are sent, (g5 + g3) + (g2 + g1) is rounded otherwise

Linear in the number of consumers and actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipecompile.ir import BACKWARDS, HOST, Route, Schedule
from pipecompile.ir.routes import Sums

__all__ = ["with_sums"]


def with_sums(schedule: Schedule, routes: Sequence[Route], sums: Sums) -> tuple[Route, ...]:
    """Return the routes with the sums of gradients that a device can make in this schedule. Routes that have sums keep them."""
    if schedule.directions:
        return tuple(routes)  # two consumers may share a device in one direction and not in the other
    begun = _order_of_backwards(schedule)
    result = []
    for route in routes:
        groups = () if route.sums or not begun else _groups(route, schedule.placement, begun, sums)
        result.append(replace(route, sums=groups) if groups else route)
    return tuple(result)


def _groups(
    route: Route, placement: Sequence[int], begun: dict[int, list[int]], sums: Sums
) -> tuple[tuple[int, ...], ...]:
    """Return groups of consumers on one device whose backwards run in falling order, of those that eager adds up first if the order
    is to stay.
    """
    if not route.gradient or route.source == HOST:
        return ()
    by_device: dict[int, list[int]] = {}
    falling = sorted((end for end in route.consumers if end != HOST), reverse=True)
    if sums == "eager":
        falling = [] if HOST in route.consumers else falling[: _run_on_one_device(falling, placement)]
    for stage in falling:
        if placement[stage] != placement[route.source] and stage in begun:
            by_device.setdefault(placement[stage], []).append(stage)
    return tuple(tuple(group) for group in by_device.values() if len(group) > 1 and _is_in_order(group, begun))


def _run_on_one_device(stages: Sequence[int], placement: Sequence[int]) -> int:
    """Return how many of the first stages are on the device of the first."""
    others = (index for index, stage in enumerate(stages) if placement[stage] != placement[stages[0]])
    return next(others, len(stages))


def _is_in_order(group: Sequence[int], begun: dict[int, list[int]]) -> bool:
    """Return whether every micro-batch goes back through the stages of the group one after the other."""
    pairs = zip(group, group[1:], strict=False)
    return all(a < b for one, other in pairs for a, b in zip(begun[one], begun[other], strict=True))


def _order_of_backwards(schedule: Schedule) -> dict[int, list[int]]:
    """Return, per stage, the place of the B or I of each micro-batch in the row of its device."""
    begun: dict[int, list[int]] = {}
    for row in schedule.rows:
        for place, action in enumerate(row):
            if action.kind in BACKWARDS:
                begun.setdefault(action.stage, [0] * schedule.n_microbatches)[action.microbatch] = place
    return begun
