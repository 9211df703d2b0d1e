from __future__ import annotations

import math

import pytest

from pipecompile.ir import HOST, LOSS, TARGET, Route
from pipecompile.verifiers.routes import route_faults


def test_inputs_skips_outputs_and_the_two_of_a_training_step_are_legal() -> None:
    routes = (
        Route("x", HOST, (0, 2, HOST)),
        Route("layers.0:out->1", 0, (1, 2), 8.0),
        Route(TARGET, HOST, (2,), 0.0, gradient=False),
        Route(LOSS, 2, (HOST,), 4.0, gradient=False),
    )
    assert route_faults(routes, 3) == []


@pytest.mark.parametrize(
    ("route", "fault"),
    [
        (Route("a b", 0, (1,)), "'a b' is not a name"),
        (Route("a#1", 0, (1,)), "'a#1' is not a name"),
        (Route("a'1", 0, (1,)), "is not a name"),
        (Route("a[0]", 0, (1,)), "'a[0]' is not a name"),
        (Route("", 0, (1,)), "'' is not a name"),
        (Route("@1", 0, (1,)), "'@1' is not a name: no spaces, no # ' [ ], and @0, @1 ... belong to the stages"),
        (Route("a", 0, (1,), -1.0), "the size must be finite and not negative"),
        (Route("a", 0, (1,), math.nan), "the size must be finite and not negative"),
        (Route("a", 0, (1, 3)), "there is no stage 3, stages are 0 to 2"),
        (Route("a", -2, (1,)), "there is no stage -2, stages are 0 to 2"),
        (Route("a", 0, ()), "the route has no consumer"),
        (Route("a", 0, (2, 1)), "consumers must be in ascending order, each once, the host last"),
        (Route("a", 0, (1, 1)), "consumers must be in ascending order, each once, the host last"),
        (Route("a", 0, (HOST, 1)), "consumers must be in ascending order, each once, the host last"),
        (Route("a", 1, (0,)), "the route goes back: every consumer must come after stage 1"),
        (Route("a", 0, (1, 2), sums=((2,),)), "a sum has at least two consumers, each in one sum"),
        (Route("a", 0, (1, 2), sums=((2, 1), (2, 1))), "a sum has at least two consumers, each in one sum"),
        (Route("a", 0, (1,), sums=((2, 1),)), "stage 2 is in a sum, and no consumer"),
        (Route("a", HOST, (1, 2), sums=((2, 1),)), "sums are of gradients that a stage sends to a stage"),
        (Route("a", 0, (1, 2), gradient=False, sums=((2, 1),)), "sums are of gradients that a stage sends to a stage"),
        (Route("a", 1, (1,)), "the route goes back: every consumer must come after stage 1"),
    ],
)
def test_each_fault_is_named_after_its_route(route: Route, fault: str) -> None:
    (found,) = route_faults((route,), 3)
    assert found.startswith(f"{route}: ")
    assert fault in found


def test_a_value_has_one_route() -> None:
    assert route_faults((Route("a", 0, (1,)), Route("a", 0, (2,))), 3) == [
        "2 routes are called 'a': a value has one route"
    ]
