"""List schedules on a V with a quota per stage: the common part of V-Half, V-Min, and ZBV with few micro-batches.

order "F1 F0 I0 I1"     priorities of a free device: first a forward of its second stage, then one of its first stage, ...
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.schedules.building_blocks import vee
from pipecompile.schedules.search.list_scheduling import ListSchedule, PriorityRule, list_schedule
from pipecompile.schedules.search.workload import unit_workload

__all__ = ["list_schedule_on_vee"]


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
