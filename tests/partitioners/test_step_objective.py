"""The estimated step of a cut, and the bound that holds for every cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipecompile as pc
from pipecompile.ir import Route
from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.step_objective import StepObjective, step_lower_bound

TOWERS = Problem(
    tuple(Node(name, 3.0, forward=1.0) for name in ("a", "b", "c", "head")),
    tuple((name, "head") for name in "abc"),
    tuple(Tensor(name, ("head",)) for name in "abc"),
)


def chain(times: list[float]) -> Problem:
    names = [f"n{i}" for i in range(len(times))]
    pairs = list(zip(names, names[1:], strict=False))
    nodes = tuple(Node(name, time, forward=time / 3) for name, time in zip(names, times, strict=True))
    return Problem(nodes, tuple(pairs), tuple(Tensor(a, (b,)) for a, b in pairs))


def objective(problem: Problem, placement: tuple[int, ...], microbatches: int) -> StepObjective:
    return StepObjective(coarsen(problem), Machine.of(problem, len(placement)), placement, microbatches)


def simulated(problem: Problem, stage_of: dict[str, int], n_stages: int, m: int, schedule: str) -> float:
    """Return the seconds of a step, with a route per value that crosses."""
    routes = []
    for tensor in problem.tensors:
        source = stage_of[tensor.source]
        ends = sorted({stage_of[name] for name in tensor.consumers} - {source})
        routes += [Route(tensor.source, source, tuple(ends))] if ends else []
    forward, backward = [0.0] * n_stages, [0.0] * n_stages
    for node in problem.nodes:
        forward[stage_of[node.name]] += node.forward
        backward[stage_of[node.name]] += node.time - node.forward
    order = pc.build_schedule(schedule, n_stages, m, routes=routes)
    halves = [time / 2 for time in backward]
    return pc.simulate(order, routes=routes, forward=forward, input_grad=halves, weight_grad=halves).makespan


def test_towers_beside_each_other_fill_two_stages_and_a_chain_four():
    towers = objective(TOWERS, (0, 1, 2, 3), 8)
    assert towers.score([0, 1, 2, 3])[0] == 2 * 3.0 + 7 * 3.0
    assert objective(chain([3.0] * 4), (0, 1, 2, 3), 8).score([0, 1, 2, 3])[0] == 4 * 3.0 + 7 * 3.0


def test_a_cut_is_estimated_once(monkeypatch: pytest.MonkeyPatch):
    """A search comes back to its cuts."""
    estimated, estimate = [], StepObjective._score
    monkeypatch.setattr(StepObjective, "_score", lambda self, *cut: estimated.append(cut) or estimate(self, *cut))
    towers = objective(TOWERS, (0, 1, 2, 3), 8)
    assert towers.score([0, 1, 2, 3]) == towers.score((0, 1, 2, 3)) != towers.score([0, 0, 2, 3])
    assert len(estimated) == 2


def test_a_transfer_delays_the_path_and_not_the_device():
    far = replace(TOWERS, tensors=(Tensor("a", ("head",), 0.5), *TOWERS.tensors[1:]))
    assert objective(far, (0, 1, 2, 3), 8).score([0, 1, 2, 3])[0] == 6.5 + 7 * 3.0
    assert objective(far, (0, 1, 2, 0), 8).score([0, 1, 2, 3])[0] == 6.0 + 7 * 6.0  # one device: no transfer


def test_only_a_path_that_could_be_shorter_is_worth_a_search():
    assert not objective(TOWERS, (0, 1, 2, 3), 8).can_save([0, 1, 2, 3], 0.01)
    assert objective(TOWERS, (0, 1, 2), 8).can_save([0, 1, 1, 2], 0.01)


def test_an_even_cut_is_worth_a_search_where_one_device_has_all_work():
    even = objective(chain([3.0] * 4), (0, 1), 8)
    assert not even.can_save([0, 0, 0, 0], 0.01)
    assert even.can_save([0, 0, 0, 0], 0.01, least_work=6.0)
    assert not even.can_save([0, 0, 1, 1], 0.01, least_work=6.0)


def test_a_link_takes_one_transfer_at_a_time():
    slow = replace(chain([3.0] * 2), tensors=(Tensor("n0", ("n1",), 20.0),), in_flight=(8.0, 1.0))
    assert objective(slow, (0, 1), 8).score([0, 1])[0] == 3.0 + 20.0 + 3.0 + 7 * 10.0


def test_a_stage_waits_for_the_gradients_of_what_it_may_hold():
    far = replace(chain([3.0] * 2), tensors=(Tensor("n0", ("n1",), 4.0),))
    there_and_back = 3.0 + 4.0 + 3.0
    assert (
        objective(far, (0, 1), 7).score([0, 1])[0] == 3 * there_and_back + there_and_back
    )  # two at a time: the first two thrice
    assert objective(replace(far, in_flight=(7.0, 1.0)), (0, 1), 7).score([0, 1])[0] < 4 * there_and_back


def test_memory_counts():
    tight = replace(TOWERS, nodes=tuple(replace(node, bytes=10.0) for node in TOWERS.nodes), memory_limit=15.0)
    assert objective(tight, (0, 1, 2, 3), 8).score([0, 1, 2, 3])[0] < float("inf")
    assert objective(tight, (0, 1, 2, 3), 8).score([0, 0, 2, 3])[0] == float("inf")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9).map(float), min_size=3, max_size=6), st.integers(2, 3), st.sampled_from(["1f1b", "gpipe", "zb-h1"]))  # fmt: skip
def test_no_cut_of_a_chain_is_below_the_bound(times: list[float], n_stages: int, schedule: str):
    problem, m = chain(times), 6
    bound = step_lower_bound(problem, n_stages, range(n_stages), m, is_split=schedule == "zb-h1")
    for stages in product(range(n_stages), repeat=len(times)):
        if list(stages) == sorted(stages) and len(set(stages)) == n_stages:
            stage_of = {node.name: stage for node, stage in zip(problem.nodes, stages, strict=True)}
            assert simulated(problem, stage_of, n_stages, m, schedule) >= bound


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_no_cut_of_towers_is_below_the_bound(schedule: str):
    bound = step_lower_bound(TOWERS, 3, range(3), 6, is_split=schedule == "zb-h1")
    steps = [simulated(TOWERS, dict(zip(("a", "b", "c", "head"), (*stages, 2), strict=True)), 3, 6, schedule)
             for stages in product(range(3), repeat=3)]  # fmt: skip
    assert bound <= min(steps)
    assert bound >= 6 * 12.0 / 3 * (1 - 1e-6)


def test_a_chain_is_bounded_by_its_fill_and_drain():
    even = chain([3.0] * 4)
    bound = step_lower_bound(even, 4, range(4), 8)
    assert 8 * 3.0 < bound < simulated(even, {f"n{i}": i for i in range(4)}, 4, 8, "1f1b")
    assert step_lower_bound(even, 4, range(4), 1) == pytest.approx(12.0)  # one micro-batch: the path
    apart = step_lower_bound(even, 4, range(4), 1, without_gradient={"n0", "n1", "n2"})
    assert apart == pytest.approx(3.0)  # what has no gradient makes nothing wait on the way back
