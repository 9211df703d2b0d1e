"""A device adds up gradients where eager adds them first, or all of them; never against the order of its backwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipecompile.ir import HOST, Action, Kind, Op, Route, Schedule
from pipecompile.ir.program_text import parse_program
from pipecompile.ir.routes import Sums
from pipecompile.passes.gradient_sums import with_sums
from pipecompile.passes.lowering import lower
from pipecompile.schedules import build_schedule


def backwards(placement: tuple[int, ...], *, rising: bool = False) -> Schedule:
    """Return a step of two micro-batches; with `rising`, devices go back through their stages in rising order."""
    rows = []
    for device in range(max(placement) + 1):
        stages = [s for s, home in enumerate(placement) if home == device]
        forwards = [Action(s, Kind.FORWARD, m) for s in stages for m in range(2)]
        order = stages if rising else stages[::-1]
        rows.append((*forwards, *(Action(s, Kind.BACKWARD, m) for s in order for m in range(2))))
    return Schedule(len(placement), 2, placement, tuple(rows), "test")


@pytest.mark.parametrize(
    ("placement", "consumers", "sums", "groups"),
    [
        ((0, 1, 1), (1, 2), "eager", ((2, 1),)),  # two are added in either order
        ((0, 1, 1, 1), (1, 2, 3), "eager", ((3, 2, 1),)),
        ((0, 1, 2, 2), (1, 2, 3), "eager", ((3, 2),)),  # eager adds 3 and 2 first
        ((0, 2, 2, 1), (1, 2, 3), "eager", ()),  # eager adds 3 and 2 first, but on two devices
        ((0, 2, 2, 1), (1, 2, 3), "device", ((2, 1),)),
        ((0, 1, 2, 1, 2), (1, 2, 3, 4), "device", ((4, 2), (3, 1))),
        ((0, 1, 2, 1, 2), (1, 2, 3, 4), "eager", ()),
        ((0, 1, 1, 0), (1, 2, 3), "device", ((2, 1),)),
        ((0, 1, 1, 0), (1, 2, 3), "eager", ()),  # the gradient of 3 is not sent, and comes first
        ((0, 0, 0), (1, 2), "device", ()),  # nothing is sent
        ((0, 1, 1), (1, 2, HOST), "device", ((2, 1),)),
        ((0, 1, 1), (1, 2, HOST), "eager", ()),  # the gradient of an output comes first
    ],
)
def test_groups(
    placement: tuple[int, ...], consumers: tuple[int, ...], sums: Sums, groups: tuple[tuple[int, ...], ...]
) -> None:
    (route,) = with_sums(backwards(placement), (Route("v", 0, consumers),), sums)
    assert route.sums == groups


def test_what_is_not_added_up() -> None:
    schedule, route = backwards((0, 1, 1)), Route("v", 0, (1, 2))
    for left in (replace(route, gradient=False), replace(route, source=HOST)):
        assert with_sums(schedule, (left,), "device") == (left,)
    rising = backwards((0, 1, 1), rising=True)
    assert with_sums(rising, (route,), "device") == (route,)
    inference = replace(schedule, rows=tuple(tuple(a for a in row if a.kind is Kind.FORWARD) for row in schedule.rows))
    assert with_sums(inference, (route,), "device") == (route,)
    summed = replace(route, sums=((2, 1),))
    assert with_sums(rising, (summed,), "eager") == (summed,)  # what a program has stays


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("interleaved", 2), ("zbv", 2), ("interleaved-zb", 2), ("v-half", 2), ("dualpipev", 2)]
)
def test_one_gradient_per_value_and_device_is_sent(schedule: str, chunks: int) -> None:
    """The lowering verifies every level of the program."""
    routes = (
        Route("x", HOST, (0,)),
        *(Route(f"v{s}", s, tuple(range(s + 1, 4 * chunks))) for s in range(4 * chunks - 1)),
    )
    built = build_schedule(schedule, 4 * chunks, 8, n_devices=4)
    place = built.placement
    program = lower(built, routes, sums="device")
    sent = [i.reads[0].value for row in program.rows for i in row if i.op is Op.SEND and i.peer != HOST]
    pairs = sum(len({place[c] for c in r.consumers} - {place[r.source]}) for r in routes[1:])
    assert sum(value.consumer is not None for value in sent) == pairs * 8
    assert sum(value.consumer is None for value in sent) == pairs * 8
    assert parse_program(str(program)) == program
    assert lower(built, program.routes) == program  # the routes of a program say all


def test_the_last_stage_of_a_sum_sends_it() -> None:
    program = lower(backwards((0, 1, 1)), (Route("v", 0, (1, 2)),))
    lines = [line.strip() for line in str(program).split("device 1")[1].splitlines()]
    assert "route v: 0 -> 1 2, 0 bytes, gradient, sums 2+1" in str(program)
    computed = [line.split("[")[0] for line in lines if line.startswith(("1B0", "SEND"))]
    assert computed == ["1B0 @1#0", "SEND v'1#0", "SEND v'1#1"]
    (adding,) = [line for line in lines if line.startswith("1B0")]
    assert "v'2#0" in adding.split("->")[0]
