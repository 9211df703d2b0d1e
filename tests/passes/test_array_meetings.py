from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipecompile.ir import Op, Route, chain
from pipecompile.passes.array_lowering import action_arrays, transfer_rows
from pipecompile.passes.array_meetings import meeting_rows
from pipecompile.passes.communication_order import order_meetings
from pipecompile.passes.lower_actions import lower_actions
from pipecompile.passes.transfers import insert_transfers
from pipecompile.schedules.periods import build_periodic


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zbv", "dualpipev", "v-half", "mario"])
@pytest.mark.parametrize("devices", [2, 5])
def test_receives_move_as_in_the_pass(name: str, devices: int) -> None:
    stages = devices if name in ("1f1b", "zb-h1", "mario") else 2 * devices
    schedule = build_periodic(name, stages, 6 * devices, n_devices=devices)
    routes = (*chain(stages), Route("skip", 0, (stages - 1,)))
    arrays = meeting_rows(transfer_rows(action_arrays(schedule, routes, 5)), schedule, 5)
    program = order_meetings(insert_transfers(lower_actions(schedule.unrolled(5), routes)))
    assert arrays is not None
    assert tuple(map(arrays.row, range(devices))) == program.rows


def test_two_devices_that_both_wait_to_receive_are_left_to_the_pass() -> None:
    """Each receives before it sends: no message of theirs could be received at once."""
    schedule = build_periodic("1f1b", 2, 8)
    arrays = transfer_rows(action_arrays(schedule, chain(2), 3))
    rows = [
        (numbers[order], own[order])
        for (numbers, own), order in (
            (row, np.argsort([one.op is not Op.RECV for one in arrays.row(device)], kind="stable"))
            for device, row in enumerate(arrays.rows)
        )
    ]
    assert meeting_rows(replace(arrays, rows=rows), schedule, 3) is None


def test_devices_that_wait_for_ever_are_left_to_the_pass() -> None:
    """The last device never receives what the first waits to send."""
    schedule = build_periodic("1f1b", 2, 8)
    arrays = transfer_rows(action_arrays(schedule, chain(2), 3))
    (numbers, microbatches), last = arrays.rows[0], arrays.rows[1]
    broken = replace(arrays, rows=[(numbers, microbatches), (last[0][1:], last[1][1:])])
    assert meeting_rows(broken, schedule, 3) is None
