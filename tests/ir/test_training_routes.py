"""Outputs of the model go to the last stage, which computes the loss; target, loss and auxiliary output are added."""

from __future__ import annotations

from pipecompile.ir import HOST, Route
from pipecompile.ir.training_routes import training_routes

PLAN = (
    Route("input", HOST, (0,), 8.0, gradient=False),
    Route("h", 0, (1,), 16.0),
    Route("y", 1, (2, HOST), 4.0),
    Route("z", 2, (HOST,), 2.0),
)


def shown(*, with_target: bool = False, has_aux: bool = False) -> list[str]:
    return [str(route) for route in training_routes(PLAN, 3, with_target, has_aux)]


def test_an_output_goes_to_the_last_stage_and_needs_no_route_when_it_is_computed_there() -> None:
    assert shown() == [
        "route input: host -> 0, 8 bytes",
        "route h: 0 -> 1, 16 bytes, gradient",
        "route y: 1 -> 2, 4 bytes, gradient",
        "route @loss: 2 -> host, 0 bytes, gradient",
    ]


def test_the_target_comes_from_the_host_and_has_no_gradient() -> None:
    assert shown(with_target=True)[-2:] == [
        "route @target: host -> 2, 0 bytes",
        "route @loss: 2 -> host, 0 bytes, gradient",
    ]


def test_the_auxiliary_output_goes_to_the_host_without_a_gradient() -> None:
    assert shown(has_aux=True)[-2:] == [
        "route @aux: 2 -> host, 0 bytes",
        "route @loss: 2 -> host, 0 bytes, gradient",
    ]


def test_an_input_that_is_an_output_goes_to_the_last_stage() -> None:
    assert training_routes([Route("x", HOST, (0, HOST))], 2, with_target=False)[0].consumers == (0, 1)
