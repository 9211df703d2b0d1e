"""Ctrl-C in a search for a schedule keeps the best schedule so far."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from random import Random

import pytest

from pipecompile.schedules import auto_schedule
from pipecompile.schedules.search import auto, critical_swaps, exact_solver
from pipecompile.schedules.search.evaluate import Evaluator
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify

COSTS = {
    "forward": [1.0 + Random(0).random() * stage for stage in range(6)],
    "input_grad": [2.0 + Random(1).random() * stage for stage in range(6)],
    "weight_grad": [0.5 + Random(2).random() * stage for stage in range(6)],
}


HARD = {"forward": [1.0 + s * s % 7 for s in range(10)], "input_grad": [2.0 + s % 5 for s in range(10)]}
"""Costs of ten stages whose bound list schedules do not reach."""


def search(**options):
    return auto_schedule(6, 12, n_devices=3, exact=False, **options, **COSTS)


@pytest.fixture
def interrupted_at(monkeypatch):
    """A function that makes the n-th simulation of a search raise KeyboardInterrupt, once."""

    def arrange(number):
        calls, seconds = iter(range(1, 10**9)), Evaluator.seconds

        def counted(self, schedule):
            if next(calls) == number:
                raise KeyboardInterrupt
            return seconds(self, schedule)

        monkeypatch.setattr(Evaluator, "seconds", counted)

    return arrange


@pytest.mark.parametrize("number", [2, 5, 9, 14])
def test_the_best_so_far_is_returned_with_what_is_proven(interrupted_at, number):
    whole = search()
    interrupted_at(number)
    schedule = search()
    verify(schedule)
    step = simulate(schedule, **COSTS)
    assert step.makespan >= simulate(whole, **COSTS).makespan * (1 - 1e-9)
    assert schedule.certificate.seconds == pytest.approx(step.makespan)
    assert step.bound <= step.makespan


def test_without_a_schedule_it_is_raised(interrupted_at):
    interrupted_at(1)
    with pytest.raises(KeyboardInterrupt):
        search()


def test_it_is_raised_by_no_more_than_one_phase(monkeypatch):
    """Swaps keep the best order, and no later phase begins."""
    step, steps = critical_swaps._TabuSearch.step, []

    def stopped(self):
        steps.append(step(self))
        if len(steps) == 3:
            raise KeyboardInterrupt
        return steps[-1]

    monkeypatch.setattr(critical_swaps._TabuSearch, "step", stopped)
    monkeypatch.setattr(auto, "makespan_lower_bound", lambda *_, **__: 0.0)  # nothing is good enough
    schedule = search(in_flight=3, transfer=0.7)
    assert len(steps) == 3
    assert schedule.certificate.seconds == pytest.approx(simulate(schedule, **COSTS, transfer=0.7).makespan)


def test_without_a_bound_there_is_no_certificate(monkeypatch):
    bound = auto.makespan_lower_bound

    def stopped(*args, **options):
        if "recompute" in options:
            raise KeyboardInterrupt
        return bound(*args, **options)

    monkeypatch.setattr(auto, "makespan_lower_bound", stopped)
    schedule = search()
    assert schedule.certificate is None
    verify(schedule)


@pytest.mark.skipif(exact_solver.cp_sat() is None, reason="needs OR-Tools")
def test_a_signal_ends_the_exact_back_end(monkeypatch):
    results, solve = [], exact_solver.solved

    def interrupted(solver, model):
        solver.parameters.max_deterministic_time = 1e6
        timer = threading.Timer(0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
        timer.start()
        try:
            results.append(solve(solver, model))
        finally:
            timer.cancel()
        return results[-1]

    monkeypatch.setattr(exact_solver, "solved", interrupted)
    schedule = auto_schedule(10, 14, n_devices=5, in_flight=4, effort=0.5, time_limit=60, transfer=0.9, **HARD)
    assert [is_interrupted for _, is_interrupted in results] == [True]
    verify(schedule)


@pytest.mark.skipif(exact_solver.cp_sat() is None, reason="needs OR-Tools")
def test_after_a_search_ctrl_c_is_still_an_exception():
    """OR-Tools, left to itself, takes the signal away from Python for good: Ctrl-C then kills the process."""
    code = (
        "import signal\n"
        "from pipecompile.schedules import auto_schedule\n"
        "from pipecompile.schedules.search import exact_solver\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "solve, calls = exact_solver.solved, []\n"
        "exact_solver.solved = lambda *each: calls.append(0) or solve(*each)\n"
        f"auto_schedule(10, 14, n_devices=5, in_flight=4, effort=0.5, transfer=0.9, **{HARD})\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    print('raised', len(calls))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 1
