from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from damages import random_schedule

from pipecompile.errors import InfeasibleError, InputError, ScheduleError
from pipecompile.ir import SHARDING, Kind, Schedule
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.program_text import parse_program
from pipecompile.passes import lower
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.passes.early_recompute import advance_recompute
from pipecompile.passes.sharding import insert_sharding, shard_to_fit
from pipecompile.passes.split_backward import split_backward
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify

COSTS = {"unsharded_bytes": 10.0, "gradient_bytes": 10.0, "shard_bandwidth": 20.0, "saved_bytes": 1.0}
LOOPED = Schedule.from_csv("0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,1B0,1B1\n")


def gathers(schedule: Schedule) -> int:
    return sum(action.kind is Kind.UNSHARD for row in schedule.rows for action in row)


@pytest.mark.parametrize(
    ("ahead", "row"),
    [
        (0, "0UNSHARD,0F0,0F1,0RESHARD,2UNSHARD,2F0,2F1,2B0,2B1,2RESHARD,0UNSHARD,2REDUCE_GRAD,0B0,0B1,0RESHARD,0REDUCE_GRAD"),
        (1, "0UNSHARD,2UNSHARD,0F0,0F1,2F0,2F1,2B0,2B1,2RESHARD,2REDUCE_GRAD,0B0,0B1,0RESHARD,0REDUCE_GRAD"),
    ],
)  # fmt: skip
def test_a_stage_is_gathered_ahead_and_freed_when_the_next_blocks_do_not_use_it(ahead: int, row: str) -> None:
    assert insert_sharding(LOOPED, ahead=ahead).to_csv().splitlines()[0] == row


@pytest.mark.parametrize("seed", range(30))
def test_any_schedule_stays_legal_and_parses_back(seed: int) -> None:
    rng = Random(seed)
    plain = random_schedule(rng)
    plain = replace(plain, rows=tuple(tuple(a for a in row if a.kind not in SHARDING) for row in plain.rows))
    schedule = insert_sharding(plain, ahead=seed % 3)
    verify(schedule)
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    program = lower(schedule)
    assert parse_program(str(program)) == program
    assert tuple(tuple(a for a in row if a.kind not in SHARDING) for row in schedule.rows) == plain.rows


def test_passes_behind_it_keep_the_parameters_where_they_are_used() -> None:
    schedule = insert_sharding(build_schedule("interleaved", 6, 6, n_devices=3), ahead=0)
    for delay in (0, 1, 100):
        verify(split_backward(schedule, delay))
    recomputed = insert_recompute(schedule, "always")
    assert advance_recompute(recomputed, 3) != recomputed
    verify(advance_recompute(recomputed, 3))


def test_a_limit_frees_no_more_than_it_has_to() -> None:
    schedule = build_schedule("zbv", 8, 8, n_devices=4)
    counts, least = [], max(simulate(insert_sharding(schedule, ahead=0), **COSTS).peak_memory)
    for limit in (1e9, least + 9, least):
        fitted = shard_to_fit(schedule, limit, **COSTS)
        verify(fitted)
        assert max(simulate(fitted, **COSTS).peak_memory) <= limit
        counts.append(gathers(fitted))
    assert counts[0] == 8 < counts[1] <= counts[2] <= gathers(insert_sharding(schedule, ahead=0))
    with pytest.raises(InfeasibleError, match="no parameter is gathered that the next action does not use"):
        shard_to_fit(schedule, least - 1, **COSTS)


def test_what_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(InputError, match="unsharded_bytes is missing"):
        shard_to_fit(LOOPED, 9.0)
    with pytest.raises(ScheduleError, match="there is no stage 3"):
        insert_sharding(LOOPED, [3])
    assert insert_sharding(insert_sharding(LOOPED)) == insert_sharding(LOOPED)
    assert insert_sharding(LOOPED, []) == LOOPED


def test_a_period_keeps_its_actions_without_a_micro_batch() -> None:
    text = "0UNSHARD,(0F0;0RESHARD;0UNSHARD;0B0)x5+1,0RESHARD,0REDUCE_GRAD\n"
    periodic = PeriodicSchedule.from_csv(text)
    assert periodic.to_csv() == text
    assert PeriodicSchedule.from_json(periodic.to_json()) == periodic
    assert periodic.n_microbatches == 5
    verify(periodic.unrolled())
    assert Schedule.from_csv(text) == periodic.unrolled()


def test_several_copies_of_stages_are_refused() -> None:
    """The result was a schedule that is not legal."""
    schedule = build_schedule("chimera", 4, 4)
    with pytest.raises(ScheduleError, match="has 2 copies of each stage, and an UNSHARD, a RESHARD and a REDUCE_GRAD"):
        insert_sharding(schedule)
    with pytest.raises(ScheduleError, match="has 2 copies of each stage, and an UNSHARD, a RESHARD and a REDUCE_GRAD"):
        shard_to_fit(schedule, 100.0, unsharded_bytes=3.0)
