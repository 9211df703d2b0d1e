from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest

from pipecompile.schedules.search import exact_solver
from pipecompile.schedules.search.exact_solver import BUILD_SECONDS, Budget, Strategy, cp_sat, run

pytestmark = pytest.mark.skipif(cp_sat() is None, reason="needs OR-Tools")


@pytest.mark.parametrize("strategy", Strategy)
def test_building_and_searching_are_charged_to_the_budget(strategy: Strategy) -> None:
    model = cp_sat().CpModel()
    x = model.new_int_var(3, 9, "")
    model.minimize(x)
    budget = Budget(1.0, perf_counter() + 60)
    solver, status = run(model, 100, budget, 0.5, strategy, has_options=False)
    assert status == cp_sat().OPTIMAL
    assert solver.value(x) == 3
    assert 0.5 <= budget.seconds <= 1 - 100 * BUILD_SECONDS


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("has_options", [True, False])
def test_precedences_of_the_moment_are_left_out_where_they_end_the_process(
    strategy: Strategy, has_options: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, original = [], exact_solver.solved

    def solved(solver: Any, model: Any) -> tuple[Any, bool]:
        kept.append(solver.parameters.use_dynamic_precedence_in_disjunctive)
        return original(solver, cp_sat().CpModel())

    monkeypatch.setattr(exact_solver, "solved", solved)
    run(None, 1, Budget(1.0, perf_counter() + 60), 0.5, strategy, has_options=has_options)
    assert kept == [strategy.value[1] and not has_options]


@pytest.mark.parametrize(
    ("budget", "is_left"),
    [(Budget(1.0, float("inf")), True), (Budget(0.0, float("inf")), False), (Budget(1.0, 0.0), False),
     (Budget(1.0, float("inf"), is_interrupted=True), False)],
    ids=["left", "spent", "late", "interrupted"],
)  # fmt: skip
def test_a_run_may_begin_while_anything_is_left(budget: Budget, is_left: bool) -> None:
    assert budget.is_left is is_left
