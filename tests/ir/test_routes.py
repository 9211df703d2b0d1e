"""Routes lead values from a source to consumers; ties name the stages that share parameters."""

from __future__ import annotations

from pipecompile.ir import HOST, Route, Tie, chain, place
from pipecompile.ir.routes import stages_after, union_routes
from pipecompile.verifiers.routes import route_faults


def test_a_tie_lives_with_its_first_stage() -> None:
    tie = Tie("w", (0, 3, 5), 8.0)
    assert str(tie) == "tie w: 0 3 5, 8 bytes"
    assert tie.devices((1, 0, 0, 1, 0, 2)) == (1, 2)


def test_a_chain_hands_one_value_from_each_stage_to_the_next() -> None:
    assert [str(route) for route in chain(3)] == [
        "route v0: 0 -> 1, 0 bytes, gradient",
        "route v1: 1 -> 2, 0 bytes, gradient",
    ]
    assert chain(1) == ()


def test_a_skip_is_a_consumer_beyond_the_next_stage() -> None:
    assert Route("v", 0, (1, 2, 4, HOST)).skips == (2, 4)
    assert Route("x", HOST, (0, 3)).skips == ()


def test_a_fractional_size_is_written_as_such() -> None:
    assert str(Route("v", 0, (1, HOST), 2.5, gradient=False)) == "route v: 0 -> 1 host, 2.5 bytes"


def test_an_end_is_a_number_or_the_host() -> None:
    assert [place(end) for end in (0, 12, HOST)] == ["0", "12", "host"]


def test_the_stages_after_a_stage_are_those_of_the_longest_path() -> None:
    assert stages_after(4, chain(4)) == (3, 2, 1, 0)
    towers = (
        Route("a", 0, (1,)),
        Route("b", 1, (4,)),
        Route("c", 2, (3,)),
        Route("d", 3, (4,)),
        Route("y", 4, (HOST,)),
    )
    assert stages_after(5, towers) == (2, 1, 2, 1, 0)
    assert stages_after(3, (Route("x", HOST, (0, 2)), Route("a", 0, (HOST,)))) == (1, 0, 0)
    assert stages_after(4, (*chain(4), Route("skip", 0, (3,)))) == (3, 2, 1, 0)


def test_the_gradients_of_a_sum_are_sent_by_its_last_stage() -> None:
    route = Route("v", 0, (1, 2, 3, 5, HOST), 8.0, sums=((5, 3, 1),))
    assert str(route) == "route v: 0 -> 1 2 3 5 host, 8 bytes, gradient, sums 5+3+1"
    assert route.senders == (1, 2, HOST)
    assert [route.added_by(stage) for stage in (1, 2, 3, 5)] == [3, None, 5, None]
    assert Route("v", 0, (1, 2), gradient=False).senders == ()


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
