"""The agreement on the copies of a pipeline that go on after a rank failed, through the store of `torch.distributed`.

    copy 0   rank 0: stays   rank 1: stays      ─┐
    copy 1   rank 2: -       rank 3: has failed  ├─► left = [0, 2], written once: the first to write decides for all
    copy 2   rank 4: stays   rank 5: stays      ─┘

A copy continues if all its ranks announce that they do. It is lost if one of them has failed or ended, announces that it leaves, or is
silent for the timeout.
"""

from __future__ import annotations

from enum import Enum
from time import sleep

import msgspec

from pipecompile.distributed.failures.awake_clock import awake
from pipecompile.distributed.failures.board_watch import POLL
from pipecompile.distributed.failures.failure_report import FailureReport
from pipecompile.distributed.failures.status_board import StatusBoard
from pipecompile.distributed.protocol import LEFT, STAYS
from pipecompile.distributed.rank_mesh import RankMesh

__all__ = ["agreed_copies", "copies_left", "leave"]

_PAUSE = 0.02
"""Seconds between two looks at the agreement. The ranks are looked at every POLL seconds."""


class Standing(Enum):
    STAYS = "stays"
    LOST = "lost"
    UNKNOWN = "unknown"


def agreed_copies(board: StatusBoard) -> tuple[int, ...] | None:
    """Return the numbers of the copies that go on; None if that is not agreed. Raises RuntimeError if the store is gone."""
    if not board.store.check([LEFT.at()]):
        return None
    return tuple(msgspec.json.decode(board.store.get(LEFT.at()), type=list[int]))


def leave(board: StatusBoard) -> None:
    """Say that this rank does not go on. Raises RuntimeError if the store is gone."""
    board.store.set(STAYS.at(board.rank), "no")


def copies_left(board: StatusBoard, ranks: RankMesh, failed: FailureReport) -> tuple[int, ...]:
    """Return the numbers of the copies that go on without the copy of the rank that has failed. All ranks that go on call this.

    Raises RuntimeError if the store is gone.
    """
    board.store.set(STAYS.at(board.rank), "yes")
    start, looked = awake(), -POLL
    while (agreed := agreed_copies(board)) is None:
        is_late = awake() - start > board.timeout
        if not is_late and awake() - looked < POLL:
            sleep(_PAUSE)
            continue
        looked = awake()
        standings = {number: _standing(board, ranks.copies[number], failed.rank) for number in ranks.left}
        if is_late or Standing.UNKNOWN not in standings.values():
            stay = [number for number, standing in standings.items() if standing is Standing.STAYS]
            board.store.compare_set(LEFT.at(), "", msgspec.json.encode(stay).decode())
    return agreed


def _standing(board: StatusBoard, copy: tuple[int, ...], failed: int) -> Standing:
    """Return whether a copy continues, as far as is known."""
    said = [board.store.get(STAYS.at(rank)) for rank in copy if board.store.check([STAYS.at(rank)])]
    if failed in copy or b"no" in said or any(board.cause(rank, "") for rank in copy):
        return Standing.LOST
    return Standing.STAYS if len(said) == len(copy) else Standing.UNKNOWN
