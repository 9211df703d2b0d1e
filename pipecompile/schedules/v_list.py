"""List schedules on a V, under a quota per stage: how V-Half and V-Min, and ZBV when micro-batches are few, are made.

order "F1 F0 I0 I1"     which of the four a free device starts, when it may: a forward of its second stage first, ...
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.schedules.search.list_scheduling import ListSchedule, PriorityRule, list_schedule
from pipecompile.schedules.search.workload import unit_workload
from pipecompile.schedules.stage_placement import vee

__all__ = ["list_schedule_on_vee"]


def list_schedule_on_vee(
    n_microbatches: int, quotas: tuple[Sequence[int], Sequence[int]], room: int, order: str
) -> ListSchedule:
    """A schedule in which device d holds at most `room` stages on a micro-batch until their W, and of its first and second stage
    at most `quotas[0][d]` and `quotas[1][d]` until their I.
    """
    first, second = quotas
    n_devices, rank = len(first), {name: place for place, name in enumerate(order.split())}
    rule = PriorityRule(
        in_flight=(*first, *reversed(second)),
        forward=(rank["F0"],) * n_devices + (rank["F1"],) * n_devices,
        backward=(rank["I0"],) * n_devices + (rank["I1"],) * n_devices,
    )
    listed = list_schedule(unit_workload(vee(n_devices)), n_microbatches, (room,) * n_devices, rule)
    assert listed is not None, "there is room for a micro-batch"
    return listed
