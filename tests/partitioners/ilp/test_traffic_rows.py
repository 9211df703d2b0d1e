"""The integer program charges flows, memory and recomputation as the objective does."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import legal_assignments, problems

from pipecompile.partitioners.bounds.stage_windows import compute_windows
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.consumer_counts import ConsumerCounts
from pipecompile.partitioners.ilp.memory_rows import MemoryRows
from pipecompile.partitioners.ilp.solver_backend import LinearExpr, Mip
from pipecompile.partitioners.ilp.step_variables import StepVariables
from pipecompile.partitioners.ilp.traffic_rows import TrafficRows
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import LoadTracker


@settings(max_examples=80, deadline=None)
@given(problems(max_nodes=6), st.data())
def test_a_fixed_assignment_costs_as_much_as_under_the_objective(case, data):
    problem, n_stages = case
    legal = list(legal_assignments(problem, n_stages))
    if not legal:
        return
    stage_of = data.draw(st.sampled_from(legal))
    clusters, machine = coarsen(problem), Machine.of(*case)
    stage = [stage_of[names[0]] for names in clusters.members]
    n, mip = len(clusters), Mip()
    steps = StepVariables(mip, [0] * n, [n_stages - 1] * n)
    steps.add_monotonicity(range(n), range(n_stages - 1))
    counts = ConsumerCounts(clusters, compute_windows(clusters, machine, inf))
    traffic = TrafficRows(steps, clusters, machine, counts, 1.0)
    memory_rows = MemoryRows(steps, clusters, machine, traffic, 100.0, 1.0, 1000.0)
    for v, s in enumerate(stage):
        mip.add_row(steps.in_stage(v, s), 1.0)
    total = LinearExpr()
    for d, row in enumerate(expected := LoadTracker(clusters, machine, stage).device_loads()):
        again = LinearExpr()
        for s in machine.stages_on(d):
            again.add(memory_rows.recompute_time(s), 100.0)
        memory = memory_rows.memory(d)
        mip.add_row(row.memory + 1e-5, memory)
        total.add(traffic.sent[d]).add(traffic.received[d]).add(memory).add(again)
    outcome = mip.minimise(total, 10.0)
    assert outcome.is_optimal
    assert steps.assignment(outcome.values) == stage
    work = sum(clusters.time[v] / machine.speed[machine.device_of[s]] for v, s in enumerate(stage))
    cost = sum(row.sent + row.received + row.memory + row.compute for row in expected) - work
    assert outcome.bound <= cost + 1e-4
    if None not in machine.recompute:
        assert outcome.bound >= cost - 1e-4
