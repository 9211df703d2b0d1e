"""The guard of the calls of a pipeline: the failure of this rank is posted for the others, and that of another rank is raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pipecompile.distributed.failures.board_watch import PATIENCE, await_report
from pipecompile.distributed.failures.failure_report import CopyDisagreement, Disagreement, FailureReport, RankLost
from pipecompile.distributed.failures.status_board import StatusBoard
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.errors import RunError

__all__ = ["FailureGuard"]

_CONNECTION, _TIMEOUT = "gloo/transport", "Timed out waiting"
"""Parts of the texts of errors of gloo, and of those after its timeout."""

_PART = "its part of a collective of torch"
"""Name of what a rank owes to others with which its layers exchange something."""


class FailureGuard:
    """The guard of one communicator. `action` is the phrase that a failure report of this rank begins with.

    `lost` is the report of the other rank that ended the communicator. `end_waits` ends all waits of this rank. `common` is an error that
    all ranks are known to raise in this call, before they have sent anything of it: the pipeline goes on.
    """

    def __init__(self, board: StatusBoard, ranks: RankMesh, end_waits: Callable[[], None]) -> None:
        self.board, self.ranks, self.action = board, ranks, ""
        self.lost: FailureReport | None = None
        self.common: Exception | None = None
        self._broken: RunError | None = None
        self._end_waits = end_waits

    def require_whole(self) -> None:
        """Raise RunError after a failure: messages under way are lost."""
        if self._broken is not None:
            raise RunError(
                "this pipeline failed before",
                stage=self._broken.stage,
                microbatch=self._broken.microbatch,
                why=self._broken.what,
                hint="start the ranks again, from the last checkpoint",
            )

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Post a failure in this context for all ranks; raise the failure of another rank as RunError."""
        try:
            yield
        except (
            Disagreement,
            CopyDisagreement,
        ) as error:  # raised by all ranks, or by all of this copy: the pipeline goes on
            if isinstance(error, CopyDisagreement) and self.ranks.copy != self.ranks.members:
                self._fail(error)
            raise
        except RankLost as lost:
            raise self._ended_by(lost) from None
        except BaseException as error:  # Ctrl-C and sys.exit as well
            if (other := self._lost_beside(error)) is not None:
                raise self._ended_by(other) from error
            if error is not self.common:
                self._fail(error)
            raise
        finally:
            self.action, self.common = "", None

    def _ended_by(self, lost: RankLost) -> RunError:
        """End the communicator for the loss of another rank. Return the error that says so."""
        self.lost = lost.report if lost.is_posted else self.board.post_failure(lost.report)
        self.board.confirm_read()
        self._broken = self.lost.error()
        self._end_waits()
        return self.lost.error()  # another one than is kept: it will hold the frames of this call

    def _lost_beside(self, error: BaseException) -> RankLost | None:
        """Return the loss of the rank that broke a connection in a collective of torch's own, such as those of DTensors, also in a layer
        of a stage, or that did not come to it; None for other errors, and where no rank is known to have failed.
        """
        first = error.__cause__ if isinstance(error, RunError) else error
        if not (isinstance(first, RuntimeError) and _CONNECTION in str(first)):
            return None
        others = self.ranks.beside if _TIMEOUT in str(first) else ()
        if others:
            self.board.post_wait(others[0], _PART)
        try:
            await_report(self._look_for_lost, PATIENCE)
        except RankLost as lost:
            return lost
        late = [rank for rank in others if self.board.wait_of(rank) is None]
        return RankLost(self._silent(late), is_posted=False) if late else None

    def _silent(self, late: Sequence[int]) -> FailureReport:
        among = f" (or another of ranks {', '.join(map(str, late))})" if len(late) > 1 else ""
        what = self.board.with_reason(late[0], f"it has been silent for {self.board.timeout:.3g} s")
        return FailureReport(late[0], what + among, action=f"before {_PART} arrived", awaited=_PART)

    def _look_for_lost(self) -> None:
        """Raise RankLost for a rank that has posted a failure, or has ended."""
        self.board.check()
        for rank in self.ranks.members:
            if rank != self.board.rank and (cause := self.board.cause(rank, "")):
                report = FailureReport(rank, cause, action=f"before {_PART} arrived")
                raise RankLost(report, is_posted=False)

    def _fail(self, error: BaseException) -> None:
        """Post the failure of this rank, unless another rank failed first."""
        report = FailureReport.of(error, self.board.rank, self.action)
        self._broken = report.own_error()
        if self.board.post_failure(report) == report:
            self.board.wait_for_readers(error)
        else:
            self.board.confirm_read()
        self._end_waits()
