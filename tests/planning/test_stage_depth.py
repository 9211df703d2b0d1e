"""Micro-batches in flight: those of a schedule, and those of stages beside each other."""

from __future__ import annotations

import pipecompile as pc
from pipecompile.ir import Route
from pipecompile.planning.stage_depth import peak_in_flight
from tests.support.compilations import layers, options_of


def test_the_peak_is_that_of_the_warm_up() -> None:
    options = options_of(layers(4), n_stages=4)
    assert peak_in_flight(pc.build_schedule("1f1b", 4, 8), options) == (4.0, 3.0, 2.0, 1.0)
    assert peak_in_flight(pc.build_schedule("gpipe", 4, 8), options) == (8.0,) * 4


def test_towers_hold_what_their_depth_needs() -> None:
    routes = [Route(f"v{stage}", stage, (3,)) for stage in range(3)]
    schedule = pc.build_schedule("1f1b", 4, 8, routes=routes)
    assert peak_in_flight(schedule, options_of(layers(4), n_stages=4)) == (2.0, 2.0, 2.0, 1.0)
