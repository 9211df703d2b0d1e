"""Waits of ranks that call two pipelines in different orders: each rank waits in one for the other, and neither can continue.

rank 0   generator.step ── waits for rank 1 ──┐
rank 1   critic.step    ── waits for rank 0 ──┴─► an error on both, before the timeout

After a long wait, a rank notes the pipeline in which its main thread waits. A wait that lasts for PATIENCE, while the same waits of other
ranks last, is crossed: no message is under way for so long.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from threading import main_thread

from torch.distributed.distributed_c10d import Store

from pipecompile.distributed.failures.awake_clock import awake
from pipecompile.distributed.failures.board_watch import PATIENCE, PendingWait
from pipecompile.distributed.failures.failure_report import FailureReport, RankLost
from pipecompile.distributed.protocol import CALLS

__all__ = ["CrossedWaits"]

_SERIAL = count()


class CrossedWaits:
    """The waits in one of the pipelines of a rank, `number` of those on the same ranks. `store` is that of all of them."""

    def __init__(self, store: Store, rank: int, number: int) -> None:
        self._store, self._rank, self._number = store, rank, number
        self._since, self._seen, self._is_noted, self._is_crossed = 0.0, "", False, False
        self._set("")

    def note(self, awaited: int, wait: PendingWait) -> None:
        """Note that the main thread of this rank waits for another."""
        if wait.thread == main_thread().ident:
            self._is_noted = True
            self._set(f"{self._number} {awaited} {next(_SERIAL)}")

    def clear(self) -> None:
        """Note that it does not wait, unless the wait was crossed: then others have to find it, too."""
        if self._is_noted and not self._is_crossed:
            self._is_noted, self._seen = False, ""
            self._set("")

    def check(self, awaited: int) -> None:
        """Raise RankLost if the wait for this rank has been crossed for long."""
        waits = self._around(awaited) if self._is_noted else []
        found = str(waits)
        if not waits or found != self._seen:
            self._seen, self._since = found, awake()
        elif awake() - self._since >= PATIENCE and (lost := self.found(awaited)) is not None:
            self._is_crossed = True
            raise lost

    def found(self, awaited: int) -> RankLost | None:
        """Return the reason why waits for this rank cannot end if they are crossed now."""
        if not (waits := self._around(awaited)):
            return None
        others = [
            f"rank {rank} waits for rank {other} in a call of number {number}" for rank, number, other, _ in waits
        ]
        here = f"rank {self._rank} waits in number {self._number} of the pipelines of these ranks"
        what = f"{', and '.join(others)}, while {here}: all ranks call their pipelines in one order"
        action = "beside calls of several pipelines in different orders"
        return RankLost(FailureReport(awaited, what, action=action), is_posted=False)

    def _around(self, rank: int) -> list[tuple[int, int, int, int]]:
        """Return the waits from `rank` on, each with its rank, pipeline, awaited rank and serial number, if they lead to this rank
        and through another pipeline.
        """
        waits: list[tuple[int, int, int, int]] = []
        while rank != self._rank and rank not in {wait[0] for wait in waits}:
            if not (text := self._get(rank)):
                return []
            number, awaited, serial = map(int, text.split())
            waits.append((rank, number, awaited, serial))
            rank = awaited
        is_crossed = rank == self._rank and any(number != self._number for _, number, _, _ in waits)
        return waits if is_crossed else []

    def _set(self, text: str) -> None:
        with suppress(RuntimeError):
            self._store.set(CALLS.at(self._rank), text)

    def _get(self, rank: int) -> str:
        with suppress(RuntimeError):
            if self._store.check([CALLS.at(rank)]):
                return str(self._store.get(CALLS.at(rank)).decode())
        return ""
