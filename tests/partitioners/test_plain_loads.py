"""Loads that moves update are those of the objective."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import problems

from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import LoadTracker
from pipecompile.partitioners.plain_loads import PlainLoads


@settings(max_examples=200, deadline=None)
@given(problems(), st.booleans(), st.data())
def test_loads_after_moves_are_those_of_the_objective(case, multicast, data):
    problem, n_stages = case
    problem = replace(
        problem, multicast=multicast, links=None, overlap=False, placement=None, recompute=None, memory_limit=None,
        in_flight=None, speed=tuple(data.draw(st.sampled_from([0.5, 1.0, 3.0])) for _ in range(n_stages)),
    )  # fmt: skip
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    stages = st.integers(0, n_stages - 1)
    plain = PlainLoads(clusters, machine, [data.draw(stages) for _ in clusters.time])
    for _ in range(6):
        plain.move(data.draw(st.integers(0, len(clusters) - 1)), data.draw(stages))
        loads = LoadTracker(clusters, machine, plain.stage_of).device_loads()
        assert plain.loads == pytest.approx([row.load for row in loads])
