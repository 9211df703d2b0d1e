"""One rank of two, without the other: a communicator that notes what is sent and has what is received."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import fx, nn

from pipecompile.distributed.agreement.stale_values import StaleValues
from pipecompile.distributed.failures.failure_report import FailureReport, RankLost
from pipecompile.distributed.rank_executable import RankExecutable
from pipecompile.distributed.tied_copies import TiedCopies
from pipecompile.errors import ScheduleError
from pipecompile.ir import HOST, Program, Route
from pipecompile.passes import lower
from pipecompile.runtime.executable import ProgramBinding
from pipecompile.runtime.run_errors import InstructionFailure
from pipecompile.schedules import build_schedule

ROUTES = (Route("x", HOST, (0,)), Route("h", 0, (1,)), Route("loss", 1, (HOST,)))
PROGRAM = lower(build_schedule("gpipe", 2, 4), ROUTES)


def executable(
    awaited: set[str], placements: Sequence[tuple[int, ...]] = ((0, 1),), program: Program = PROGRAM
) -> RankExecutable:
    ranks = SimpleNamespace(rank_of=lambda device: 10 + device, index=0)
    communicator: Any = SimpleNamespace(board=SimpleNamespace(awaited_from=lambda rank, own: awaited), ranks=ranks)
    replicas: Any = SimpleNamespace(group=None)
    values: Any = SimpleNamespace(streams=None)
    mirrors = TiedCopies((), values, 0)
    graph = fx.GraphModule({}, fx.Graph())
    devices = [torch.device("cpu")] * 2
    return RankExecutable(
        ProgramBinding(program, (), devices, graph, mirrors), communicator=communicator, values=values,
        placements=placements, replicas=replicas,
    )  # fmt: skip


def lost(run: RankExecutable, rank: int, *, is_begun: bool = True, is_posted: bool = False) -> FailureReport:
    def fail() -> None:
        with run._blaming(is_begun=is_begun):
            raise RankLost(FailureReport(rank, "it was killed"), is_posted=is_posted)

    with pytest.raises(RankLost) as caught:
        fail()
    return caught.value.report


def test_a_lost_rank_is_reported_with_the_action_that_it_owed() -> None:
    report = lost(executable({"h'1#1"}), 11)
    assert (report.rank, report.stage, report.microbatch) == (11, 1, 1)
    assert report.error().what == "rank 11 failed before the result of 1B1 arrived: it was killed"


def test_a_rank_that_owes_a_tied_weight_before_the_run_is_reported_with_its_first_action() -> None:
    assert lost(executable({"tied 0"}), 11, is_begun=False).action == "before the result of 1F0 arrived"


def test_a_rank_of_another_replica_owes_its_part_of_a_collective() -> None:
    report = lost(executable({"its part of a collective"}), 12)
    assert (report.action, report.stage) == ("before its part of a collective arrived", None)


def test_a_report_that_is_posted_stays_as_it_is() -> None:
    assert lost(executable({"h'1#1"}), 11, is_posted=True).action == ""


def test_a_failed_run_lets_go_when_no_values_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of deferred layers on other ranks were restored while they were hidden: the error was that of a hook that reads them."""

    def fail(*_: Any) -> None:
        raise InstructionFailure(0, 0, ValueError("the data are wrong"))

    run, parameter, read = executable(set()), nn.Parameter(torch.ones(1)), []
    run._old, run.values = StaleValues(lambda: {"w": parameter}), cast(Any, SimpleNamespace(expect=lambda *_: None))
    monkeypatch.setattr("pipecompile.distributed.rank_executable.run_inline", fail)
    monkeypatch.setattr(run, "_blamable", lambda failure, _: failure.error)
    monkeypatch.setattr(run, "_abandon", lambda *_: read.append(parameter.item()))
    with pytest.raises(ValueError, match="the data are wrong"):
        run.run(cast(Any, SimpleNamespace(streams=None)), cast(Any, None))
    assert read == [1.0]


def test_a_schedule_must_leave_stages_on_their_ranks() -> None:
    with pytest.raises(ScheduleError, match=r"the schedule puts stages on ranks \(0, 1\)"):
        executable(set(), placements=[(1, 0)])


def test_copies_of_stages_run_where_their_parameters_are() -> None:
    """A function may build them for some numbers of micro-batches alone, which the options do not show."""
    program = lower(build_schedule("chimera", 2, 4), ROUTES)
    with pytest.raises(
        ScheduleError, match=r"stages on ranks \(0, 1\) and \(1, 0\)\n  why    their parameters are placed for \(0, 1\)"
    ):
        executable(set(), program=program)
    assert executable(set(), placements=[(0, 1), (1, 0)], program=program).program is program
