"""The clock of waits, with a clock of the computer that the test sets."""

from __future__ import annotations

import pytest

from pipecompile.distributed.failures import awake_clock
from pipecompile.distributed.failures.awake_clock import AwakeClock


def test_a_pause_between_two_readings_counts_no_more_than_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank said of others that they were silent for 120 s when its machine had slept."""
    times = iter([10.0, 10.5, 11.5, 500.0, 500.5])
    monkeypatch.setattr(awake_clock, "monotonic", lambda: next(times))
    clock = AwakeClock()
    assert [clock() for _ in range(4)] == [0.5, 1.5, 3.5, 4.0]
