from __future__ import annotations

from pathlib import Path

import pytest
from golden import CheckGolden

from pipecompile.errors import ScheduleError
from pipecompile.ir import Schedule
from pipecompile.passes.checkpointing import Checkpoint, insert_recompute
from pipecompile.passes.offloading import insert_offload
from pipecompile.schedules import build_schedule

GOLDEN = Path(__file__).parent / "golden" / "recompute.txt"


def test_forwards_are_run_again_before_their_backward(check_golden: CheckGolden) -> None:
    def run(text: str) -> str:
        first, _, rows = text.partition("\n")
        mode: Checkpoint = [flag == "1" for flag in first.split()] if first[0].isdigit() else first
        return str(insert_recompute(Schedule.from_csv(rows), mode))

    check_golden(GOLDEN, run)


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(ScheduleError, match="checkpoint='sometimes' is not known\n  try    pass 'never', 'always'"):
        insert_recompute(build_schedule("gpipe", 2, 2), "sometimes")
    with pytest.raises(ScheduleError, match="checkpoint has 3 flags for 2 stages"):
        insert_recompute(build_schedule("gpipe", 2, 2), (True, False, True))


def test_what_is_offloaded_is_not_run_again() -> None:
    schedule = insert_offload(build_schedule("gpipe", 2, 3), [0])
    rows = insert_recompute(schedule, "always").to_csv().splitlines()
    assert rows[0] == schedule.to_csv().splitlines()[0]
    assert rows[1] == "1F0,1F1,1F2,1R0,1B0,1R1,1B1,1R2,1B2"
