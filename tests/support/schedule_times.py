"""Makespans of schedules whose devices all take the same time, for the formulas in the builders' docstrings."""

from __future__ import annotations

from hypothesis import strategies as st

from pipecompile.ir import Schedule
from pipecompile.simulation.simulator import simulate

TIMES = st.tuples(*[st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])] * 3)
"""Seconds of F, I and W of all stages of a device together."""

DEVICES, CHUNKS = st.integers(1, 6), st.integers(1, 3)


def makespan(schedule: Schedule, times: tuple[float, float, float]) -> float:
    """Return the makespan if all stages of a device together take `times` seconds for F, I and W."""
    share = schedule.n_devices / schedule.n_stages
    forward, input_grad, weight_grad = (time * share for time in times)
    return simulate(schedule, forward=forward, input_grad=input_grad, weight_grad=weight_grad).makespan


def rows(schedule: Schedule) -> list[str]:
    """Return the rows as text, one action after another."""
    return [" ".join(map(str, row)) for row in schedule.rows]
