"""The wait of this rank on the status board, where other ranks look for the rank that all wait for.

    a wait begins ──► checked twice: it is long ──► posted ──► it ends ──► cleared

Short waits are not posted, so they cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from pipecompile.distributed.board_watch import PendingWait
from pipecompile.distributed.rank_mesh import RankMesh
from pipecompile.distributed.status_board import StatusBoard

__all__ = ["PostedWait"]


class PostedWait:
    """The posted wait of one rank. `current` returns its wait. One thread waits, and another one posts."""

    def __init__(self, board: StatusBoard, ranks: RankMesh, current: Callable[[], PendingWait | None]) -> None:
        self._board, self._ranks, self._current = board, ranks, current
        self._is_posted, self._lock = False, Lock()

    def post(self, wait: PendingWait) -> None:
        """Post a wait, once, unless it has ended meanwhile."""
        with self._lock:
            if not self._is_posted:
                self._is_posted = True
                if self._current() is wait:
                    self._board.post_wait(self._ranks.rank_of(wait.peer), wait.name)
                else:
                    self._is_posted = False

    def clear(self) -> None:
        """Post that this rank does not wait, if a wait is posted."""
        if self._is_posted:
            with self._lock:
                self._is_posted = False
                self._board.clear_wait()
