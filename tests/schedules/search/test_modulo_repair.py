from __future__ import annotations

from dataclasses import replace

from pipecompile.ir import chain
from pipecompile.schedules.building_blocks import loop, serial
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.schedules.search.modulo_repair import repaired
from pipecompile.schedules.search.modulo_search import ModuloSearch
from pipecompile.simulation.costs import make_costs
from pipecompile.verifiers import verify

SIZES = (5.86, 2.582, 9.825, 1.919, 9.394)


def tight(*, room: float = 0.0) -> Evaluator:
    """Six stages on three devices with room for both stages of one micro-batch, and for little else."""
    routes = tuple(replace(route, nbytes=size) for route, size in zip(chain(6), SIZES, strict=True))
    costs = make_costs(
        6, 3, routes,
        forward=[1.106, 1.161, 1.112, 1.038, 1.034, 0.904], input_grad=[1.741, 1.703, 1.78, 1.296, 1.649, 1.167],
        weight_grad=[1.196, 1.005, 1.211, 1.019, 1.02, 0.742],
        transfer={f"v{s}": seconds for s, seconds in enumerate((0.843, 0.692, 0.807, 1.278, 1.437))},
        saved_bytes=[96.72, 117.02, 112.66, 102.81, 114.49, 101.84],
        weight_saved_bytes=[45.39, 112.26, 107.7, 95.42, 64.16, 97.35],
    )  # fmt: skip
    capacity = tuple(most + room for most in (211.28, 242.83, 259.55))
    return Evaluator(loop(6, 3), routes, costs, MemoryLimit(capacity, in_bytes=True))


def test_a_plan_whose_values_arrive_too_early_is_repaired() -> None:
    judge = tight()
    search = ModuloSearch(judge, judge.workload(), 6, lambda: True)
    assert search.run(20_000) is None, "its schedules exceed the memory as they run"
    found = repaired(search, 60_000)
    assert found is not None
    verify(found.schedule, routes=judge.routes)
    assert not any(judge.excess(found.schedule))
    assert judge.seconds(found.schedule) == found.seconds
    alone = serial(judge.placement, 6)
    assert not any(judge.excess(alone))
    assert found.seconds < 0.9 * judge.seconds(alone)


def test_nothing_is_found_where_one_micro_batch_does_not_fit() -> None:
    judge = tight(room=-40.0)
    assert repaired(ModuloSearch(judge, judge.workload(), 6, lambda: True), 20_000) is None


def test_the_repair_ends_when_it_may_not_go_on() -> None:
    judge = tight()
    answers = iter([True] * 3)
    repaired(ModuloSearch(judge, judge.workload(), 6, lambda: next(answers, False)), 10**9)
    assert next(answers, False) is False
