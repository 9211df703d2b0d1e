"""A hand-made plan, its program and timelines: the pictures are tested without the compiler below them."""

from __future__ import annotations

import pytest

from pipecompile.ir import Action, Instruction, Kind, Op, Operand, Program, Route, Schedule, Value
from pipecompile.plan import Plan, StageSummary
from pipecompile.timeline import COMPUTE, Span, Timeline

MEBI = 2.0**20


def one_f_one_b(n_stages: int, n_microbatches: int) -> Schedule:
    """Warm-up forwards, then F and B in turns, then the backwards that are left."""
    rows = []
    for stage in range(n_stages):
        warm = min(n_stages - stage, n_microbatches)
        order = [(Kind.FORWARD, m) for m in range(warm)]
        for m in range(n_microbatches):
            order.append((Kind.BACKWARD, m))
            order += [(Kind.FORWARD, warm + m)] if warm + m < n_microbatches else []
        rows.append(tuple(Action(stage, kind, m) for kind, m in order))
    return Schedule(n_stages, n_microbatches, tuple(range(n_stages)), tuple(rows), "1f1b")


def played(schedule: Schedule, unit: float = 1e-3, copy: float = 0.2) -> Timeline:
    """Earliest start times with F = 1 and B = 2 units, transfers of `copy` units, 8 MiB per forward in flight."""
    done: dict[Action, float] = {}
    spans: list[Span] = []
    clocks, heads = [0.0] * schedule.n_devices, [0] * schedule.n_devices
    while any(heads[d] < len(row) for d, row in enumerate(schedule.rows)):
        for device, row in enumerate(schedule.rows):
            while heads[device] < len(row):
                action = row[heads[device]]
                back = action.kind is Kind.BACKWARD
                last = schedule.n_stages - 1
                need = Action(action.stage + (1 if back else -1), action.kind, action.microbatch)
                if back and action.stage == last:
                    need = Action(last, Kind.FORWARD, action.microbatch)
                if action.stage + back > 0 and need not in done:
                    break
                arrival = done.get(need, 0.0)
                if need in done and need.stage != action.stage:
                    name = f"y{need.stage}#{action.microbatch}" if not back else f"y{action.stage}'{need.stage}#{action.microbatch}"
                    spans.append(Span(need.stage, f"to {device}", name, arrival, arrival + copy * unit))
                    arrival += copy * unit
                start = max(arrival, clocks[device])
                clocks[device] = done[action] = start + (2 if back else 1) * unit
                spans.append(Span(device, COMPUTE, str(action), start, clocks[device]))
                heads[device] += 1
    memory, peaks = [], []
    for device in range(schedule.n_devices):
        curve, level, peak = [(0.0, 20 * MEBI)], 0, 0
        for s in sorted((s for s in spans if s.device == device and s.track == COMPUTE), key=lambda s: s.start):
            level += 1 if "F" in s.name else -1
            peak = max(peak, level)
            curve.append((s.start if "F" in s.name else s.end, (20 + 8 * level) * MEBI))
        memory.append(tuple(curve))
        peaks.append(float(peak))
    return Timeline(schedule.n_devices, tuple(spans), tuple(memory), tuple(peaks))
