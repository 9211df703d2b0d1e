"""Collectives of a group of one rank, and a group of three whose other ranks do not come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from pipecompile.distributed import collectives
from pipecompile.distributed.collectives import (
    COLLECTIVE_PART,
    CollectiveGroup,
    GradientBucket,
    PendingCollective,
    with_gradients,
)
from pipecompile.distributed.failures.failure_report import FailureReport, RankLost
from pipecompile.distributed.failures.status_board import StatusBoard
from pipecompile.distributed.messages.own_groups import GroupUse
from pipecompile.distributed.protocol import ENDED
from pipecompile.distributed.rank_mesh import RankMesh

RANKS = (4, 5, 7)


@pytest.fixture
def group(single_rank: None) -> CollectiveGroup:
    assert dist.group.WORLD is not None
    return CollectiveGroup(dist.group.WORLD, cast(Any, SimpleNamespace(current=lambda group: group)))


def test_results_of_one_rank_are_its_own_values(group: CollectiveGroup) -> None:
    value = torch.tensor([1.0, -2.0])
    assert (group.size, group.index) == (1, 0)
    assert group.sum(value).tolist() == group.max(value).tolist() == [1.0, -2.0]
    assert group.all_gather(value).tolist() == [[1.0, -2.0]]


def test_the_host_waits_for_a_gpu_when_the_call_ends(group: CollectiveGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it waited for each collective, and launched nothing meanwhile."""
    log, use = list[str](), GroupUse(RankMesh.of(None))
    over = iter([False, True])
    event = SimpleNamespace(query=lambda: log.append("host looks") or next(over))
    stream = SimpleNamespace(record_event=lambda: log.append("event") or event)
    work = SimpleNamespace(is_completed=lambda: log.append("host waits"), wait=lambda: log.append("stream waits"))
    group.communicator = cast(Any, SimpleNamespace(current=lambda one: one, groups=use, check_verdict=lambda: None))
    monkeypatch.setattr(collectives, "is_accelerator", lambda _: True)
    monkeypatch.setattr(collectives, "has_gloo_alone", lambda _: False)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: stream)
    pending = PendingCollective(group, cast(Any, work), torch.ones(2))
    assert pending.wait() is pending.result
    assert log == ["stream waits", "event"]
    use.settle()
    use.settle()
    assert log[2:] == ["host looks"] * 2


def test_a_sum_is_a_new_tensor_and_a_started_sum_is_in_place(group: CollectiveGroup) -> None:
    value = torch.ones(2)
    assert group.sum(value).data_ptr() != value.data_ptr()
    assert group.start_sum(value).wait().data_ptr() == value.data_ptr()


def test_a_reduce_scatter_gives_the_row_of_this_rank(group: CollectiveGroup) -> None:
    assert group.start_reduce_scatter(torch.tensor([[1.0, 2.0, 3.0]])).wait().tolist() == [1.0, 2.0, 3.0]


def test_the_sum_of_a_bucket_goes_on_to_further_groups() -> None:
    class Doubling(CollectiveGroup):
        def __init__(self) -> None:
            pass

        def start_sum(self, tensor: torch.Tensor) -> PendingCollective:
            return PendingCollective(self, None, tensor * 2)

        def wait(self, work: object, tensor: torch.Tensor) -> None:
            pass

    first, last = Doubling(), Doubling()
    bucket = GradientBucket([], first.start_sum(torch.ones(4)), [Doubling(), last], lambda _: None)
    bucket.start_further()
    assert bucket.pending is not None
    assert bucket.pending.group is last
    bucket.pending = PendingCollective(last, None, bucket.pending.result[1:2])
    assert bucket.complete().item() == 8.0
    assert bucket.complete().untyped_storage().nbytes() == 4  # of the rows of all ranks its own is left
    assert bucket.pending is None


class Never:
    """A collective that is not completed before the check raises or the connection breaks."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def is_completed(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return False


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> tuple[CollectiveGroup, list[StatusBoard]]:
    """The group of rank 4, and the status boards of all ranks."""
    monkeypatch.setattr(collectives, "POLL", 0.01)
    monkeypatch.setattr(collectives, "PATIENCE", 0.02)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: list(RANKS))
    store = HashStore()
    boards = [StatusBoard(store, RANKS, rank, 0.05) for rank in RANKS]
    process_group: Any = SimpleNamespace(size=lambda: 3, rank=lambda: 0)
    communicator: Any = SimpleNamespace(
        current=lambda group: group, board=boards[0], check=boards[0].check, timeout=0.05, rank=RANKS[0]
    )
    return CollectiveGroup(process_group, communicator), boards


def lost(group: CollectiveGroup, work: Never) -> RankLost:
    with pytest.raises(RankLost) as caught:
        group.wait(cast(Any, work), torch.ones(1))
    return caught.value


def test_a_silent_rank_is_lost_after_the_timeout(waiting: tuple[CollectiveGroup, list[StatusBoard]]) -> None:
    """Rank 5 waits itself, so rank 7 is late."""
    group, boards = waiting
    boards[1].post_wait(7, COLLECTIVE_PART)
    report = lost(group, Never()).report
    assert (report.rank, report.awaited) == (7, COLLECTIVE_PART)
    assert report.error().what == f"rank 7 failed before {COLLECTIVE_PART} arrived: it has been silent for 0.05 s"
    wait = boards[2].wait_of(4)
    assert wait is not None
    assert wait.rank == 7


def test_a_report_names_all_ranks_that_may_be_late(
    waiting: tuple[CollectiveGroup, list[StatusBoard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "is_from_handler", lambda _: False)
    report = lost(waiting[0], Never("Connection reset\nat line 3")).report
    assert (report.rank, report.what) == (
        5, "the connection to it is gone: Connection reset (or to another of ranks 5, 7)"
    )  # fmt: skip


def test_a_rank_that_has_ended_is_named_and_how_before_those_that_may_be_late(
    waiting: tuple[CollectiveGroup, list[StatusBoard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "is_from_handler", lambda _: False)
    group, boards = waiting
    boards[2].store.set(ENDED.at(7), "its script has ended")
    report = lost(group, Never("Connection reset")).report
    assert (report.rank, report.what) == (7, "its script has ended")


def test_an_exception_of_a_signal_handler_passes(waiting: tuple[CollectiveGroup, list[StatusBoard]]) -> None:
    with pytest.raises(RuntimeError, match="of a handler"):  # raised by Python of this test, as a handler does
        waiting[0].wait(cast(Any, Never("of a handler")), torch.ones(1))


def test_a_wait_ends_when_a_rank_reports_a_failure(waiting: tuple[CollectiveGroup, list[StatusBoard]]) -> None:
    group, boards = waiting
    boards[2].post_failure(FailureReport(7, "ValueError: no"))
    assert lost(group, Never()).is_posted


def test_the_counts_of_gradients_are_read_where_one_is_missing_alone() -> None:
    """They are on the GPU with the gradients: reading them is a wait of the host."""
    unread = cast(torch.Tensor, None)
    assert with_gradients([True, True], unread) == [True, True]
    assert with_gradients([True, False, False], torch.tensor([2.0, 1.0, 0.0])) == [True, True, False]
