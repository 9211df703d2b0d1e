from __future__ import annotations

import numpy as np

from pipecompile.verifiers.array_waits import Meetings


def test_two_devices_that_send_first_wait_for_ever() -> None:
    """Row 0: meetings 0 and 1 with meetings 2 and 3 of row 1, in this order, or in the other."""
    starts, peer = np.array([0, 2, 4]), np.array([1, 1, 0, 0])
    assert Meetings(starts, peer, np.array([2, 3, 0, 1])).end()
    assert not Meetings(starts, peer, np.array([3, 2, 1, 0])).end()


def test_what_a_device_waits_for_is_over_before() -> None:
    """A meeting is two steps: the device comes to it, and has met. The other device has come to it by then, and may not have gone on."""
    meetings = Meetings(np.array([0, 2, 4]), np.array([1, 1, 0, 0]), np.array([2, 3, 0, 1]))
    assert meetings.closed(np.array([0, 0])).tolist() == [0, 0]
    assert meetings.closed(np.array([2, 0])).tolist() == [2, 1]
    assert meetings.closed(np.array([4, 0])).tolist() == [4, 3]
