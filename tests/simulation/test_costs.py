from __future__ import annotations

import math
from typing import Any

import pytest

from pipecompile.errors import InputError
from pipecompile.ir import Kind, Route, Tie, chain
from pipecompile.simulation.costs import Engines, make_costs


def test_by_default_every_action_takes_a_second_and_nothing_has_bytes() -> None:
    costs = make_costs(2, 2, chain(2))
    assert costs.seconds[Kind.FORWARD] == costs.seconds[Kind.RECOMPUTE] == (1.0, 1.0)
    assert costs.seconds[Kind.BACKWARD] == (2.0, 2.0)
    assert costs.engines is Engines.PAIR
    assert costs.saved == costs.weight_saved == costs.recipe == costs.parameters == (0.0, 0.0)
    assert costs.message("v0", 1e9, 0, 1) == 0.0


def test_what_is_not_passed_follows_from_what_is() -> None:
    """A backward takes both halves, a recomputation as long as a forward, and W needs all that is saved."""
    costs = make_costs(2, 2, chain(2), forward=[1, 2], input_grad=3, weight_grad=[4, 5], saved_bytes=7)
    assert costs.seconds[Kind.BACKWARD] == (7.0, 8.0)
    assert costs.seconds[Kind.RECOMPUTE] == (1.0, 2.0)
    assert costs.weight_saved == (7.0, 7.0)
    other = make_costs(2, 2, chain(2), backward=9, recompute=8, saved_bytes=7, weight_saved_bytes=[1, 2])
    assert other.seconds[Kind.BACKWARD] == (9.0, 9.0)
    assert other.seconds[Kind.RECOMPUTE] == (8.0, 8.0)
    assert other.weight_saved == (1.0, 2.0)


def test_a_message_takes_its_transfer_its_latency_and_its_bytes_over_the_bandwidth() -> None:
    routes, ties = (Route("a", 0, (1,), 100.0), Route("b", 0, (1,))), (Tie("t", (0, 1), 8.0),)
    links = {(0, 1): 2.0, (1, 0): 4.0}
    costs = make_costs(2, 2, routes, ties, transfer={"a": 0.5, "b": 0.25}, latency=links, bandwidth=links)
    assert costs.message("a", 100.0, 0, 1) == 0.5 + 2.0 + 100.0 / 2.0
    assert costs.message("a", 100.0, 1, 0) == 0.5 + 4.0 + 100.0 / 4.0
    assert costs.message("t", 8.0, 1, 0) == 4.0 + 8.0 / 4.0, "a tie needs no entry"
    assert make_costs(2, 2, routes, ties, transfer=3).transfer == {"a": 3.0, "b": 3.0, "t": 3.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": [1.0]}, "forward has 1 number for 2 stages"),
        ({"input_grad": -1.0}, "input_grad=-1.0 is not a finite number of at least 0"),
        ({"weight_grad": [1.0, math.nan]}, r"weight_grad\[1\]=nan is not a finite number of at least 0"),
        ({"saved_bytes": math.inf}, "saved_bytes=inf is not a finite number"),
        ({"transfer": math.inf}, "transfer=inf is not a finite number"),
        ({"transfer": {"other": 1.0}}, "transfer has no entry for route 'v0'"),
        ({"transfer": {"v0": -1.0}}, r"transfer\['v0'\]=-1.0 is not a finite number"),
        ({"latency": {(0, 1): 1.0}}, r"latency has no entry for devices \(1, 0\)"),
        ({"latency": {(0, 1): 1.0, (1, 0): -1.0}}, r"latency\[\(1, 0\)\]=-1.0 is not a finite number"),
        ({"bandwidth": 0.0}, "bandwidth=0.0 is not a number above 0"),
        ({"engines": "many"}, "engines='many' is not known\n  try    'pair' or 'device'"),
    ],
)
def test_costs_that_are_no_costs_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_costs(2, 2, chain(2), **arguments)
