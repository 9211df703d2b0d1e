"""Search, exhaust and polish: each is legal, and none is worse than what it was given."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, problems

from pipecompile.partitioners.clusters import Stages, coarsen
from pipecompile.partitioners.dp import GAP, exhaust, polish, search
from pipecompile.partitioners.loads import bottleneck


@settings(max_examples=80, deadline=None)
@given(problems())
def test_each_step_is_between_the_step_before_and_the_optimum(case):
    clusters, stages = coarsen(case[0]), Stages.of(*case)
    optimum, _ = brute_force(*case)
    stage = search(clusters, stages, 0.0, inf)
    if stage is None:
        return
    values = [bottleneck(clusters, stages, stage)]
    for better in (polish(clusters, stages, stage, inf), exhaust(clusters, stages, stage)[0]):
        assert all(better[a] <= better[b] for a, b in clusters.arcs)
        values.append(bottleneck(clusters, stages, better))
    assert optimum * (1 - 1e-9) <= min(values)
    assert max(values) == values[0] < inf


@settings(max_examples=60, deadline=None)
@given(problems(multicast=True))
def test_exhaust_proves_what_it_finds(case):
    clusters, stages = coarsen(case[0]), Stages.of(*case)
    stage = search(clusters, stages, 0.0, inf)
    if stage is not None:
        stage, bound = exhaust(clusters, stages, stage)
        optimum, _ = brute_force(*case)
        assert bottleneck(clusters, stages, stage) == pytest.approx(optimum, rel=GAP)
        assert bound == pytest.approx(optimum, rel=GAP)
