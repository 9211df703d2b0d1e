from __future__ import annotations

from dataclasses import replace

from pipecompile.ir import chain
from pipecompile.schedules.building_blocks import loop, vee
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.schedules.search.list_search import ListSearch
from pipecompile.schedules.search.modulo_candidates import modulo_candidates
from pipecompile.simulation.costs import make_costs
from pipecompile.verifiers import verify

NONE = (False,) * 4


def searches(capacity: float, *places: tuple[int, ...], m: int = 12) -> list[ListSearch]:
    costs = make_costs(4, max(places[0]) + 1, chain(4), saved_bytes=1.0, weight_saved_bytes=0.25, recipe_bytes=0.01)
    limit = MemoryLimit((capacity,) * (max(places[0]) + 1), in_bytes=True)
    judges = [Evaluator(place, tuple(chain(4)), costs, limit) for place in places]
    return [ListSearch(judge, judge.workload(NONE), m) for judge in judges]


def test_each_placement_has_a_candidate_that_fits() -> None:
    found = list(modulo_candidates(searches(3.5, loop(4, 2), vee(2)), 20_000, lambda: True, recompute=False))
    assert [each.schedule.placement for each in found] == [loop(4, 2), vee(2)]
    for each in found:
        verify(each.schedule, routes=each.evaluator.routes)
        assert not any(each.evaluator.excess(each.schedule))


def test_stages_are_recomputed_where_the_plan_is_shorter_so() -> None:
    """Four stages on four devices with room for 1.5: only recomputed stages have several micro-batches in flight."""
    (search,) = searches(1.5, loop(4, 4))
    search.try_rules(1000)
    assert search.is_optimal
    assert not list(modulo_candidates([search], 20_000, lambda: True, recompute=False))
    found = modulo_candidates([search], 20_000, lambda: True, recompute=True)
    assert min(each.seconds for each in found) < 0.7 * search.seconds


def test_nothing_is_searched_after_the_deadline_and_nothing_found_without_room() -> None:
    assert not list(modulo_candidates(searches(3.5, vee(2)), 20_000, lambda: False, recompute=False))
    assert not list(modulo_candidates(searches(0.5, vee(2)), 20_000, lambda: True, recompute=True))


def test_backwards_stay_whole_where_the_searches_do_not_split_them() -> None:
    (search,) = searches(3.5, vee(2))
    search.workload = replace(search.workload, split=False)
    (found,) = modulo_candidates([search], 5_000, lambda: True, recompute=False)
    assert "W" not in str(found.schedule.to_csv())
