"""Stage windows: work, pins and pairs apart bound the stages of clusters; no cut below the target lies outside."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import check_inside, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.bounds.stage_windows import StageWindows, compute_windows
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.machine import Machine


def chain(*times: float, tensor: float = 0.0, **fields) -> Problem:
    names = [f"v{i}" for i in range(len(times))]
    pairs = tuple(zip(names, names[1:], strict=False))
    nodes = tuple(Node(name, time) for name, time in zip(names, times, strict=True))
    return Problem(nodes, precedence=pairs, tensors=tuple(Tensor(a, (b,), tensor) for a, b in pairs), **fields)


def windows_of(problem: Problem, n_stages: int, target: float) -> StageWindows:
    return compute_windows(coarsen(problem), Machine.of(problem, n_stages), target)


def ranges(windows: StageWindows) -> list[tuple[int, int]]:
    return list(zip(windows.earliest.tolist(), windows.latest.tolist(), strict=True))


def test_work_before_and_after_bounds_a_chain_from_both_sides():
    problem = chain(1, 1, 1, 1)
    assert windows_of(problem, 3, 1.2).is_empty  # no cut is that good
    assert ranges(windows_of(problem, 3, 2.0)) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert ranges(windows_of(problem, 3, 4.0)) == [(0, 2)] * 4
    assert ranges(windows_of(problem, 3, inf)) == [(0, 2)] * 4


def test_pins_and_pairs_apart_push_through_precedence():
    problem = chain(1, 1, 1, 1, pins={"v1": 1}, apart=(("v1", "v3"),))
    assert ranges(windows_of(problem, 4, inf)) == [(0, 1), (1, 1), (1, 3), (2, 3)]


def test_a_device_has_capacity_once_for_all_its_stages():
    assert ranges(windows_of(chain(2, 2, 2, placement=(0, 0, 1)), 3, 4.0))[2] == (2, 2)


def test_a_work_bound_shrinks_the_windows_and_the_copy_stays() -> None:
    windows = windows_of(chain(1, 1, 1, 1), 3, 4.0)
    copy = windows.copy()
    windows.bound_work(0, at_least=2.0, at_most=2.0)
    assert ranges(windows) == [(0, 0), (0, 0), (1, 2), (1, 2)]
    assert windows.min_stage_work(0) == 2.0
    assert windows.n_open_steps == 2
    assert ranges(copy) == [(0, 2)] * 4
    copy.intersect_work(windows)
    assert ranges(copy) == ranges(windows)


@settings(max_examples=60, deadline=None)
@given(problems(max_nodes=6), st.floats(1.0, 30.0))
def test_every_cut_below_the_target_is_inside(case, target) -> None:
    check_inside(*case, target, windows_of(*case, target))
