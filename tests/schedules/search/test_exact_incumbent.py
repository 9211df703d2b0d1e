from __future__ import annotations

from time import perf_counter

import pytest

from pipecompile.ir import Schedule, chain
from pipecompile.schedules import build_schedule
from pipecompile.schedules.search.evaluate import Evaluator
from pipecompile.schedules.search.exact_incumbent import add_hint, keep_order
from pipecompile.schedules.search.exact_model import build_model
from pipecompile.schedules.search.exact_solver import Budget, Strategy, cp_sat, run
from pipecompile.schedules.search.exact_variables import rows_of
from pipecompile.simulation.costs import Engines, make_costs

pytestmark = pytest.mark.skipif(cp_sat() is None, reason="needs OR-Tools")

COSTS = make_costs(3, 3, chain(3), forward=[1.0, 1.5, 2.0], transfer=0.5)
EVALUATOR = Evaluator((0, 1, 2), chain(3), COSTS, None)
INCUMBENT = build_schedule("zb-h1", 3, 4, n_devices=3)


def shortest(window: tuple[float, float], *, is_hinted: bool = False) -> Schedule:
    """The shortest schedule with the order of the incumbent outside the window."""
    workload = EVALUATOR.workload()
    built = build_model(
        cp_sat(), workload, 4, EVALUATOR.capacity, Engines.PAIR, horizon=EVALUATOR.seconds(INCUMBENT), bound=0.0
    )
    keep_order(built, INCUMBENT, EVALUATOR, window)
    if is_hinted:
        add_hint(built, INCUMBENT, EVALUATOR)
    solver, status = run(built.model, 36, Budget(5.0, perf_counter() + 60), 5.0, Strategy.QUICK, has_options=False)
    assert status == cp_sat().OPTIMAL
    return Schedule(3, 4, (0, 1, 2), rows_of(built, solver.value, workload))


def test_without_a_window_the_order_is_that_of_the_incumbent() -> None:
    assert shortest((0.0, 0.0)).rows == INCUMBENT.rows


def test_a_wider_window_finds_schedules_that_are_no_longer() -> None:
    seconds = [EVALUATOR.seconds(shortest(window)) for window in ((0.0, 0.0), (0.5, 1.0), (0.0, 1.0))]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


def test_a_hint_changes_no_optimum() -> None:
    hinted, free = (EVALUATOR.seconds(shortest((0.0, 1.0), is_hinted=flag)) for flag in (True, False))
    assert hinted == pytest.approx(free)
