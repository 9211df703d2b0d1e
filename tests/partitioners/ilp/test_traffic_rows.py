"""The integer program charges flows, memory and recomputation as the objective does."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import legal_assignments, problems

from pipecompile.partitioners.bounds.stage_windows import windows
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.consumer_counts import Readers
from pipecompile.partitioners.ilp.memory_rows import Holdings
from pipecompile.partitioners.ilp.solver_backend import Linear, Mip
from pipecompile.partitioners.ilp.step_variables import Steps
from pipecompile.partitioners.ilp.traffic_rows import Traffic
from pipecompile.partitioners.machine import Stages
from pipecompile.partitioners.objective import Ledger


@settings(max_examples=80, deadline=None)
@given(problems(most=6), st.data())
def test_a_given_assignment_costs_what_the_objective_says(case, data):
    problem, n_stages = case
    legal = list(legal_assignments(problem, n_stages))
    if not legal:
        return
    stage_of = data.draw(st.sampled_from(legal))
    clusters, stages = coarsen(problem), Stages.of(*case)
    stage = [stage_of[names[0]] for names in clusters.members]
    n, mip = len(clusters), Mip()
    steps = Steps(mip, [0] * n, [n_stages - 1] * n)
    steps.rise(range(n), range(n_stages - 1))
    readers = Readers(clusters, windows(clusters, stages, inf))
    traffic = Traffic(steps, clusters, stages, readers, 1.0)
    holdings = Holdings(steps, clusters, stages, traffic, 100.0, 1.0, 1000.0)
    for v, s in enumerate(stage):
        mip.require(steps.inside(v, s), 1.0)
    total = Linear()
    for d, row in enumerate(expected := Ledger(clusters, stages, stage).rows()):
        again = Linear()
        for s in stages.on(d):
            again.add(holdings.again(s), 100.0)
        memory = holdings.memory(d)
        mip.require(row.memory + 1e-5, memory)
        total.add(traffic.sent[d]).add(traffic.received[d]).add(memory).add(again)
    outcome = mip.minimise(total, 10.0)
    assert outcome.done
    assert steps.stages(outcome.values) == stage
    work = sum(clusters.time[v] / stages.speed[stages.device[s]] for v, s in enumerate(stage))
    cost = sum(row.sent + row.received + row.memory + row.compute for row in expected) - work
    assert outcome.bound <= cost + 1e-4
    if None not in stages.recompute:
        assert outcome.bound >= cost - 1e-4
