"""The exact back end, compared with the enumeration of all orders of small cases."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis.strategies import floats, lists, sampled_from
from schedules_auto import draw, outcome

from pipecompile.ir import Action, Kind, Schedule, chain
from pipecompile.schedules import auto_schedule, build_schedule
from pipecompile.schedules.search import auto, exact
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.schedules.search.exact import ExactProblem, cp_sat, solve_exactly
from pipecompile.schedules.search.exact_solver import Budget
from pipecompile.schedules.search.makespan_bound import makespan_lower_bound
from pipecompile.simulation.costs import CostOptions, make_costs
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify
from pipecompile.verifiers.schedule import schedule_faults


def orders(queues: Sequence[Sequence[Action]]) -> Iterator[tuple[Action, ...]]:
    """All merges of the queues in which F of a cell precedes its I, and I its W."""
    if not any(queues):
        yield ()
    for index, queue in enumerate(queues):
        if queue:
            rest = [each[1:] if place == index else each for place, each in enumerate(queues)]
            cell = queue[0]
            waits = {Kind.INPUT_GRAD: Kind.FORWARD, Kind.WEIGHT_GRAD: Kind.INPUT_GRAD}.get(cell.kind)
            if any(
                a.kind is waits and (a.stage, a.microbatch) == (cell.stage, cell.microbatch)
                for each in rest
                for a in each
            ):
                continue
            for order in orders(rest):
                yield (cell, *order)


def shortest(evaluator: Evaluator, n_microbatches: int) -> float:
    """The least makespan of all orders of two stages on two devices that fit."""
    rows = [
        list(
            orders(
                [
                    [Action(s, kind, m) for m in range(n_microbatches)]
                    for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
                ]
            )
        )
        for s in range(2)
    ]
    best = float("inf")
    for pair in product(*rows):
        schedule = Schedule(2, n_microbatches, (0, 1), pair)
        seconds = evaluator.seconds(schedule)
        if seconds < best and not any(evaluator.excess(schedule)) and not schedule_faults(schedule, chain(2)):
            best = seconds
    return best


@pytest.mark.parametrize("number", range(6))
def test_the_optimum_of_all_orders_is_found_and_proven(number: int) -> None:
    rng = Random(number)
    costs: CostOptions = {
        "forward": [rng.choice([1.0, 2.0]), rng.choice([0.5, 1.5])], "input_grad": [1.0, rng.choice([1.0, 2.5])],
        "weight_grad": [rng.choice([0.5, 1.0]), 1.0], "transfer": rng.choice([0.0, 0.5]), "saved_bytes": [10.0, 12.0],
        "weight_saved_bytes": [rng.choice([4.0, 10.0]), 6.0],
    }  # fmt: skip
    room = rng.choice([12.0, 18.0, 25.0])
    found = auto_schedule(2, 2, memory_limit=room, effort=0.3, **costs)
    evaluator = Evaluator(
        (0, 1), chain(2), make_costs(2, 2, chain(2), **costs), MemoryLimit((room, room), in_bytes=True)
    )
    assert found.certificate is not None
    assert found.certificate.is_optimal
    assert simulate(found, **costs).makespan == pytest.approx(shortest(evaluator, 2))


def test_a_gap_that_the_bounds_leave_is_closed() -> None:
    """Of a hundred actions with recomputation, six stages on three devices, the bounds leave half a percent."""
    assert outcome(draw(Random("0 954"))).is_optimal


def test_a_bound_is_never_above_the_proven_optimum() -> None:
    rng = Random(7)
    for _ in range(5):
        times = [rng.choice([1.0, 1.5, 2.0]) for _ in range(4)]
        costs = make_costs(4, 2, chain(4), forward=times, saved_bytes=10.0, weight_saved_bytes=5.0)
        evaluator = Evaluator(
            (0, 1, 1, 0), chain(4), costs, MemoryLimit((rng.choice([20.0, 30.0, 45.0]),) * 2, in_bytes=True)
        )
        workload = evaluator.workload()
        bound = makespan_lower_bound(workload, 2, evaluator.capacity)
        result = solve_exactly(
            ExactProblem(evaluator, workload, 2), None, shorter_than=200.0, bound=0.0, seconds=(2.0, 60.0)
        )
        assert result.schedule is not None
        assert bound <= result.bound * (1 + 1e-6) <= result.schedule.seconds * (1 + 2e-6)
        verify(result.schedule.schedule)


@settings(max_examples=40, deadline=None)
@given(
    times=lists(floats(0.3, 3.0), min_size=6, max_size=6),
    sizes=lists(floats(4.0, 12.0), min_size=4, max_size=4),
    room=floats(12.0, 40.0),
    transfer=sampled_from([0.0, 0.7]),
)
def test_no_refuted_step_is_above_the_optimum_of_all_orders(
    times: list[float], sizes: list[float], room: float, transfer: float
) -> None:
    costs = make_costs(
        2, 2, chain(2), forward=times[:2], input_grad=times[2:4], weight_grad=times[4:], transfer=transfer,
        saved_bytes=sizes[:2], weight_saved_bytes=[min(pair) for pair in zip(sizes[:2], sizes[2:], strict=True)],
    )  # fmt: skip
    evaluator = Evaluator((0, 1), chain(2), costs, MemoryLimit((room, room), in_bytes=True))
    optimum = shortest(evaluator, 2)
    problem = ExactProblem(evaluator, evaluator.workload(), 2)
    search = exact._ExactSearch(problem, None, 2 * optimum, 0.0, Budget(1.0, float("inf")))
    search.refute(0.01)
    assert optimum * 0.5 <= search.bound <= optimum * (1 + 1e-9)


def test_windows_improve_a_schedule_that_the_whole_search_does_not_close() -> None:
    """Eight stages of unequal length to and fro on four devices."""
    costs = make_costs(8, 4, chain(8), forward=[1.0 + s * 5 % 7 for s in range(8)], transfer=0.3)
    evaluator = Evaluator((0, 1, 2, 3, 3, 2, 1, 0), chain(8), costs, None)
    incumbent = build_schedule("v-min", 8, 8, n_devices=4)
    before = evaluator.seconds(incumbent)
    problem = ExactProblem(evaluator, evaluator.workload(), 8)
    search = exact._ExactSearch(problem, incumbent, before, 0.0, Budget(0.5, float("inf")))
    search.move_windows()
    assert search.best is not None
    assert search.best.seconds == pytest.approx(search.seconds)
    assert search.seconds < before
    verify(search.best.schedule)


def test_tight_memory_of_a_v_is_used_in_full() -> None:
    """Values of 9, 3 and 10 bytes beside 88 to 132 saved bytes: list scheduling runs one micro-batch after another."""
    sizes = {"saved_bytes": [88.0, 129.0, 132.0, 102.0], "weight_saved_bytes": [68.0, 104.0, 48.0, 43.0]}
    schedule = auto_schedule(4, 2, placement=(0, 1, 1, 0), memory_limit=[284.0, 275.0], effort=0.3, **sizes)
    assert schedule.certificate is not None
    assert schedule.certificate.is_optimal
    assert schedule.gap == pytest.approx(0.0, abs=1e-4)


def test_a_whole_backward_is_taken_where_it_holds_less() -> None:
    """What I leaves for W is larger than what it found: 14 bytes do not fit, so backwards are whole though they take as long."""
    sizes = {"saved_bytes": 10.0, "weight_saved_bytes": 14.0}
    schedule = auto_schedule(2, 3, memory_limit=12.0, effort=0.1, **sizes)
    assert {action.kind for row in schedule.rows for action in row} == {Kind.FORWARD, Kind.BACKWARD}
    assert schedule.certificate is not None
    assert schedule.certificate.is_optimal
    assert max(simulate(schedule, **sizes).peak_memory) <= 12.0


def test_stages_recompute_where_that_is_shortest() -> None:
    sizes = {"saved_bytes": 100.0, "recipe_bytes": 1.0}
    schedule = auto_schedule(2, 3, memory_limit=210.0, effort=0.3, checkpoint="auto", **sizes)
    assert schedule.certificate is not None
    assert schedule.certificate.is_optimal
    assert max(simulate(schedule, **sizes).peak_memory) <= 210.0


def test_a_whole_backward_is_taken_where_it_is_shorter() -> None:
    """I and W take 2 together, B takes 1.2: a mix of both is shorter than either alone."""
    costs = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0, "backward": 1.2}
    schedule = auto_schedule(3, 4, effort=0.3, **costs)
    alone = auto_schedule(3, 4, effort=0.3, split=False, **costs)
    assert simulate(schedule, **costs).makespan <= simulate(alone, **costs).makespan
    assert any(action.kind is Kind.BACKWARD for row in schedule.rows for action in row)


def test_nothing_is_proven_about_the_place_of_w_where_a_backward_may_be_whole() -> None:
    """B takes 2, I and W take 3: F F B B is the optimum. Its last B ends the step, though I would leave a W."""
    costs = make_costs(1, 1, chain(1), forward=1.01, input_grad=1.0, weight_grad=2.0, backward=2.0)
    evaluator = Evaluator((0,), chain(1), costs, None)
    problem = ExactProblem(evaluator, evaluator.workload(), 2)
    result = solve_exactly(problem, None, shorter_than=20.0, bound=0.0, seconds=(2.0, 60.0))
    assert result.schedule is not None
    assert result.bound <= result.schedule.seconds * (1 + 1e-9)
    assert result.schedule.seconds == pytest.approx(6.02)


def test_without_or_tools_the_search_says_that_nothing_was_proven_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (auto, exact):
        monkeypatch.setattr(module, "cp_sat", lambda: None)
    schedule = auto_schedule(2, 4, placement=(0, 1), in_flight=1, forward=[1.0, 2.0], effort=0.1)
    assert schedule.certificate is not None
    assert not schedule.certificate.is_exact
    verify(schedule)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", ["ortools highspy torch", "torch highspy ortools"])
def test_it_works_beside_highs_and_torch_in_either_order_of_import(order: str) -> None:
    imports = "\n".join(
        "import ortools.sat.python.cp_model" if name == "ortools" else f"import {name}" for name in order.split()
    )
    code = f"""{imports}
