"""The ranks that take part in a save: torch's own errors do not say which rank has ended or stands still.

rank 0   saving/3/0 = process    a collective fails    failed/0     names the ranks that ended, did not come, or have not failed
rank 1   saving/3/1 = process    killed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Protocol
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pipecompile.errors import InputError
from pipecompile.parameters.process_identity import has_ended, identity, start_of_ranks
from pipecompile.torch_private.process_groups import default_store

__all__ = ["ABSENT", "RankMissing", "SaveAttendance", "explain_by", "noted_save"]

_PATIENCE = 1.0
"""Seconds that a rank waits for others to fail as well, before it names those that do not."""

ABSENT = "did not come to it"
"""Words of the errors about ranks that have not begun the save."""


class RankMissing(InputError):
    """A save that failed on this rank since another one has failed: no failure of this rank's own."""


class Reports(Protocol):
    """An object that knows of ranks what they did beside the save."""

    def failure(self) -> str:
        """Return which rank failed, and why; "" if none has failed, as far as is known."""

    def ended(self, rank: int) -> str:
        """Return how a rank has ended; "" if it has not, as far as is known."""

    def waits_for(self, rank: int) -> int | None:
        """Return the rank for which a rank waits in another call, None if it does not, as far as is known."""

    def note_save(self, path: str) -> None:
        """Note that this rank saves a checkpoint; with "", that it does so no longer."""


_REPORTS: WeakSet[Reports] = WeakSet()


def explain_by(reports: Reports) -> None:
    """Name what `reports` knows, for as long as other code holds a reference to it, if a save fails."""
    _REPORTS.add(reports)


@contextmanager
def noted_save(path: str) -> Iterator[None]:
    """Let ranks that wait for this one elsewhere know, until the block ends, that it saves a checkpoint."""
    known = [*_REPORTS]
    for reports in known:
        reports.note_save(path)
    try:
        yield
    finally:
        for reports in known:
            reports.note_save("")


class SaveAttendance:
    """Save number `number` of these ranks, as one of them notes it in the store of `torch.distributed`."""

    def __init__(self, number: int, ranks: tuple[int, ...]) -> None:
        members = "-".join(map(str, ranks))
        self.store = PrefixStore(f"pipecompile/saving/{start_of_ranks()}/{members}/{number}", default_store())
        self.ranks, self.rank = ranks, dist.get_rank()
        self.others = [rank for rank in ranks if rank != self.rank]
        self.store.set(str(self.rank), identity())

    def missing(self) -> str:
        """Return which ranks the save has failed for, and why. Ranks that have failed for others are not among them."""
        try:
            self.store.set(f"failed/{self.rank}", "")
            end = monotonic() + _PATIENCE
            while not (cause := self._cause()) and monotonic() < end:
                sleep(_PATIENCE / 20)
            return cause or self._late()
        except RuntimeError:
            return "the store of torch.distributed is gone, and with it the process that has it"

    def _cause(self) -> str:
        """Return the failure that a rank has reported, or which ranks have ended; "" if neither is known."""
        if reported := next(filter(None, (reports.failure() for reports in _REPORTS)), ""):
            return reported
        waiting = self._not_failed()
        ways = {rank: how for reports in _REPORTS for rank in waiting if (how := reports.ended(rank))}
        if ways:
            return f"{_named([*ways])} ended: {next(iter(ways.values()))}"
        came = [rank for rank in waiting if self.store.check([str(rank)])]
        ended = [rank for rank in came if has_ended(self.store.get(str(rank)).decode())]
        return f"{_named(ended)} ended" if ended else ""

    def _late(self) -> str:
        waiting = self._not_failed()
        absent = [rank for rank in waiting if not self.store.check([str(rank)])]
        awaited = {reports.waits_for(rank) for reports in _REPORTS for rank in absent}
        first = [rank for rank in absent if all(reports.waits_for(rank) is None for reports in _REPORTS)]
        if not awaited.isdisjoint(first):  # the others wait for these
            absent = first
        return f"{_named(absent)} {ABSENT}" if absent else f"{_named(waiting)} did not answer"

    def _not_failed(self) -> list[int]:
        return [rank for rank in self.others if not self.store.check([f"failed/{rank}"])]


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "a rank"
