"""What windows say about the readers of a flow holds for every cut that stays below the target."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import choices_of, dense_blocks, legal_assignments, loads_of, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.bounds.stage_windows import Windows, windows
from pipecompile.partitioners.clusters import Clusters, coarsen
from pipecompile.partitioners.ilp.boundary_windows import tighten
from pipecompile.partitioners.ilp.consumer_counts import Readers
from pipecompile.partitioners.ilp.solver_backend import Mip
from pipecompile.partitioners.ilp.step_variables import Steps
from pipecompile.partitioners.machine import Stages


def test_every_stage_reads_from_the_first_to_the_last_reader_when_no_stage_fits_between_two():
    names = [f"v{i}" for i in range(10)]  # a chain of ones, all read v0; three stages of at least 2
    pairs = tuple(zip(names, names[1:], strict=False))
    tensor = Tensor("v0", tuple(names[1:]), 1.0)
    problem = Problem(tuple(Node(name, 1.0) for name in names), pairs, (tensor,), multicast=False)
    clusters, stages = coarsen(problem), Stages.of(problem, 3)
    left, loose = windows(clusters, stages, 10.0), windows(clusters, stages, 20.0)
    left.bound(0, least=2.0, most=4.0)
    left.bound(1, least=6.0, most=8.0)
    steps = Steps(Mip(), left.first.tolist(), left.last.tolist())
    flow = clusters.flows[0]
    assert Readers(clusters, left).fewest(0, flow, 0) == 2
    assert Readers(clusters, loose).fewest(0, flow, 0) == 0
    here = sum(steps.may_be(consumer, 1) for consumer in flow.consumers)
    assert len(Readers(clusters, left).terms(steps, 0, flow, 1)) == here + 1
    assert len(Readers(clusters, loose).terms(steps, 0, flow, 1)) == here


@settings(max_examples=60, deadline=None)
@given(st.one_of(dense_blocks(), problems(most=6, memory=False, direct=True)), st.floats(1.0, 2.0))
def test_no_cut_below_the_target_has_fewer_readers_than_said(case, factor):
    problem, n_stages = case
    clusters, stages = coarsen(problem), Stages.of(*case)
    cuts = [(cut, max(load for load, _ in loads_of(problem, cut, n_stages, choice)))
            for cut in legal_assignments(problem, n_stages) for choice in choices_of(problem, n_stages)]  # fmt: skip
    best = min((value for _, value in cuts), default=inf)
    left = windows(clusters, stages, best * factor * (1 + 1e-9))
    if left.empty or best in (0.0, inf):
        return
    tighten(clusters, stages, left, best * factor * (1 + 1e-6), inf)
    narrow(left, cuts, best * factor, clusters)
    readers = Readers(clusters, left)
    for cut, value in cuts:
        if value > best * factor:
            continue
        stage = [cut[names[0]] for names in clusters.members]
        for number, flow in enumerate(clusters.flows):
            reading = {stage[c] for c in flow.consumers} - {stage[flow.source]}
            assert readers.fewest(number, flow, stage[flow.source]) <= len(reading)


def narrow(left: Windows, cuts: list[tuple[dict[str, int], float]], target: float, clusters: Clusters) -> None:
    """The tightest bounds on work that hold for all these cuts, as programs of single stages would find them."""
    good = [[cut[names[0]] for names in clusters.members] for cut, value in cuts if value <= target]
    for boundary in range(len(left.least)):
        work = [sum(time for time, s in zip(clusters.time, stage, strict=True) if s <= boundary) for stage in good]
        left.bound(boundary, least=min(work) * (1 - 1e-9), most=max(work) * (1 + 1e-9))
