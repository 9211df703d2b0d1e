from __future__ import annotations

import pytest

from pipecompile.errors import InputError, VerifyError
from pipecompile.ir import HOST, Program, Route, Schedule
from pipecompile.passes import lower
from pipecompile.passes.offloading import insert_offload
from pipecompile.schedules import build_schedule
from pipecompile.verifiers import verify

ROUTES = (Route("x", HOST, (0,), 10.0, gradient=False), Route("v0", 0, (1,), 4.0))


def test_micro_batches_in_flight_are_counted_per_device() -> None:
    schedule = build_schedule("1f1b", 3, 6)
    for subject in (schedule, lower(schedule)):
        verify(subject, in_flight=3)
        verify(subject, in_flight=[3, 2, 1])
        with pytest.raises(VerifyError) as caught:
            verify(subject, in_flight=[2.5, 2, 0])
        assert caught.value.faults == (
            "device 0 has 3 micro-batches in flight, 2.5 are allowed",
            "device 2 has 1 micro-batch in flight, 0 are allowed",
        )


def test_bytes_are_counted_by_the_order_of_the_row_and_the_worst_place_is_named() -> None:
    program = lower(build_schedule("gpipe", 2, 2), ROUTES)
    verify(program, memory_limit=[214, 208], saved_bytes=100)
    with pytest.raises(VerifyError) as caught:
        verify(program, memory_limit=[213, 208], saved_bytes=100)
    assert caught.value.faults == (
        "device 0, step 6, 0F1 x#1[0] -> v0#1[0] @0#1[1]: 214 bytes are held, 213 are allowed",
    )


def test_what_i_leaves_for_w_is_counted_once() -> None:
    program: Program = lower(Schedule.from_csv("0F0,0I0,0W0\n"))
    verify(program, memory_limit=100, saved_bytes=100)


def test_a_recomputed_forward_saves_nothing_but_its_inputs() -> None:
    program = lower(build_schedule("gpipe", 2, 4), ROUTES, checkpoint="always")
    verify(program, memory_limit=100 + 4 * 10 + 8, saved_bytes=100)


def test_what_is_offloaded_counts_until_its_copy_and_again_from_its_reload() -> None:
    program = lower(insert_offload(Schedule.from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n")))
    verify(program, memory_limit=200, saved_bytes=100)
    with pytest.raises(VerifyError, match="200 bytes are held, 199 are allowed"):
        verify(program, memory_limit=199, saved_bytes=100)


def test_limits_that_make_no_sense_are_refused() -> None:
    schedule = build_schedule("gpipe", 2, 2)
    with pytest.raises(InputError, match="in_flight has 3 numbers for 2 devices"):
        verify(schedule, in_flight=[1, 2, 3])
    with pytest.raises(InputError, match="memory_limit needs a program"):
        verify(schedule, memory_limit=3)
    with pytest.raises(InputError, match="saved_bytes has 1 number for 2 stages"):
        verify(lower(schedule), memory_limit=3, saved_bytes=[1.0])


def test_limits_and_other_faults_are_reported_together() -> None:
    with pytest.raises(VerifyError) as caught:
        verify(Schedule.from_csv("0F0,0F0,0B0\n"), in_flight=1)
    assert len(caught.value.faults) == 2
