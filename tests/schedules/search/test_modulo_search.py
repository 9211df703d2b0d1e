from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from pipecompile.ir import chain
from pipecompile.schedules.building_blocks import loop, vee
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.schedules.search.makespan_bound import makespan_lower_bound
from pipecompile.schedules.search.modulo_search import ModuloSearch
from pipecompile.simulation.costs import make_costs
from pipecompile.verifiers import verify


def evaluator(place: tuple[int, ...], capacity: float, *, nbytes: float = 0.0, seed: int = 0) -> Evaluator:
    rng, n = Random(seed), len(place)
    routes = tuple(replace(route, nbytes=nbytes) for route in chain(n))
    costs = make_costs(
        n, max(place) + 1, routes, saved_bytes=1.0, weight_saved_bytes=0.5, forward=[rng.uniform(1, 2) for _ in place]
    )
    return Evaluator(place, routes, costs, MemoryLimit((capacity,) * (max(place) + 1), in_bytes=True))


@pytest.mark.parametrize(("place", "capacity"), [(loop(4, 4), 2.6), (vee(4), 4.2), (loop(6, 3), 4.0), (vee(3), 2.5)])
def test_the_schedule_fits_and_is_no_faster_than_the_bound(place: tuple[int, ...], capacity: float) -> None:
    judge = evaluator(place, capacity, nbytes=0.05)
    work = judge.workload()
    found = ModuloSearch(judge, work, 9, lambda: True).run(40_000)
    assert found is not None
    verify(found.schedule, routes=judge.routes)
    assert not any(judge.excess(found.schedule))
    assert judge.seconds(found.schedule) == found.seconds >= makespan_lower_bound(work, 9, judge.capacity)


def test_more_attempts_find_a_shorter_period_than_none() -> None:
    """A V under tight memory: without delays a period fits that is longer than it has to be."""
    judge = evaluator(vee(6), 3.6, seed=2)
    search = [ModuloSearch(judge, judge.workload(), 24, lambda: True) for _ in range(2)]
    first, better = search[0].run(0), search[1].run(150_000)
    assert first is not None
    assert better is not None
    assert better.seconds < first.seconds * 0.99


def test_nothing_is_found_where_one_micro_batch_does_not_fit() -> None:
    judge = evaluator(vee(2), 1.5)
    assert ModuloSearch(judge, judge.workload(), 4, lambda: True).run(10_000) is None


def test_the_search_ends_when_it_may_not_go_on() -> None:
    judge = evaluator(vee(3), 2.5)
    answers = iter([True] * 5)
    assert ModuloSearch(judge, judge.workload(), 8, lambda: next(answers, False)).run(10**9) is not None


def test_free_actions_are_no_error() -> None:
    costs = make_costs(2, 2, chain(2), forward=0.0, input_grad=0.0, weight_grad=0.0, saved_bytes=1.0)
    judge = Evaluator((0, 1), tuple(chain(2)), costs, MemoryLimit((2.0, 2.0), in_bytes=True))
    assert ModuloSearch(judge, judge.workload(), 4, lambda: True).run(1000) is None
