"""Schedules with fewer micro-batches in flight: between one micro-batch after another and the whole schedule, as deep as memory allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pipecompile as pc
from pipecompile.ir import Kind, Route, Schedule
from pipecompile.ir.routes import chain
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.schedules.search.capped_depths import capped, capped_candidates, deepest_fitting
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.simulation.costs import make_costs


def depth(schedule: Schedule) -> list[int]:
    """Return the most micro-batches in flight on each device."""
    peaks = []
    for row in schedule.rows:
        now = most = 0
        for action in row:
            now += (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD))
            most = max(most, now)
        peaks.append(most)
    return peaks


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_no_device_holds_more_than_its_cap(name: str):
    whole = pc.build_schedule(name, 4, 8)
    for caps in ([1, 1, 1, 1], [2, 2, 2, 1], [3, 2, 1, 1], [8, 8, 8, 8]):
        limited = capped(whole, caps)
        pc.verify(limited)
        assert depth(limited) == [min(cap, most) for cap, most in zip(caps, depth(whole), strict=True)]
        assert [sorted(map(str, row)) for row in limited.rows] == [sorted(map(str, row)) for row in whole.rows]
    assert capped(whole, [8] * 4).rows == whole.rows


def test_the_deepest_that_fits_is_found_per_device():
    whole = pc.build_schedule("1f1b", 4, 8)
    room = [3, 2, 1, 1]
    found = deepest_fitting(whole, lambda each: all(most <= cap for most, cap in zip(depth(each), room, strict=True)))
    assert found is not None
    assert depth(found) == room
    assert deepest_fitting(whole, lambda _: False) is None
    assert deepest_fitting(whole, lambda _: True) == whole


def test_with_little_memory_as_many_are_in_flight_as_fit():
    routes = tuple(Route(route.value, route.source, route.consumers, 4.0) for route in chain(4))
    costs = make_costs(4, 4, routes, forward=1.0, backward=2.0, transfer=0.2, saved_bytes=100.0, recipe_bytes=1.0)
    whole, every = pc.build_schedule("1f1b", 4, 16, routes=routes), (True,) * 4
    evaluator = Evaluator((0, 1, 2, 3), routes, costs, MemoryLimit((118.0,) * 4, in_bytes=True))
    (found,) = capped_candidates(evaluator, [whole], [every])
    assert not any(evaluator.excess(found.schedule))
    assert any(evaluator.excess(insert_recompute(whole, every)))
    assert found.seconds < 0.8 * evaluator.seconds(insert_recompute(capped(whole, [1] * 4), every))
    roomy = replace(evaluator, limit=MemoryLimit((1000.0,) * 4, in_bytes=True))
    assert [each.schedule for each in capped_candidates(roomy, [whole], [every])] == [insert_recompute(whole, every)]
