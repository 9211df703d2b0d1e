"""List schedules on a V with a quota per stage: the common part of V-Half, V-Min, and of ZBV and DualPipeV with few micro-batches.

order "F1 F0 I0 I1"     priorities of a free device: first a forward of its second stage, then one of its first stage, ...
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.schedules.building_blocks import vee
from pipecompile.schedules.search.list_scheduling import ListSchedule, PriorityRule, list_schedule
from pipecompile.schedules.search.workload import unit_workload

__all__ = ["few_on_vee", "list_schedule_on_vee"]

_ORDERS = "F1 F0 I0 I1", "I0 I1 F1 F0"
"""Priorities for too few micro-batches to fill a V: for every P up to 10 and M below 2 P one of the two is the fastest of all 24."""


def few_on_vee(n_microbatches: int, n_devices: int) -> ListSchedule:
    """Return the fastest list schedule of `_ORDERS` at equal times, with at most P micro-batches that wait for their W.

    Each order is tried without quotas, and with P - 1 micro-batches of the second stage and P + 1 of the first: of P = 7 and M = 10
    that is faster by a tick.
    """
    unbounded = (n_microbatches,) * n_devices
    fewer = (min(n_devices + 1, n_microbatches),) * n_devices, (max(n_devices - 1, 1),) * n_devices
    results = (
        list_schedule_on_vee(n_microbatches, quotas, 2 * n_devices, order)
        for quotas in ((unbounded, unbounded), fewer)
        for order in _ORDERS
    )
    return min(results, key=lambda result: result.seconds)


def list_schedule_on_vee(
    n_microbatches: int, quotas: tuple[Sequence[int], Sequence[int]], capacity: int, order: str
) -> ListSchedule:
    """Return the list schedule at equal times of F, I and W.

    On device d at most `capacity` pairs of a stage and a micro-batch wait for their W, and at most `quotas[0][d]` and
    `quotas[1][d]` micro-batches of its first and second stage wait for their I.
    """
    first, second = quotas
    n_devices, rank = len(first), {name: place for place, name in enumerate(order.split())}
    rule = PriorityRule(
        in_flight=(*first, *reversed(second)),
        forward=(rank["F0"],) * n_devices + (rank["F1"],) * n_devices,
        backward=(rank["I0"],) * n_devices + (rank["I1"],) * n_devices,
    )
    result = list_schedule(unit_workload(vee(n_devices)), n_microbatches, (capacity,) * n_devices, rule)
    assert result is not None, "one micro-batch fits"
    return result
