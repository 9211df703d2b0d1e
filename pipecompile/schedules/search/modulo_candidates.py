"""Modulo schedules of each placement, as candidates of `auto_schedule`.

    list searches of a placement ──► stages that the fastest recomputes ───────────────────────────┐
                    │                                                                              ├──► search over modulo schedules, or repair
                    └──► with checkpoint="auto": the stages with the shortest plan, one changed ───┘
                         at a time until none is shorter

A plan is the modulo schedule without delays: half a millisecond for 16 stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from pipecompile.schedules.search.list_search import EvaluatedSchedule, ListSearch
from pipecompile.schedules.search.modulo_repair import repaired
from pipecompile.schedules.search.modulo_search import ModuloSearch

__all__ = ["modulo_candidates"]

_PLANS = 0.1
"""Share of the budget for plans of other stages to recompute, each counted as `_PLAN_ATTEMPTS` attempts."""

_PLAN_ATTEMPTS = 10

_WORTH = 0.99
"""Share of the best step so far below which a plan with values is worth a search."""

_WITH_VALUES, _REPAIR = 0.3, 0.2
"""Additional shares of the budget: for plans with values, and for the repair of one if none of them fits as it runs."""

Flags = tuple[bool, ...]
"""Per stage, whether it is recomputed."""


def modulo_candidates(
    searches: Sequence[ListSearch], budget: float, goes_on: Callable[[], bool], *, recompute: bool
) -> Iterator[EvaluatedSchedule]:
    """Yield the best modulo schedule of each placement of `searches`, and of each set of stages to recompute that is worth it.

    `recompute`: other stages may be recomputed than those of the searches. `budget` is the number of placed actions.
    """
    placements = dict.fromkeys(search.evaluator.placement for search in searches)
    for placement in placements:
        own = [search for search in searches if search.evaluator.placement == placement]
        best = min(own, key=lambda each: each.seconds)
        if best.is_optimal and not recompute:
            continue
        flags = [best.workload.is_recomputed]
        if recompute:
            shortest = _shortest_plan(own, _PLANS * budget / len(placements), goes_on)
            flags = list(dict.fromkeys([shortest, *flags]))
        for each in flags:
            if goes_on():
                yield from _found(best, each, goes_on, budget / len(placements) / len(flags))


def _found(like: ListSearch, flags: Flags, goes_on: Callable[[], bool], budget: float) -> Iterator[EvaluatedSchedule]:
    """Yield the best modulo schedule with memory reserved for values, and one with values in the plan if that is worth a search."""
    first = _search(like, flags, goes_on, values=False).run(budget)
    yield from [first] if first else []
    search = _search(like, flags, goes_on)
    if goes_on() and search.planned_seconds() < (first.seconds if first else inf) * _WORTH:
        second = search.run(budget * _WITH_VALUES) or repaired(search, budget * _REPAIR)
        yield from [second] if second else []


def _shortest_plan(searches: Sequence[ListSearch], budget: float, goes_on: Callable[[], bool]) -> Flags:
    """Return the stages to recompute whose plan takes the least time: of the searches, then with one stage changed at a time."""
    first = searches[0]
    plans: dict[Flags, float] = {}
    left = int(budget / (_PLAN_ATTEMPTS * 4 * first.workload.n_stages))

    def seconds(flags: Flags) -> float:
        if flags not in plans and (not plans or (len(plans) < left and goes_on())):
            plan = _search(first, flags, goes_on, values=False).planned_seconds()
            plans[flags] = plan if plan < inf else _search(first, flags, goes_on).planned_seconds()
        return plans.get(flags, inf)

    best = min((search.workload.is_recomputed for search in searches), key=seconds)
    while True:
        changed = [(*best[:s], not best[s], *best[s + 1 :]) for s in range(len(best))]
        nearest = min(changed, key=seconds)
        if seconds(nearest) >= seconds(best):
            break
        best = nearest
    return best


def _search(like: ListSearch, flags: Flags, goes_on: Callable[[], bool], *, values: bool = True) -> ModuloSearch:
    evaluator = like.evaluator
    workload = evaluator.workload(flags, split=like.workload.split)
    return ModuloSearch(evaluator, workload, like.m, goes_on, values=values)
