from __future__ import annotations

from pathlib import Path

from golden import CheckGolden
from hypothesis import given, settings
from hypothesis import strategies as st
from program_strategies import schedules

from pipecompile.ir import Kind, Schedule
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.passes.early_recompute import advance_recompute
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify

GOLDEN = Path(__file__).parent / "golden" / "early_recompute.txt"


def test_recomputations_fill_the_time_in_which_a_device_waits(check_golden: CheckGolden) -> None:
    def run(text: str) -> str:
        first, _, rows = text.partition("\n")
        return str(advance_recompute(Schedule.from_csv(rows), int(first.removeprefix("restored "))))

    check_golden(GOLDEN, run)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(1, 4), st.floats(0.25, 2), st.floats(0, 2))
def test_the_step_is_never_longer_and_the_room_is_kept(
    schedule: Schedule, restored: int, recompute: float, transfer: float
) -> None:
    if all(action.kind is Kind.FORWARD for row in schedule.rows for action in row):
        return
    late = insert_recompute(schedule, "always")
    early = advance_recompute(late, restored, recompute=recompute, transfer=transfer)
    verify(early)
    before, after = (simulate(each, recompute=recompute, transfer=transfer).makespan for each in (late, early))
    assert after <= before + 1e-9
    assert all(held <= max(restored, most) for held, most in zip(_held(early), _held(late), strict=True))


def _held(schedule: Schedule) -> list[int]:
    """Per device the most that are restored at one time."""
    peaks = []
    for row in schedule.rows:
        count = peak = 0
        for action in row:
            count += {Kind.RECOMPUTE: 1, Kind.BACKWARD: -1, Kind.INPUT_GRAD: -1}.get(action.kind, 0)
            peak = max(peak, count)
        peaks.append(peak)
    return peaks
