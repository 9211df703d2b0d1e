"""Lower bound on the step from what devices share: the threads of the host that launch, and streams of several devices.

    host       launch 0F0 │ launch 1F0 │ ... │ launch 0W7        a step ends no earlier than the last launch
    stream 0   0F0 │ 1F0 │ 1B0 │ ...                             devices on one stream compute one after another

`makespan_bound.py` has the bound from devices, chains and memory, which knows of neither.
"""

from __future__ import annotations

from pipecompile.schedules.search.cell_seconds import least_seconds
from pipecompile.schedules.search.workload import Workload
from pipecompile.simulation.costs import Costs, Hosts

__all__ = ["host_lower_bound"]


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
