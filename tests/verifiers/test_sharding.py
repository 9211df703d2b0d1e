"""Faults of the actions on sharded parameters; damages at random are in test_mutations.py."""

from __future__ import annotations

import pytest

from pipecompile.errors import VerifyError
from pipecompile.ir import Schedule
from pipecompile.passes import lower
from pipecompile.passes.sharding import insert_sharding
from pipecompile.schedules import build_schedule
from pipecompile.verifiers import verify


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("0F0,0UNSHARD,0B0,0RESHARD,0REDUCE_GRAD", "0F0 runs while the parameters of stage 0 are sharded"),
        ("0UNSHARD,0F0,0RESHARD,0B0,0REDUCE_GRAD", "0B0 runs while the parameters of stage 0 are sharded"),
        ("0UNSHARD,0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD", "0UNSHARD: the stage is unsharded already"),
        ("0UNSHARD,0F0,0B0,0RESHARD,0RESHARD,0REDUCE_GRAD", "0RESHARD: the stage is not unsharded"),
        ("0UNSHARD,0F0,0B0,0REDUCE_GRAD", "0UNSHARD: no RESHARD comes after the last UNSHARD of stage 0"),
        ("0UNSHARD,0F0,0B0,0RESHARD", "stage 0 runs UNSHARD and never REDUCE_GRAD"),
        ("0F0,0REDUCE_GRAD,0B0", "0REDUCE_GRAD runs before 0B0, which adds to its gradients"),
        ("0F0,0I0,0REDUCE_GRAD,0W0", "0REDUCE_GRAD runs before 0W0, which adds to its gradients"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", "0REDUCE_GRAD is run 2 times, once is right"),
        ("0F0,0REDUCE_GRAD", "0REDUCE_GRAD is run, and the schedule has no backward"),
    ],
)
def test_each_fault_is_named(row: str, fault: str) -> None:
    with pytest.raises(VerifyError) as error:
        verify(Schedule.from_csv(row))
    assert fault in str(error.value)
    assert "1 fault" in str(error.value)


def test_a_reduction_alone_and_a_forward_alone_are_legal() -> None:
    for row in ("0F0,0F1,0B0,0B1,0REDUCE_GRAD", "0UNSHARD,0F0,0RESHARD,0UNSHARD,0F1,0RESHARD"):
        verify(Schedule.from_csv(row))


def test_gathered_parameters_count_in_the_peak_of_a_program() -> None:
    program = lower(insert_sharding(build_schedule("looped-bfs", 4, 2, n_devices=1), ahead=0))
    verify(program, memory_limit=10.0, unsharded_bytes=10.0)
    with pytest.raises(VerifyError, match=r"10 bytes are held, 9 are allowed"):
        verify(program, memory_limit=9.0, unsharded_bytes=10.0)
