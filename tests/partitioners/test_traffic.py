"""The integer program charges flows as the objective does."""

from __future__ import annotations

import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import problems

from pipecompile.partitioners.clusters import Stages, coarsen
from pipecompile.partitioners.loads import loads
from pipecompile.partitioners.steps import run, steps
from pipecompile.partitioners.traffic import Traffic


@settings(max_examples=40, deadline=None)
@given(problems(memory=False, most=6), st.data())
def test_a_given_assignment_costs_what_the_objective_says(case, data):
    clusters, stages = coarsen(case[0]), Stages.of(*case)
    stage = []
    for v in range(len(clusters)):
        low = max((stage[a] for a, b in clusters.arcs if b == v), default=0)
        stage.append(data.draw(st.integers(low, len(stages) - 1)))
    made = steps(clusters, [(0, len(stages) - 1)] * len(clusters), len(stages))
    traffic = Traffic(made, stages)
    for flow in clusters.flows:
        traffic.add(flow, flow.time)
    for v, s in enumerate(stage):
        made.require(made.inside(v, s), 1.0)
    made.model.setObjective(pulp.lpSum([traffic.sent, traffic.received]) + pulp.LpVariable("zero", 0, 0))
    outcome = run(made.model, 10.0)
    expected = loads(clusters, stages, stage)
    assert outcome.done
    assert made.stages() == stage
    assert outcome.bound == pytest.approx(sum(row.sent + row.received for row in expected), abs=1e-5)
