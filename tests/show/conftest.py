"""A hand-made plan, its program and timelines: the pictures are tested without the compiler below them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipecompile.ir import (
    Action,
    Instruction,
    Kind,
    Op,
    Operand,
    Program,
    Route,
    Schedule,
    Value,
)
from pipecompile.ir.plan import Plan, StageSummary
from pipecompile.ir.timeline import COMPUTE, Span, Timeline

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
                    name = (
                        f"y{need.stage}#{action.microbatch}"
                        if not back
                        else f"y{action.stage}'{need.stage}#{action.microbatch}"
                    )
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


@pytest.fixture(name="one_f_one_b")
def _one_f_one_b():
    return one_f_one_b


@pytest.fixture(name="played")
def _played():
    return played


@pytest.fixture
def schedule() -> Schedule:
    return one_f_one_b(4, 8)


@pytest.fixture
def predicted(schedule: Schedule) -> Timeline:
    return played(schedule)


@pytest.fixture
def measured(predicted: Timeline) -> Timeline:
    """A fifth slower, and on a clock that did not start at zero."""
    spans = tuple(Span(s.device, s.track, s.name, 5 + 1.2 * s.start, 5 + 1.2 * s.end) for s in predicted.spans)
    memory = tuple(tuple((5 + 1.2 * moment, 1.1 * size) for moment, size in curve) for curve in predicted.memory)
    return replace(predicted, spans=spans, memory=memory)


@pytest.fixture
def program(schedule: Schedule) -> Program:
    """Just the computes, with the chain y0, y1, y2: all that the pictures look at."""
    routes = tuple(Route(f"y{stage}", stage, (stage + 1,), MEBI) for stage in range(3))
    rows = tuple(tuple(_compute(action, schedule.n_stages) for action in row) for row in schedule.rows)
    return Program(schedule.n_stages, schedule.n_microbatches, schedule.placement, routes, rows)


def _compute(action: Action, n_stages: int) -> Instruction:
    s, m = action.stage, action.microbatch
    before = Value(f"y{s - 1}", m) if action.kind is Kind.FORWARD else Value(f"y{s}", m, s + 1)
    after = Value(f"y{s}", m) if action.kind is Kind.FORWARD else Value(f"y{s - 1}", m, s)
    reads = (Operand(before),) if (s > 0 if action.kind is Kind.FORWARD else s < n_stages - 1) else ()
    writes = (Operand(after),) if (s < n_stages - 1 if action.kind is Kind.FORWARD else s > 0) else ()
    return Instruction(Op.COMPUTE, reads, writes, action)


@pytest.fixture
def plan() -> Plan:
    ms = 1e-3
    rows = (
        ("conv1", "layer1.1", 5, 1_400_000, 12.1, 24.3, 310, 12.3, 0, 1),
        ("layer2.0", "layer2.1", 3, 5_000_000, 12.0, 25.0, 210, 6.1, 0, 0),
        ("layer3.0.conv1", "layer3.0.conv1", 3, 8_000_000, 11.9, 23.0, 150, 3.1, 0, 0),
        ("layer4.0.conv1", "flatten", 4, 11_000_000, 9.0, 20.0, 50, 0.004, 1, 0),
    )
    stages = tuple(
        StageSummary(
            i,
            f"cuda:{i}",
            first,
            last,
            nodes,
            n,
            4.0 * n,
            fwd * ms,
            bwd * ms,
            saved * MEBI,
            sent * MEBI,
            skip_in,
            skip_out,
        )
        for i, (first, last, nodes, n, fwd, bwd, saved, sent, skip_in, skip_out) in enumerate(rows)
    )
    devices = tuple(f"cuda:{i}" for i in range(4))
    return Plan("f00d", 4, devices, (0, 1, 2, 3), {}, (), stages, 37 * ms, 36 * ms, "feasible", "ilp", "profile")
