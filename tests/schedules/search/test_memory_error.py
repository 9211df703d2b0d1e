from __future__ import annotations

import pytest

from pipecompile.errors import ScheduleError
from pipecompile.ir import Route, chain
from pipecompile.schedules import auto_schedule
from pipecompile.schedules.building_blocks import serial
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.schedules.search.memory_error import memory_error
from pipecompile.simulation.costs import make_costs


def test_the_error_names_device_memory_and_limit() -> None:
    costs = make_costs(2, 2, chain(2), saved_bytes=[3.0, 4096.0])
    judge = Evaluator((0, 1), tuple(chain(2)), costs, MemoryLimit((5.0, 1.0), in_bytes=True))
    text = str(memory_error(judge, [serial((0, 1), 2)], hint_recompute=True))
    assert "no schedule of 2 stages on 2 devices fits the memory" in text
    assert "4096 bytes (4.00 KiB) on device 1, the limit is 1 bytes" in text
    assert "checkpoint='auto'" in text


def test_the_error_counts_micro_batches_where_the_limit_does() -> None:
    judge = Evaluator((0, 1), tuple(chain(2)), make_costs(2, 2, chain(2)), MemoryLimit((0.5, 1.0), in_bytes=False))
    text = str(memory_error(judge, [serial((0, 1), 2)], hint_recompute=True))
    assert "needs 1 micro-batch in flight on device 0" in text
    assert "try    in_flight=1" in text
    assert "checkpoint" not in text


@pytest.mark.parametrize("gradient", [True, False])
def test_the_error_says_that_values_without_gradients_run_ahead(gradient: bool) -> None:
    routes = (Route("frozen", 0, (1,), 100.0, gradient=gradient),)
    costs = make_costs(2, 2, routes, forward=[0.1, 1.0], backward=[0.1, 2.0], saved_bytes=1.0)
    judge = Evaluator((0, 1), routes, costs, MemoryLimit((150.0, 50.0), in_bytes=True))
    text = str(memory_error(judge, [serial((0, 1), 6)], hint_recompute=False))
    assert "on device 1" in text
    assert ("frozen may arrive there for all micro-batches at once, as no gradient goes back" in text) is not gradient
    assert ("or fewer micro-batches of the same size" in text) is not gradient
    assert "memory_limit=" in text


def test_the_memory_that_is_named_for_values_that_run_ahead_is_enough() -> None:
    routes, costs = [Route("frozen", 0, (1,), 100.0, gradient=False)], {"forward": [0.1, 5.0], "saved_bytes": 10.0}
    for keywords in ({}, {"checkpoint": "auto"}):
        with pytest.raises(ScheduleError, match="fewer micro-batches of the same size") as caught:
            auto_schedule(2, 8, routes=routes, memory_limit=500, **costs, **keywords)
        assert "checkpoint" not in caught.value.hint
        limit = float(caught.value.hint.removeprefix("memory_limit=").split(",")[0])
        assert auto_schedule(2, 8, routes=routes, memory_limit=limit, **costs, **keywords).n_microbatches == 8
    assert auto_schedule(2, 4, routes=routes, memory_limit=500, **costs).n_microbatches == 4
