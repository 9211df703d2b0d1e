from __future__ import annotations

from math import inf

import pytest

from pipecompile.ir import Route, Schedule, chain
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.schedules.search.exact import cp_sat
from pipecompile.schedules.search.exact_model import build_model
from pipecompile.schedules.search.exact_variables import rows_of
from pipecompile.simulation.costs import Engines, make_costs

ROUTES = tuple(Route(route.value, route.source, route.consumers, 7.0) for route in chain(3))


def solved(
    evaluator: Evaluator, n_microbatches: int, engines: Engines = Engines.PAIR, *, recompute: bool = False
) -> Schedule:
    workload, module = evaluator.workload(), cp_sat()
    model = build_model(
        module, workload, n_microbatches, evaluator.capacity, engines, horizon=100.0, bound=0.0, recompute=recompute
    )
    solver = module.CpSolver()
    solver.parameters.catch_sigint_signal = False  # else Ctrl-C ends the process from then on
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 60
    assert solver.solve(model.model) == module.OPTIMAL
    schedule = Schedule(3, n_microbatches, evaluator.placement, rows_of(model, solver.value, workload))
    modelled = solver.objective_value * model.tick.size
    assert evaluator.seconds(schedule) >= modelled * (1 - 1e-5)
    if (
        engines is Engines.PAIR
    ):  # with device engines the simulator sends first come, first served, and the model in any order
        assert evaluator.seconds(schedule) == pytest.approx(modelled, rel=1e-5)
    return schedule


@pytest.mark.parametrize("room", [130.0, 230.0, inf])
def test_the_simulated_schedule_takes_as_long_and_holds_as_much_as_the_model(room: float) -> None:
    """Values of 7 bytes at both ends count, so 130 bytes hold one micro-batch of 100 and its values."""
    costs = make_costs(3, 3, ROUTES, saved_bytes=100.0, weight_saved_bytes=60.0, transfer=0.5, input_grad=1.5)
    evaluator = Evaluator((0, 1, 2), ROUTES, costs, MemoryLimit((room,) * 3, in_bytes=True))
    assert not any(evaluator.excess(solved(evaluator, 3)))


@pytest.mark.parametrize(("room", "seconds"), [(250.0, 17.5), (252.0, 15.0)])
def test_a_free_recomputation_reads_received_values_again(room: float, seconds: float) -> None:
    """Two micro-batches in flight on the middle device: a recipe of 1 byte and a value of 50 each, 100 that R saves, and 50 sent."""
    routes = tuple(Route(route.value, route.source, route.consumers, 50.0) for route in chain(3))
    costs = make_costs(
        3, 3, routes, forward=[1.0, 1.0, 3.0], input_grad=1.5, saved_bytes=[0.0, 100.0, 100.0], recipe_bytes=1.0,
        weight_saved_bytes=0.0,
    )  # fmt: skip
    evaluator = Evaluator((0, 1, 2), routes, costs, MemoryLimit((400.0, room, 400.0), in_bytes=True))
    assert evaluator.seconds(solved(evaluator, 2, recompute=True)) == pytest.approx(seconds)


def test_engines_are_shared_by_the_copies_of_a_device() -> None:
    routes = (*chain(3), Route("skip", 0, (2,)))
    costs = make_costs(3, 3, routes, transfer=3.0, engines="device")
    evaluator = Evaluator((0, 1, 2), routes, costs, None)
    shared = evaluator.seconds(solved(evaluator, 2, Engines.DEVICE))
    pair = Evaluator((0, 1, 2), routes, make_costs(3, 3, routes, transfer=3.0), None)
    assert shared >= pair.seconds(solved(pair, 2))
