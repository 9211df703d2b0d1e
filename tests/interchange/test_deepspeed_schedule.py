"""DeepSpeed's schedules by name: their exchanges, and 1,000 names that are read as they were written."""

from __future__ import annotations

import pytest

from pipecompile.errors import InputError, ScheduleError
from pipecompile.interchange import read_schedule
from pipecompile.interchange.deepspeed_schedule import deepspeed_order
from pipecompile.interchange.order_report import check_order
from pipecompile.schedules import build_schedule


def test_a_train_schedule_of_two_stages_is_that_of_the_engine() -> None:
    assert str(deepspeed_order("TrainSchedule", 2, 2)) == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )


def test_a_train_schedule_is_1f1b_in_its_computations() -> None:
    order = deepspeed_order("TrainSchedule", 4, 8)
    assert check_order(order).is_sound
    assert check_order(order).makespan == 33
    assert {a for row in order.schedule.rows for a in row} == {
        a for row in build_schedule("1f1b", 4, 8).rows for a in row
    }


def test_inference_sends_before_it_receives_on_even_stages() -> None:
    assert str(deepspeed_order("InferenceSchedule", 3, 2)) == (
        "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1SEND_F0,1F1,1SEND_F1\n2RECV_F0,2F0,2RECV_F1,2F1\n"
    )


@pytest.mark.sampled(10)
@pytest.mark.parametrize("block", range(20))
def test_a_thousand_names_are_read_as_they_were_written(block: int) -> None:
    for number in range(50 * block, 50 * block + 50):
        name = ("TrainSchedule", "InferenceSchedule")[number % 2]
        order = deepspeed_order(name, 1 + number // 2 % 20, 1 + number // 40)
        assert read_schedule(order.name) == order
        assert number % 20 or check_order(order).is_sound


def test_wrong_names_and_counts_are_refused() -> None:
    with pytest.raises(InputError, match=r"'TrainingSchedule' is not known(.|\n)*TrainSchedule"):
        deepspeed_order("TrainingSchedule")
    with pytest.raises(ScheduleError, match="has one stage"):
        deepspeed_order("DataParallelSchedule", 2)
    assert str(deepspeed_order("DataParallelSchedule")) == "0F0,0B0,0F1,0B1\n"
