"""What windows say about the counts of a flow holds for every cut that stays below the target."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import choices_of, dense_blocks, legal_assignments, loads_of, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.bounds.stage_windows import StageWindows, compute_windows
from pipecompile.partitioners.clusters import Clusters, coarsen
from pipecompile.partitioners.ilp.boundary_windows import tighten_windows
from pipecompile.partitioners.ilp.consumer_counts import ConsumerCounts
from pipecompile.partitioners.ilp.solver_backend import Mip
from pipecompile.partitioners.ilp.step_variables import StepVariables
from pipecompile.partitioners.machine import Machine


def test_every_stage_between_the_first_and_the_last_consumer_consumes_if_no_stage_fits_between_two():
    names = [f"v{i}" for i in range(10)]  # a chain of ones, all consume v0; three stages of at least 2
    pairs = tuple(zip(names, names[1:], strict=False))
    tensor = Tensor("v0", tuple(names[1:]), 1.0)
    problem = Problem(tuple(Node(name, 1.0) for name in names), pairs, (tensor,), multicast=False)
    clusters, machine = coarsen(problem), Machine.of(problem, 3)
    windows, loose = compute_windows(clusters, machine, 10.0), compute_windows(clusters, machine, 20.0)
    windows.bound_work(0, at_least=2.0, at_most=4.0)
    windows.bound_work(1, at_least=6.0, at_most=8.0)
    steps = StepVariables(Mip(), windows.earliest.tolist(), windows.latest.tolist())
    flow = clusters.flows[0]
    assert ConsumerCounts(clusters, windows).min_stages_after(0, flow, 0) == 2
    assert ConsumerCounts(clusters, loose).min_stages_after(0, flow, 0) == 0
    here = sum(steps.is_possible(consumer, 1) for consumer in flow.consumers)
    assert len(ConsumerCounts(clusters, windows).terms(steps, 0, flow, 1)) == here + 1
    assert len(ConsumerCounts(clusters, loose).terms(steps, 0, flow, 1)) == here


@settings(max_examples=60, deadline=None)
@given(st.one_of(dense_blocks(), problems(max_nodes=6, memory=False, direct=True)), st.floats(1.0, 2.0))
def test_no_cut_below_the_target_has_fewer_counts_than_said(case, factor):
    problem, n_stages = case
    clusters, machine = coarsen(problem), Machine.of(*case)
    cuts = [(cut, max(load for load, _ in loads_of(problem, cut, n_stages, choice)))
            for cut in legal_assignments(problem, n_stages) for choice in choices_of(problem, n_stages)]  # fmt: skip
    best = min((value for _, value in cuts), default=inf)
    windows = compute_windows(clusters, machine, best * factor * (1 + 1e-9))
    if windows.is_empty or best in (0.0, inf):
        return
    tighten_windows(clusters, machine, windows, best * factor * (1 + 1e-6), inf)
    narrow(windows, cuts, best * factor, clusters)
    counts = ConsumerCounts(clusters, windows)
    for cut, value in cuts:
        if value > best * factor:
            continue
        stage = [cut[names[0]] for names in clusters.members]
        for number, flow in enumerate(clusters.flows):
            reading = {stage[c] for c in flow.consumers} - {stage[flow.source]}
            assert counts.min_stages_after(number, flow, stage[flow.source]) <= len(reading)


def narrow(windows: StageWindows, cuts: list[tuple[dict[str, int], float]], target: float, clusters: Clusters) -> None:
    """Apply the tightest work bounds that hold for all these cuts, as programs of single stages would find them."""
    good = [[cut[names[0]] for names in clusters.members] for cut, value in cuts if value <= target]
    for boundary in range(len(windows.min_work)):
        work = [sum(time for time, s in zip(clusters.time, stage, strict=True) if s <= boundary) for stage in good]
        windows.bound_work(boundary, at_least=min(work) * (1 - 1e-9), at_most=max(work) * (1 + 1e-9))
