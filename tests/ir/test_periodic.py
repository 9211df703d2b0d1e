from __future__ import annotations

import json
import re

import pytest

from pipecompile.errors import ScheduleError
from pipecompile.ir import Schedule
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.schedules.periods import find_period

TEXT = "0F0,(0F1;0B0)x3+1,0B3\n(1F0;1B0)x3+1,1F3,1B3\n"


def test_text_and_json_read_back() -> None:
    periodic = PeriodicSchedule.from_csv(TEXT)
    assert str(periodic) == TEXT
    assert PeriodicSchedule.from_json(periodic.to_json()) == periodic
    assert (periodic.n_microbatches, periodic.n_devices, periodic.repetitions, periodic.step) == (4, 2, 3, 1)


def test_a_csv_with_repeated_cells_is_the_schedule_unrolled() -> None:
    schedule = Schedule.from_csv(TEXT)
    assert schedule.to_csv() == "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    assert schedule == PeriodicSchedule.from_csv(TEXT).unrolled()
    assert Schedule.from_csv(
        TEXT.replace("x3", "x2").replace("3\n", "2\n").replace("1F3", "1F2")
    ) == PeriodicSchedule.from_csv(TEXT).unrolled(2)


def test_more_repetitions_are_more_micro_batches() -> None:
    more = PeriodicSchedule.from_csv(TEXT).repeated(5)
    assert more.n_microbatches == 6
    found = find_period(more.unrolled())
    assert found is not None
    assert found.unrolled() == more.unrolled()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", "the row has 0 periods, expected 1\n  where  row 0 (line 1)"),
        ("(0F0;0B0)x2+1,(0F2;0B2)x2+1\n", "the row has 2 periods"),
        ("(0F0;0B0)x2+1\n(1F0;1B0)x3+1\n", "the rows are repeated differently"),
        ("(0F0;0X0)x2+1\n", "'0X0' is not an action\n  where  row 0 (line 1), cell 1"),
        ("0F0,(0F1;0B0)x2+1,0X3\n", "'0X3' is not an action\n  where  row 0 (line 1), cell 3"),
        ("(0F0;0B0)x999999999+1\n", "is repeated too often"),
        (
            "(0F0;0I0)x3+1,0W0,0W1,0W2\n",
            "0W0 after the period is on a micro-batch of the repetitions\n  where  row 0 (line 1)",
        ),
    ],
)
def test_what_is_no_periodic_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        PeriodicSchedule.from_csv(text)


def test_absurd_repetitions_are_refused_by_the_parser_of_schedules_too() -> None:
    with pytest.raises(ScheduleError, match="is repeated too often"):
        Schedule.from_csv("(0F0;0B0)x999999999+1\n")


@pytest.mark.parametrize("name", ["n_stages", "repetitions", "step", "placement"])
@pytest.mark.parametrize("value", [2.7, "2", True, None])
def test_counts_of_json_are_whole_numbers(name: str, value: object) -> None:
    data = json.loads(PeriodicSchedule.from_csv(TEXT).to_json())
    data[name] = [value, 1] if name == "placement" else value
    with pytest.raises(
        ScheduleError, match=f"not a periodic schedule\n  why    TypeError: {name} is .*, not a whole number"
    ):
        PeriodicSchedule.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["[]", "{}", "x", '{"prologue": 1}', TEXT])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="the text is not a periodic schedule"):
        PeriodicSchedule.from_json(text)
