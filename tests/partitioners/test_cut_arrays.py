"""The arrays give the stages and transfers that a walk over the graph gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from partitioners.oracle import legal_assignments, problems

from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.cut_arrays import CutArrays
from pipecompile.partitioners.machine import Machine


def walked(clusters, machine: Machine, placement, stages) -> dict[tuple[int, int], float]:
    """Return the pairs of stages that depend on each other, with the seconds between them, by a walk."""
    edges = {(stages[a], stages[b]): 0.0 for a, b in clusters.arcs}
    for flow in clusters.flows:
        for target in {stages[consumer] for consumer in flow.consumers}:
            pair = stages[flow.source], target
            devices = placement[pair[0]], placement[target]
            factor = machine.link_factor(*devices) if devices[0] != devices[1] else 0.0
            edges[pair] = edges.get(pair, 0.0) + flow.time * factor
    sinks = set(range(len(clusters))) - {a for a, _ in clusters.arcs}
    for sink in sinks:
        edges.setdefault((stages[sink], len(placement) - 1), 0.0)
    return {(a, b): seconds for (a, b), seconds in edges.items() if a < b}


@settings(max_examples=60, deadline=None)
@given(problems(direct=True))
def test_arrays_and_a_walk_agree(case):
    problem, n_stages = case
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    placement = problem.placement or tuple(range(n_stages))
    arrays = CutArrays.of(clusters, machine, placement)
    for _, stage_of in zip(range(20), legal_assignments(problem, n_stages), strict=False):
        stages = [stage_of[names[0]] for names in clusters.members]
        found, expected = arrays.edges(stages), walked(clusters, machine, placement, stages)
        assert [pair for pair, _ in found] == sorted(expected)
        assert all(abs(seconds - expected[pair]) <= 1e-9 * (1 + seconds) for pair, seconds in found)
        sums = [sum(t for t, s in zip(clusters.time, stages, strict=True) if s == stage) for stage in range(n_stages)]
        seconds = arrays.stage_seconds(np.array(clusters.time), stages)
        assert all(
            abs(a - b / machine.speed[d]) <= 1e-9 * (1 + a) for a, b, d in zip(seconds, sums, placement, strict=True)
        )
