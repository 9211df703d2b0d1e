"""Lower bound on the makespan of every schedule of a workload.

    device d  │ head │ F F F F │ ......  │ I W I W I W I W          head     until the first forward can start on d
              └──────┴─────────┴─────────┴─────────────────▶        turn     until the first gradient can arrive: before
                                 turn                                        that, d can only run forwards

The bound is the longest of
  head + M T                       over all devices; for equal stages M T + (P - 1) tF / v
  turn + M (tI + tW)               over all devices
  head + D (1 + (M - 1) div K)     over all stages: a micro-batch occupies memory for at least D seconds, from F to W, and at
                                   most K micro-batches fit at a time
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.schedules.search.workload import Transfer, Workload

__all__ = ["makespan_lower_bound"]


def makespan_lower_bound(workload: Workload, n_microbatches: int, capacity: Sequence[float] | None = None) -> float:
    """Return a lower bound on the makespan in seconds. `capacity` is the memory per device, in the unit of the workload; None
    for unlimited memory. Linear in the number of transfers.
    """
    stages, m = range(workload.n_stages), n_microbatches
    recompute = [workload.recompute[s] if workload.is_recomputed[s] else 0.0 for s in stages]
    until_gradient, whole = _shortest_backward(workload)
    head = _earliest(workload.forward_transfers, workload.forward, [0.0 for _ in stages], list(stages))
    turn = [head[s] + workload.forward[s] + recompute[s] for s in stages]
    turn = _earliest(workload.gradient_transfers, until_gradient, turn, list(reversed(stages)))
    longest = 0.0
    for device in set(workload.placement):
        own = [s for s in stages if workload.placement[s] == device]
        backward = sum(whole[s] for s in own)
        load = backward + sum(workload.forward[s] + recompute[s] for s in own)
        longest = max(longest, min(head[s] for s in own) + m * load, min(turn[s] for s in own) + m * backward)
    for s in stages:
        occupied = turn[s] + whole[s] - head[s]
        turns = 1 if capacity is None else 1 + (m - 1) // _most_at_once(workload, s, capacity[workload.placement[s]])
        longest = max(longest, head[s] + turns * occupied)
    return longest


def _shortest_backward(workload: Workload) -> tuple[Sequence[float], Sequence[float]]:
    """Return, per stage, the least seconds of a backward until its gradients are sent, and of the whole backward."""
    if not workload.split:
        return workload.backward, workload.backward
    rows = zip(workload.input_grad, workload.weight_grad, workload.backward, strict=True)
    return tuple(zip(*((min(i, b), min(i + w, b)) for i, w, b in rows), strict=True))  # type: ignore[return-value]


def _most_at_once(workload: Workload, s: int, capacity: float) -> int:
    """Return the number of micro-batches of stage s that fit in `capacity` if other stages take no memory."""
    least = workload.recipe[s] if workload.is_recomputed[s] else workload.saved[s]
    least = min(least, workload.weight_saved[s]) if workload.split else least
    return max(1, int(min(1e9, capacity / least * (1 + 1e-9)))) if least else 10**9


def _earliest(
    sent: Sequence[Sequence[Transfer]], seconds: Sequence[float], ready: list[float], order: list[int]
) -> list[float]:
    """Return the earliest start of each stage if devices and links are free. `order` lists senders before receivers."""
    start = list(ready)
    for s in order:
        for transfer in sent[s]:
            for receiver in transfer.stages:
                start[receiver] = max(start[receiver], start[s] + seconds[s] + transfer.seconds)
    return start
