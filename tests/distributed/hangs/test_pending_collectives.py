"""Collectives that some ranks of a group have launched, and others not."""

from __future__ import annotations

from pipecompile.distributed.hangs.flight_dump import CallState, FlightCall, FlightDump
from pipecompile.distributed.hangs.pending_collectives import pending_collectives


def dump(
    rank: int,
    *calls: tuple[int, str],
    group: str = "7",
    members: tuple[int, ...] = (0, 1),
    name: str = "nccl:all_reduce",
):
    made = tuple(
        FlightCall(number, group, "dp", 1, name, number, False, CallState[state], 4096, "train.py:3")
        for number, state in calls
    )
    return FlightDump(rank, made, {group: members}, False)


def test_a_rank_that_has_not_launched_it_is_missing():
    dumps = {0: dump(0, (5, "COMPLETED"), (6, "SCHEDULED")), 1: dump(1, (5, "COMPLETED"))}
    (pending,) = pending_collectives(dumps)
    assert (pending.launched, pending.missing, pending.sequence) == ((0,), (1,), 6)
    assert (
        str(pending)
        == "ranks 0 have launched nccl:all_reduce number 6 of group dp (train.py:3), ranks 1 have not: it is not over"
    )


def test_the_first_that_is_not_over_is_given():
    dumps = {0: dump(0, (6, "STARTED"), (7, "SCHEDULED")), 1: dump(1, (6, "COMPLETED"), (7, "SCHEDULED"))}
    (pending,) = pending_collectives(dumps)
    assert (pending.sequence, pending.missing) == (6, ())


def test_a_rank_whose_ring_has_lost_it_is_not_missing():
    dumps = {0: dump(0, (6, "STARTED")), 1: dump(1, (8, "COMPLETED"))}
    assert pending_collectives(dumps)[0].missing == ()


def test_different_collectives_of_one_number_are_both_named():
    dumps = {0: dump(0, (6, "STARTED")), 1: dump(1, (6, "STARTED"), name="nccl:broadcast")}
    assert pending_collectives(dumps)[0].name == "nccl:all_reduce and nccl:broadcast"


def test_groups_of_one_name_and_other_ranks_are_others():
    dumps = {0: dump(0, (6, "STARTED")), 1: dump(1, (6, "STARTED"))}
    dumps |= {rank: dump(rank, (6, "COMPLETED"), members=(2, 3)) for rank in (2, 3)}
    (pending,) = pending_collectives(dumps)
    assert pending.launched == (0, 1)


def test_what_is_over_is_not_given():
    assert pending_collectives({0: dump(0, (6, "COMPLETED"))}) == ()
