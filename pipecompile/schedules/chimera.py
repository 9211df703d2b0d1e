"""Chimera: two pipelines over the same devices, one down and one up, so that each fills the bubbles of the other.

    device 0 │ F0 F1 B1 B1 F2 B0 B0 F3 B3 B3 B2 B2
    device 1 │ F1 F0 B0 B0 F3 B1 B1 F2 B2 B2 B3 B3
             └───────────────────────────────────▶ time    P = 2, M = 4

Micro-batches 0 and 2 go down: their stage 0 is on device 0. Micro-batches 1 and 3 go up: their stage 0 is on device 1.
Each direction is 1F1B with half of the micro-batches, the even ones down and the odd ones up. A device takes the action that is ready;
of two, that of the lower micro-batch. Every device has the parameters of two stages, whose gradients are added.

Bubble: makespan M T + (P - 2) (tF + tB / 2) for M = P, P even and tB = 2 tF, and tF less for more micro-batches; 1F1B has
(P - 1) (tF + tB).
Memory: P / 2 + 1 to P micro-batches in flight for M = P, each of one stage, and at most P + 1; parameters, gradients and optimizer
state of two stages.
When: M is about P, and the parameters of two stages fit on a device.

Li, Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines", SC 2021, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from pipecompile.ir import Action, Kind, Schedule
from pipecompile.ir.directions import Direction
from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.one_f_one_b import build_one_f_one_b

__all__ = ["build_chimera"]

_SECONDS = {Kind.FORWARD: 1, Kind.BACKWARD: 2}
"""Times of actions by which the two pipelines are merged."""


def build_chimera(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return Chimera with a stage of each direction per device. One micro-batch has one direction, and is 1F1B."""
    down = loop(n_stages, n_devices)
    up, own = tuple(reversed(down)), (range(0, n_microbatches, 2), range(1, n_microbatches, 2))
    rows: list[list[tuple[Action, ...]]] = [[] for _ in down]
    for placement, microbatches in zip((down, up), own, strict=True):
        if microbatches:
            part = build_one_f_one_b(n_stages, len(microbatches), n_devices)
            for stage, row in enumerate(part.rows):
                numbered = (Action(stage, action.kind, microbatches[action.microbatch]) for action in row)
                rows[placement[stage]].append(tuple(numbered))
    directions = (Direction(up, tuple(own[1])),) if own[1] and n_stages > 1 else ()
    return Schedule(n_stages, n_microbatches, down, _merged(rows, n_stages), "chimera", directions=directions)


def _merged(rows: Sequence[Sequence[Sequence[Action]]], n_stages: int) -> tuple[tuple[Action, ...], ...]:
    """Return one row per device of its two queues: of what can run, the action of the lowest micro-batch. O(n log P) for n actions."""
    queues = [[iter(queue) for queue in row] for row in rows]
    heads = [[next(queue, None) for queue in row] for row in queues]
    merged: list[list[Action]] = [[] for _ in rows]
    end: dict[Action, int] = {}
    idle = [(0, device) for device in range(len(rows))]
    while idle:
        now, device = heappop(idle)
        ready = [(_ready(head, end, n_stages), head, place) for place, head in enumerate(heads[device]) if head]
        able = min(((head.microbatch, place, head) for at, head, place in ready if at <= now), default=None)
        if able is not None:
            _, place, action = able
            merged[device].append(action)
            end[action] = now = now + _SECONDS[action.kind]
            heads[device][place] = next(queues[device][place], None)
        elif ready:
            now = min(at if at < _NEVER else now + 1 for at, _, _ in ready)
        if any(heads[device]):
            heappush(idle, (now, device))
    return tuple(map(tuple, merged))


_NEVER = 1 << 60
"""Time of an action that needs one that has no time yet."""


def _ready(action: Action, end: dict[Action, int], n_stages: int) -> int:
    """Return when an action has all that it needs."""
    return max((end.get(need, _NEVER) for need in _needs(action, n_stages)), default=0)


def _needs(action: Action, n_stages: int) -> Iterator[Action]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.BACKWARD:
        yield Action(stage, Kind.FORWARD, microbatch)
        if stage + 1 < n_stages:
            yield Action(stage + 1, Kind.BACKWARD, microbatch)
    elif stage:
        yield Action(stage - 1, Kind.FORWARD, microbatch)
