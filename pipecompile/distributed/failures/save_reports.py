"""The knowledge of a pipeline's status board about ranks that are missed in a save: a reported failure, an end, a wait for another rank.

copy 0   rank 0 waits for rank 1 ─► rank 1 ended      never come to the save
copy 1   rank 2, rank 3: save_checkpoint              "rank 1 ended", and nothing of rank 0
"""

from __future__ import annotations

from typing import Protocol

from pipecompile.distributed.failures.failure_report import AwaitedMessage, FailureReport

__all__ = ["SaveReports"]


class KnowingBoard(Protocol):
    """The part of a status board that reports on saves read."""

    members: tuple[int, ...]

    def failed(self) -> FailureReport | None: ...

    def cause(self, rank: int, otherwise: str) -> str: ...

    def wait_of(self, rank: int) -> AwaitedMessage | None: ...

    def note_save(self, path: str) -> None: ...


class SaveReports:
    """The answers of `board` about ranks. Of those that are not its members it says nothing."""

    def __init__(self, board: KnowingBoard) -> None:
        self._board = board

    def failure(self) -> str:
        """Return which rank has failed, and why; "" if none has."""
        report = self._board.failed()
        return "" if report is None else report.error().what

    def ended(self, rank: int) -> str:
        """Return how the script or the process of a rank has ended; "" if neither has, as far as is known."""
        return self._board.cause(rank, "") if rank in self._board.members else ""

    def waits_for(self, rank: int) -> int | None:
        """Return the rank for which a rank waits, None if it has not posted a wait."""
        wait = self._board.wait_of(rank) if rank in self._board.members else None
        return None if wait is None or wait.rank == rank else wait.rank

    def note_save(self, path: str) -> None:
        """Note that this rank saves a checkpoint, for ranks that wait for it in a call of the pipeline."""
        self._board.note_save(path)
