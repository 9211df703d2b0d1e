from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from state_space import explore

from pipecompile.ir import HOST, Op, Program, Route
from pipecompile.ir.program_text import parse_program
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule
from pipecompile.verifiers.message_models import ALL_MODELS, MessageModel
from pipecompile.verifiers.pairing import pairing_faults

ROUTES = (Route("x", HOST, (0,), 8.0), Route("h", 0, (1,), 8.0), Route("y", 1, (HOST,), 8.0))
LEGAL = str(lower(build_schedule("gpipe", 2, 1), ROUTES))


def faults(text: str, *models: MessageModel) -> list[str]:
    return pairing_faults(parse_program(text), frozenset(models) or ALL_MODELS)


def test_lowered_programs_are_paired() -> None:
    assert faults(LEGAL) == []


@pytest.mark.parametrize(
    ("old", "new", "fault", "picture"),
    [
        (
            "SEND h#0[0] to 1",
            "",
            "h#0 from device 0 to device 1: never sent, received once",
            "device 0 │ (nothing) ──▶ RECV h#0 from 0 │ device 1",
        ),
        (
            "RECV h#0[0] from 0",
            "",
            "h#0 from device 0 to device 1: sent once, never received",
            "device 0 │ SEND h#0 to 1 ──▶ (nothing) │ device 1",
        ),
        (
            "SEND h#0[0] to 1",
            "SEND h#0[0] to 1\nSEND h#0[0] to 1",
            "h#0 from device 0 to device 1: sent 2 times, received once",
            "device 0 │ SEND h#0 to 1 ──▶ RECV h#0 from 0 │ device 1",
        ),
        (
            "SEND y#0[0] to host",
            "",
            "y#0 from device 1 to host: never sent, received once",
            "device 1 │ (nothing) ──▶ RECV y#0 from 1 │ host",
        ),
        (
            "SEND x'0#0[0] to host",
            "",
            "x'0#0 from device 0 to host: never sent, received once",
            "device 0 │ (nothing) ──▶ RECV x'0#0 from 0 │ host",
        ),
        (
            "RECV h#0[0] from 0",
            "RECV h#0[0] from 0\nRECV h#0[0] from host",
            "h#0 from host to device 1: never sent, received once",
            "host │ (nothing) ──▶ RECV h#0 from host │ device 1",
        ),
    ],
)
def test_a_partner_that_is_missing_is_drawn(old: str, new: str, fault: str, picture: str) -> None:
    assert old in LEGAL
    assert faults(LEGAL.replace(old, new)) == [f"{fault}\n      {picture}"]


def test_devices_that_wait_for_one_another_are_drawn_as_a_cycle() -> None:
    text = """\
program: 2 stages on devices 0 1, 1 micro-batches
device 0
  RECV b#0 from 1
  SEND a#0 to 1
device 1
  RECV a#0 from 0
  SEND b#0 to 0
"""
    (fault,) = faults(text)
    cycle, *rows = fault.splitlines()
    assert cycle.removeprefix("deadlock, each waits for the next: ").split(" -> ") == [
        "RECV b#0 from 1 (device 0)",
        "SEND b#0 to 0 (device 1)",
        "RECV a#0 from 0 (device 1)",
        "SEND a#0 to 1 (device 0)",
        "RECV b#0 from 1 (device 0)",
    ]
    assert rows == [
        "      device 0 │ … RECV b#0 from 1* SEND a#0 to 1 …",
        "      device 1 │ … RECV a#0 from 0* SEND b#0 to 0 …",
    ]


BOTH_SEND_FIRST = """\
program: 2 stages on devices 0 1, 1 micro-batches
device 0
  SEND a#0 to 1
  RECV b#0 from 1
device 1
  SEND b#0 to 0
  RECV a#0 from 0
"""


def test_two_that_send_first_are_stuck_only_when_a_send_waits_for_its_receive() -> None:
    assert faults(BOTH_SEND_FIRST, MessageModel.BUFFERED, MessageModel.FIFO) == []
    (fault,) = faults(BOTH_SEND_FIRST)
    assert fault.startswith(
        "if sends wait for their receives: deadlock, each waits for the next: SEND a#0 to 1 (device 0)"
    )
    assert "      device 0 │ … SEND a#0 to 1* RECV b#0 from 1 …" in fault.splitlines()


CROSSED = """\
program: 2 stages on devices 0 1, 1 micro-batches
device 0
  SEND a#0 to 1
  SEND b#0 to 1
  SEND c#0 to 1
device 1
  RECV a#0 from 0
  RECV c#0 from 0
  RECV b#0 from 0
"""


def test_messages_that_overtake_each_other_are_shown_from_the_first_on() -> None:
    assert faults(CROSSED, MessageModel.BUFFERED) == []
    assert faults(CROSSED, MessageModel.FIFO) == [
        "messages from device 0 to device 1 are not received in the order in which they are sent\n"
        "      device 0 │ … SEND b#0, c#0 … ──▶ device 1 │ … RECV c#0, b#0 …"
    ]


def test_devices_that_exchange_two_parameters_in_different_order_are_stuck() -> None:
    text = """\
program: 2 stages on devices 0 1, 1 micro-batches
tie v: 0 1, 4 bytes
tie w: 0 1, 4 bytes
device 0
  BROADCAST v
  BROADCAST w
device 1
  BROADCAST w
  BROADCAST v
"""
    (fault,) = faults(text, MessageModel.BUFFERED)
    assert fault.startswith("deadlock, each waits for the next: BROADCAST v (device 0) -> ")


# -- every order of events --------------------------------------------------------------------------------------------


def with_messages_in_another_order(program: Program, rng: Random) -> Program:
    """Return the program with two neighbouring messages of a row exchanged."""
    rows = [list(row) for row in program.rows]
    row = rng.choice(rows)
    places = [i for i, each in enumerate(row) if each.op in (Op.SEND, Op.RECV) and each.peer != HOST]
    if len(places) > 1:
        first = rng.randrange(len(places) - 1)
        a, b = places[first], places[first + 1]
        row[a], row[b] = row[b], row[a]
    return replace(program, rows=tuple(map(tuple, rows)))


@pytest.mark.parametrize("model", MessageModel)
@pytest.mark.parametrize(("name", "n_stages"), [("1f1b", 3), ("zbv", 4), ("interleaved", 6), ("hanayo", 4)])
def test_what_is_refused_has_an_order_of_events_that_ends_badly_and_what_is_accepted_has_none(
    name: str, n_stages: int, model: MessageModel
) -> None:
    """benchmarks/model_checking.py does it for all schedules on up to 4 devices."""
    legal, rng, refused = lower(build_schedule(name, n_stages, 2, n_devices=3 if n_stages != 4 else 2)), Random(name), 0
    assert explore(legal, model.value).is_safe
    for _ in range(20):
        changed = with_messages_in_another_order(legal, rng)
        is_refused = bool(pairing_faults(changed, frozenset({model})))
        assert is_refused != explore(changed, model.value).is_safe
        refused += is_refused
    assert refused
