"""The exact model without waits, compared with the enumeration of all orders as they run."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

import pytest

from pipecompile.ir import Route, chain
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.schedules.search.exact import ExactProblem, cp_sat
from pipecompile.schedules.search.exact_no_waits import never_wait
from pipecompile.simulation.costs import make_costs
from tests.schedules.search.test_exact import shortest


def problem(number: int) -> ExactProblem:
    """Return two stages and two micro-batches whose values take memory, with room for little more than one."""
    rng = Random(number)
    routes = (Route("v0", 0, (1,), 3.0),)
    costs = make_costs(
        2, 2, routes, saved_bytes=[10.0, 6.0], weight_saved_bytes=[rng.choice([4.0, 9.0]), 3.0],
        **{name: [rng.choice([0.7, 1.0, 1.9]) for _ in range(2)] for name in ("forward", "input_grad", "weight_grad")},
        transfer=rng.choice([0.0, 0.4]),
    )  # fmt: skip
    room = rng.choice([16.0, 19.0, 21.0, 24.0])
    evaluator = Evaluator((0, 1), routes, costs, MemoryLimit((room, inf), in_bytes=True))
    return ExactProblem(evaluator, evaluator.workload(), 2)


def optimum(problem: ExactProblem, *, waits: bool) -> float:
    solver, model = cp_sat().CpSolver(), problem.model(100.0, 0.0, waits=waits)
    solver.parameters.catch_sigint_signal, solver.parameters.num_workers = False, 1
    status = solver.solve(model.model)
    return solver.objective_value * model.tick.size if status == cp_sat().OPTIMAL else inf


@pytest.mark.skipif(cp_sat() is None, reason="needs OR-Tools")
def test_the_optimum_without_waits_is_that_of_all_orders() -> None:
    shorter = []
    for number in range(12):
        case = problem(number)
        least = shortest(case.evaluator, 2)
        assert optimum(case, waits=False) == pytest.approx(least, rel=1e-5)
        shorter.append(optimum(case, waits=True) < least * (1 - 1e-3))
    assert any(shorter)  # with waits, the optimum of some is of no program
    assert not all(shorter)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, True), ({"launch": 0.1}, False), ({"streams": (0, 0)}, False), ({"host_latency": 0.1}, False)],
)
def test_launches_streams_and_copies_of_inputs_make_actions_wait(options: dict[str, Any], expected: bool) -> None:
    assert never_wait(make_costs(2, 2, chain(2), **options)) is expected
