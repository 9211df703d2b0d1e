"""Routes of several recordings in one program: equal values share a route, other sources get other names."""

from pipecompile.ir import HOST, Route
from pipecompile.ir.route_union import union_routes
from pipecompile.verifiers.routes import route_faults


def test_equal_routes_are_one() -> None:
    routes = (Route("x", HOST, (0,), 8.0), Route("h", 0, (1, HOST), 4.0))
    united, names = union_routes({1: routes, 2: routes})
    assert united == routes
    assert names == {1: {"x": "x", "h": "h"}, 2: {"x": "x", "h": "h"}}


def test_consumers_are_united_and_the_host_comes_last() -> None:
    united, _ = union_routes({1: (Route("h", 0, (1, HOST), 4.0, False),), 2: (Route("h", 0, (2,), 9.0),)})
    assert united == (Route("h", 0, (1, 2, HOST), 9.0),)
    assert route_faults(united, 3) == []


def test_a_value_of_another_source_gets_a_name_of_its_own() -> None:
    united, names = union_routes({1: (Route("h", 0, (1,)),), 7: (Route("h", 1, (2,)), Route("k", 0, (1,)))})
    assert [(route.value, route.source) for route in united] == [("h", 0), ("h~7", 1), ("k", 0)]
    assert names[7] == {"h": "h~7", "k": "k"}
    assert route_faults(united, 3) == []
