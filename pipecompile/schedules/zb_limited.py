"""List schedules of a chain with a split backward under a limit of memory: the base of ZB-1p and ZB-2p.

limit 6, P = 3      device 0 holds 6 micro-batches from F to I, device 1 4, device 2 2; each at most 6 until their W
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.search.list_scheduling import PriorityRule, list_schedule
from pipecompile.schedules.search.workload import unit_workload

__all__ = ["zero_bubble_within"]


def zero_bubble_within(limit: int, n_stages: int, n_microbatches: int, name: str) -> Schedule:
    """Return the list schedule at equal times in which at most `limit` micro-batches wait for their W on any device.

    `limit` is a multiple of the number of stages, one per device. A free device runs F if at most `limit` / P micro-batches per
    stage that follows are in flight, else I, and W if it would wait.
    """
    placement = loop(n_stages, n_stages)
    quotas = tuple(limit * (n_stages - stage) / n_stages for stage in range(n_stages))
    rule = PriorityRule(in_flight=quotas, forward=(0.0,) * n_stages, backward=(1.0,) * n_stages)
    result = list_schedule(unit_workload(placement), n_microbatches, (limit,) * n_stages, rule)
    assert result is not None, "one micro-batch fits"
    return Schedule(n_stages, n_microbatches, placement, result.rows, name)