import highspy, torch
from pipecompile.schedules import auto_schedule, build_schedule
assert torch.ones(3).sum() == 3
h = highspy.Highs(); h.setOptionValue("output_flag", False); h.addVar(1.0, 2.0); h.changeColCost(0, 1.0); h.run()
assert h.getInfo().objective_function_value == 1.0
assert auto_schedule(2, 3, forward=[1.0, 1.3], effort=0.2).certificate.is_exact
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_exact_back_end_can_be_left_out() -> None:
    costs = {"forward": [1.0, 2.0, 1.5], "in_flight": 2}
    schedule = auto_schedule(3, 4, exact=False, effort=0.1, **costs)
    assert schedule.certificate is not None
    assert not schedule.certificate.is_exact
    assert auto_schedule(3, 4, effort=0.3, **costs).certificate.seconds <= schedule.certificate.seconds


def test_too_many_actions_are_not_modelled() -> None:
    evaluator = Evaluator((0, 1), chain(2), make_costs(2, 2, chain(2)), None)
    problem = ExactProblem(evaluator, evaluator.workload(), exact.MOST_ACTIONS)
    assert solve_exactly(problem, None, shorter_than=9.0, bound=1.0, seconds=(1.0, 1.0)) == exact.ExactResult(None, 1.0)
    assert cp_sat() is not None
