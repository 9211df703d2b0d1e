"""The wait of this rank on the status board, where other ranks look for the rank that all wait for.

    a wait begins ──► checked twice: it is long ──► posted ──► it ends ──► cleared

Short waits are not posted, so they cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from pipecompile.distributed.failures.board_watch import PendingWait
from pipecompile.distributed.failures.failure_report import RankLost
from pipecompile.distributed.failures.status_board import StatusBoard
from pipecompile.distributed.rank_mesh import RankMesh

__all__ = ["PostedWait"]


class PostedWait:
    """The posted wait of one rank. `current` returns its wait. One thread waits, and another one posts."""

    def __init__(self, board: StatusBoard, ranks: RankMesh, current: Callable[[], PendingWait | None]) -> None:
        self._board, self._ranks, self._current = board, ranks, current
        self._is_posted, self._lock = False, Lock()
        self._crossed = None if board.absences is None else board.absences.crossed()

    def post(self, wait: PendingWait) -> None:
        """Post a wait, once, unless it has ended meanwhile. Raises RankLost for one that another pipeline of the ranks keeps from its end."""
        awaited = self._ranks.rank_of(wait.peer)
        with self._lock:
            if not self._is_posted:
                self._is_posted = True
                if self._current() is wait:
                    self._board.post_wait(awaited, wait.name)
                    if self._crossed is not None:
                        self._crossed.note(awaited, wait)
                else:
                    self._is_posted = False
        if self._crossed is not None:
            self._crossed.check(awaited)

    def leave(self) -> None:
        """Note that this rank waits no longer, whether or not what it waited for has come. `current` must return None by then, so that no
        other thread posts the wait afterwards.
        """
        if self._crossed is not None and self._is_posted:
            with self._lock:
                self._crossed.clear()

    def crossed(self, awaited: int) -> RankLost | None:
        """Return why a connection to a rank is gone that has found its wait in another pipeline crossed."""
        return None if self._crossed is None else self._crossed.found(awaited)

    def clear(self) -> None:
        """Post that this rank does not wait, if a wait is posted."""
        if self._is_posted:
            with self._lock:
                self._is_posted = False
                self._board.clear_wait()
