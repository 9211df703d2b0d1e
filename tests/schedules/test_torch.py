"""Our builders beside those of torch.distributed.pipelining, our CSV in its loader, its CSV in ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from program_strategies import catalogue_schedules
from torch_generators import WAITS, loaded, multi_order, single_order, torch_schedules, with_communication, written

from pipecompile.errors import VerifyError
from pipecompile.ir import SHARDING, Kind, Schedule
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify

SIZES = [(2, 4), (3, 9), (4, 8), (4, 10), (8, 16)]
SAME = [
    ("ScheduleInterleaved1F1B", 2, "interleaved"),
    ("ScheduleInterleaved1F1B", 3, "interleaved"),
    ("ScheduleInterleavedZeroBubble", 1, "zb-h1"),
    ("ScheduleInterleavedZeroBubble", 2, "interleaved-zb"),
    ("ScheduleInterleavedZeroBubble", 3, "interleaved-zb"),
    ("ScheduleZBVZeroBubble", 2, "zbv"),
    ("ScheduleDualPipeV", 2, "dualpipev-overlap"),
]


@pytest.mark.parametrize(("cls_name", "chunks", "name"), SAME)
@pytest.mark.parametrize(("n_devices", "n_microbatches"), SIZES)
def test_torch_gives_the_same_order(cls_name: str, chunks: int, name: str, n_devices: int, n_microbatches: int) -> None:
    theirs = Schedule.from_csv(written(multi_order(cls_name, n_devices, chunks, n_microbatches)))
    assert theirs == build_schedule(name, chunks * n_devices, n_microbatches, n_devices=n_devices)


@pytest.mark.parametrize(("n_devices", "n_microbatches"), SIZES)
def test_torch_takes_the_backwards_of_looped_bfs_from_the_last_on_in_the_same_time(
    n_devices: int, n_microbatches: int
) -> None:
    theirs = Schedule.from_csv(written(multi_order("ScheduleLoopedBFS", n_devices, 2, n_microbatches)))
    ours = build_schedule("looped-bfs", 2 * n_devices, n_microbatches, n_devices=n_devices)
    verify(theirs)
    assert theirs != ours
    assert simulate(theirs).makespan == simulate(ours).makespan
    for row, other in zip(theirs.rows, ours.rows, strict=True):
        assert [a for a in row if a.kind is Kind.FORWARD] == [a for a in other if a.kind is Kind.FORWARD]


@pytest.mark.parametrize(("n_stages", "n_microbatches"), [(1, 1), (2, 4), (4, 4), (4, 8), (8, 16)])
def test_gpipe_is_the_same_too(n_stages: int, n_microbatches: int) -> None:
    theirs = Schedule.from_csv(written(_compute(single_order("ScheduleGPipe", n_stages, n_microbatches))))
    assert theirs == build_schedule("gpipe", n_stages, n_microbatches)


@pytest.mark.parametrize(("n_stages", "n_microbatches"), [(2, 4), (4, 4), (4, 8), (8, 16)])
def test_1f1b_is_the_same_but_for_its_last_rank(n_stages: int, n_microbatches: int) -> None:
    """torch 2.15 numbers the forwards of the last rank from 1: it loads, and is refused for F0, which is missing."""
    theirs = Schedule.from_csv(written(_compute(single_order("Schedule1F1B", n_stages, n_microbatches))))
    assert theirs.rows[:-1] == build_schedule("1f1b", n_stages, n_microbatches).rows[:-1]
    with pytest.raises(VerifyError, match=f"stage {n_stages - 1} never runs F for micro-batch 0\n"):
        verify(theirs)


def _compute(order: dict[int, list[object]]) -> dict[int, list[object]]:
    return {rank: [a for a in row if a is None or a.is_compute_op] for rank, row in order.items()}


@pytest.mark.parametrize(("cls_name", "chunks", "name"), SAME)
def test_what_torch_dumps_with_communication_loads_as_the_same_schedule(cls_name: str, chunks: int, name: str) -> None:
    ours = build_schedule(name, chunks * 4, 8, n_devices=4)
    order = with_communication(multi_order(cls_name, 4, chunks, 8), ours.placement, 8)
    text = written(order)
    for word in ("0SEND_F0", "RECV_B", "0UNSHARD", "0RESHARD", "0REDUCE_GRAD", *WAITS):
        assert word in text
    assert ("OVERLAP_F_B" in text) == (name == "dualpipev-overlap")
    theirs = Schedule.from_csv(text)
    verify(theirs)
    assert without_sharding(theirs) == ours


def without_sharding(schedule: Schedule) -> Schedule:
    """The computations alone."""
    return replace(schedule, rows=tuple(tuple(a for a in row if a.kind not in SHARDING) for row in schedule.rows))


@settings(max_examples=40, deadline=None)
@given(catalogue_schedules())
def test_our_dumps_load_there(tmp_path_factory: pytest.TempPathFactory, schedule: Schedule) -> None:
    if all(action.kind is Kind.FORWARD for row in schedule.rows for action in row):
        return  # torch wants a backward
    path = Path(tmp_path_factory.mktemp("csv")) / "schedule.csv"
    path.write_text(schedule.to_csv())
    read, lowered = loaded(path, schedule.placement, schedule.n_devices, schedule.n_microbatches)
    assert [list(map(str, read[rank])) for rank in sorted(read)] == [list(map(str, row)) for row in schedule.rows]
    assert without_sharding(Schedule.from_csv(written(lowered))) == schedule


def test_actions_are_spelled_as_torch_spells_them() -> None:
    ours = {kind.value for kind in Kind} - {"R", "OFFLOAD", "RELOAD"}
    theirs = {kind.value for kind in torch_schedules._ComputationType}
    assert ours == {name for name in theirs if len(name) == 1} | theirs & {kind.value for kind in SHARDING}
    assert all(kind.value in theirs for kind in SHARDING)
