"""Received values on devices whose copies run beside compute: freed after what their readers saved."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pipecompile as pc
from pipecompile.ir import HOST, Op, Program
from pipecompile.passes import lower
from pipecompile.verifiers import verify
from pipecompile.verifiers.received_values import received_faults

NAMES = ["gpipe", "1f1b", "zb-h1", "interleaved", "zbv"]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", NAMES)
def test_the_lowering_for_such_devices_is_accepted_and_the_other_refused(name: str, checkpoint: str) -> None:
    schedule = pc.build_schedule(name, 4, 4, n_devices=2 if name in ("interleaved", "zbv") else 4)
    assert not list(received_faults(lower(schedule, checkpoint=checkpoint, overlap=True)))
    assert list(received_faults(lower(schedule, checkpoint=checkpoint)))


def test_every_free_of_a_received_value_that_comes_earlier_is_a_fault() -> None:
    """Directly after the reader, as the pass `liveness` puts it, such a FREE is legal for every other verifier."""
    program, n_moved = lower(pc.build_schedule("1f1b", 3, 4), overlap=True), 0
    for device, row in enumerate(program.rows):
        for index, one in enumerate(row):
            if one.op is not Op.RECV or one.peer == HOST:
                continue
            value = one.writes[0].value
            free = next(i for i, other in enumerate(row) if other.op is Op.FREE and other.reads[0].value == value)
            reader = next(i for i in range(index + 1, len(row)) if value in [o.value for o in row[i].reads])
            if reader + 1 == free:
                continue
            moved = (*row[: reader + 1], row[free], *row[reader + 1 : free], *row[free + 1 :])
            damaged: Program = replace(program, rows=(*program.rows[:device], moved, *program.rows[device + 1 :]))
            verify(damaged)
            (fault,) = received_faults(damaged)
            assert f"device {device}, step {reader + 1}, FREE {value}" in fault
            n_moved += 1
    assert n_moved > 8
