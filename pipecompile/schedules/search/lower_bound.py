"""No step is shorter: what every order of the same work takes.

    device d  │ head │ F F F F │ ......  │ I W I W I W I W          head     until the first forward gets there
              └──────┴─────────┴─────────┴─────────────────▶        turn     until the first gradient gets there: before
                                 turn                                        that, d can only run forwards

The longest of
  head + M T                  over all devices; for equal stages that is M T + (P - 1) tF / v
  turn + M (tI + tW)
  head + D (1 + (M - 1) div K)     a cell holds its memory for at least D, from F to W and all between, and K fit at one time
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.schedules.search.workload import Parcel, Work

__all__ = ["shortest_step"]


def shortest_step(work: Work, n_microbatches: int, room: Sequence[float] | None = None) -> float:
    """A lower bound on the makespan, in seconds, with `room` per device or with any amount. Linear in the parcels."""
    stages, m = range(work.n_stages), n_microbatches
    again = [work.recompute[s] if work.again[s] else 0.0 for s in stages]
    first, whole = _least(work)
    head = _earliest(work.ahead, work.forward, [0.0 for _ in stages], list(stages))
    turn = [head[s] + work.forward[s] + again[s] for s in stages]
    turn = _earliest(work.back, first, turn, list(reversed(stages)))
    longest = 0.0
    for device in set(work.placement):
        own = [s for s in stages if work.placement[s] == device]
        backward = sum(whole[s] for s in own)
        load = backward + sum(work.forward[s] + again[s] for s in own)
        longest = max(longest, min(head[s] for s in own) + m * load, min(turn[s] for s in own) + m * backward)
    for s in stages:
        alone = turn[s] + whole[s] - head[s]
        turns = 1 if room is None else 1 + (m - 1) // _at_once(work, s, room[work.placement[s]])
        longest = max(longest, head[s] + turns * alone)
    return longest


def _least(work: Work) -> tuple[Sequence[float], Sequence[float]]:
    """The least that each stage takes until its gradients go out, and for the whole backward."""
    if not work.split:
        return work.backward, work.backward
    rows = zip(work.input_grad, work.weight_grad, work.backward, strict=True)
    return tuple(zip(*((min(i, b), min(i + w, b)) for i, w, b in rows), strict=True))  # type: ignore[return-value]


def _at_once(work: Work, s: int, room: float) -> int:
    """How many micro-batches can be under way on a stage, if no other stage needs anything."""
    least = work.kept[s] if work.again[s] else work.saved[s]
    least = min(least, work.weight_saved[s]) if work.split else least
    return max(1, int(min(1e9, room / least * (1 + 1e-9)))) if least else 10**9


def _earliest(
    sent: Sequence[Sequence[Parcel]], seconds: Sequence[float], ready: list[float], order: list[int]
) -> list[float]:
    """When each stage can start, if nobody else is in the way; `order` has senders before receivers."""
    start = list(ready)
    for s in order:
        for parcel in sent[s]:
            for other in parcel.stages:
                start[other] = max(start[other], start[s] + seconds[s] + parcel.seconds)
    return start
